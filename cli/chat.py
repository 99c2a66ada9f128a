"""`tfmx run --chat`: a conversation, line by line, with a few commands that begin with a slash."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import InputError, TfmxError
from .answer import Answer, Printer
from .console import say, write_line
from .output_file import write_whole
from .prompt import PromptSourceError, read_stdin_line, stdin_is_terminal

if TYPE_CHECKING:
    from ..runtime.model import Model
    from ..runtime.sampling import SamplingOptions

HELP = """\
/reset      forget the conversation
/save FILE  write the conversation as JSON, to a new file
/save! FILE the same, also over a file that is there
/quit       end, as Ctrl-D does
/help       this
Ctrl-C stops an answer. A line that begins with a space is never a command."""
_PROMPT = "> "


class ChatError(InputError):
    """The conversation cannot be had, or a command in it cannot be done."""


class Conversation:
    def __init__(self, model: Model, sampling: SamplingOptions, printer: Printer, system: str | None) -> None:
        if model.template is None:
            raise ChatError(f"{model.bundle.path} has no chat template; run it without --chat")
        self._model, self._sampling, self._printer = model, sampling, printer
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._start)

    def answer(self, text: str) -> None:
        """One turn. A turn that fails is forgotten; of one that is interrupted, what was said is kept."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = Answer()
        try:
            self._printer.show(self._model.chat(messages, self._sampling), answer)
        finally:
            if answer.text:
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]

    def talk(self) -> None:
        """Turns until the end of the input. At a terminal nothing but that ends it; in a pipe a failure does."""
        if stdin_is_terminal():
            self._talk_at_terminal()
            return
        while (line := read_stdin_line()) is not None:
            if not self._take(line):
                return

    def _talk_at_terminal(self) -> None:
        say(f"{self._model.bundle.path}: /help lists the commands, Ctrl-D ends")
        while True:
            try:
                line = _ask()
                if line is None or not self._take(line):
                    return
            except KeyboardInterrupt:  # the answer, or the line that was being typed
                say("")
            except TfmxError as error:
                say(f"tfmx: error: {error}")

    def _take(self, line: str) -> bool:
        """One line of input; False when it ends the conversation."""
        if line.startswith("/"):
            return self._obey(*line.split(maxsplit=1))
        if line.strip():
            self.answer(line.strip())
        return True

    def _obey(self, command: str, argument: str = "") -> bool:
        if command == "/quit":
            return False
        if command == "/help":
            say(HELP)
        elif command == "/reset":
            self.messages = list(self._start)
            say("the conversation is forgotten")
        elif command in {"/save", "/save!"}:
            self._save(argument.strip(), overwrite=command == "/save!")
        else:
            raise ChatError(f"there is no command {command}; /help lists them")
        return True

    def _save(self, name: str, *, overwrite: bool) -> None:
        if not name:
            raise ChatError("/save needs a file name")
        path = Path(name).expanduser()
        if os.path.lexists(path) and not path.is_file():
            raise ChatError(f"{path} is no file that can be replaced; choose another name")
        if os.path.lexists(path) and not overwrite:
            raise ChatError(f"{path} exists; `/save! {name}` overwrites it")
        content = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        write_whole(path, lambda file: file.write(content.encode()))
        say(f"saved to {path}")


def _ask() -> str | None:
    """A line typed at the terminal; None for Ctrl-D."""
    try:
        if sys.stdout is not None and sys.stdout.isatty():
            _load_line_editing()
            return input(_PROMPT)
        sys.stderr.write(_PROMPT)  # stdout is a file or a pipe, and only answers belong there
        sys.stderr.flush()
        return read_stdin_line()
    except EOFError:
        write_line()  # the shell's prompt begins on a line of its own
        return None
    except UnicodeDecodeError as error:
        raise PromptSourceError(f"that is not UTF-8 text (byte {error.start})") from error


def _load_line_editing() -> None:
    """`input` edits lines and remembers them once this is imported."""
    try:
        import readline  # noqa: F401
    except ImportError:  # Windows has its own
        return
