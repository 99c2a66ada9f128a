"""Where the prompt comes from: an argument, a file, standard input, or token ids."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

import click

from .. import InputError

LIMIT = 64 << 20  # bytes; a million tokens of text are about 4 MB

# How PNG, JPEG, GIF and TIFF begin; WebP has its length before its name.
_IMAGES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")

Prompt = str | list[int]  # as runtime/model.py has it


class PromptSourceError(InputError):
    """The prompt cannot be read."""


def read_prompt(argument: str | None, file: str | None, ids: str | None) -> Prompt | None:
    """The prompt, or None where none was given: then there is a terminal at standard input."""
    given = [
        name for name, value in (("INPUT", argument), ("--file", file), ("--ids", ids)) if value is not None
    ]
    if len(given) > 1:
        raise click.UsageError(f"the prompt is given twice, by {given[0]} and {given[1]}")
    if ids is not None:
        return parse_ids(ids)
    if file is not None:
        return _not_empty(_read_file(file), file)
    if argument is not None and argument != "-":
        _refuse_image(_checked(argument))
        return _not_empty(argument, "INPUT")
    if argument == "-" or not stdin_is_terminal():
        return _not_empty(read_stdin(), "standard input")
    return None


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise PromptSourceError(f"--ids is {text[:60]!r}, wanted token ids such as 1,42,7") from error


def read_stdin() -> str:
    if sys.stdin is None:  # closed by whoever started us
        return ""
    return _decode(_read_limited(sys.stdin.buffer, "standard input"), "standard input")


def read_stdin_line() -> str | None:
    """The next line without its end; None at the end of the input."""
    if sys.stdin is None:
        return None
    line = sys.stdin.buffer.readline(LIMIT + 1)
    if len(line) > LIMIT:
        raise PromptSourceError(f"standard input has a line of more than {LIMIT >> 20} MiB")
    return _decode(line, "standard input") if line else None


def _read_file(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (it may be a pipe, <(command))
            return _decode(_read_limited(file, path), path)
    except OSError as error:
        raise PromptSourceError(f"--file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise PromptSourceError(f"--file {path!r} cannot be read: {error}") from error


def _read_limited(file: BinaryIO, name: str) -> bytes:
    content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise PromptSourceError(f"{name} has more than {LIMIT >> 20} MiB, too much for a prompt")
    return content


def _decode(content: bytes, name: str) -> str:
    """UTF-8 text, without the newline that editors and `echo` put at its end."""
    try:
        return content.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise PromptSourceError(f"{name} is not UTF-8 text (byte {error.start})") from error


def _refuse_image(argument: str) -> None:
    """Who names a picture means the picture, and the model would go on from its file name."""
    if _is_image(Path(argument)):
        raise PromptSourceError(
            f"{argument} is an image file, and this bundle takes text; if you mean these very words, give them on "
            "standard input (a file of text goes with --file)"
        )


def _is_image(path: Path) -> bool:
    try:
        if not path.is_file():  # a pipe would wait
            return False
        with path.open("rb") as file:
            start = file.read(12)
    except (OSError, ValueError):  # too long for a name, or with a NUL: words
        return False
    return start.startswith(_IMAGES) or (start[:4] == b"RIFF" and start[8:] == b"WEBP")


def _checked(text: str) -> str:
    """Arguments that were not UTF-8 come with lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptSourceError("INPUT is not UTF-8 text") from error
    return text


def _not_empty(text: str, name: str) -> str:
    if not text:
        raise PromptSourceError(f"the prompt is empty ({name})")
    return text
