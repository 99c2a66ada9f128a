"""Chat messages to a prompt, by the checkpoint's own template.

Templates are programs from strangers. They run in Jinja's sandbox, in a process of their own that is
limited in time, memory and output (see `template_worker.py`). It is started at the first use (about 0.1 s),
or before that by `start_worker`, and then kept: a further render takes under a millisecond.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from . import template_worker
from .bundle import Bundle
from .messages import Messages, read_messages
from .tokenizer import PromptError, Tokenizer

RENDER_SECONDS = 2.0
START_SECONDS = 20.0  # on a busy machine


class ChatTemplateError(PromptError):
    """The template refused the messages, or misbehaved."""


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: what templates read as variables: bos_token, eos_token, pad_token."""
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The messages as one text. `add_generation_prompt`: with the beginning of the assistant's answer."""
        variables = {
            **self._special_tokens,
            "messages": read_messages(messages, tools),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _render(self._source, variables)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The messages as ids. Special tokens come from the template alone: in a message they stay text."""
        given = read_messages(messages, tools)
        marker = _Marker(tokenizer.specials, self._source + json.dumps([given, tools], ensure_ascii=False))
        masked = [
            {key: value if key == "role" else marker.mask(value) for key, value in message.items()}
            for message in given
        ]
        text = self.render(masked, tools=marker.mask(tools), add_generation_prompt=add_generation_prompt)
        if not marker.used:  # the usual case, and exactly what transformers does
            return tokenizer.encode(text, add_special=False, parse_special=True)
        return tokenizer.encode_marked(text, marker.marks)


def open_template(bundle: Bundle, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The bundle's own, if it has one."""
    source = bundle.read("chat_template.jinja")
    if source is None or tokenizer is None:
        return None
    generation = bundle.manifest.generation
    ids = {"bos_token": generation.bos_token_id, "pad_token": generation.pad_token_id}
    ids["eos_token"] = next(iter(generation.eos_token_ids), None)
    names = {name: tokenizer.token(token_id) for name, token_id in ids.items() if token_id is not None}
    specials = {name: token for name, token in names.items() if token is not None}
    return ChatTemplate(source.decode("utf-8", "replace"), specials)


class _Marker:
    """Puts single characters that occur nowhere else in place of special tokens' names in users' texts.

    The template sees everything else as it is. A text that ends with the beginning of such a name, or begins
    with the end of one, gets a mark there that stands for nothing, so that two texts cannot join to one.
    """

    def __init__(self, specials: frozenset[str], corpus: str) -> None:
        present = set(corpus)
        free = (chr(code) for code in range(0x100000, 0x10FFF0) if chr(code) not in present)
        self._mark_of = {special: next(free) for special in specials}
        self._border = next(free)
        self.marks = {mark: special for special, mark in self._mark_of.items()} | {self._border: ""}
        by_length = sorted(specials, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        self._heads = tuple({special[:size] for special in specials for size in range(1, len(special))})
        self._tails = tuple({special[size:] for special in specials for size in range(1, len(special))})
        self.used = False

    def mask(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._mask_text(value)
        if isinstance(value, Mapping):
            return {self.mask(key): self.mask(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask(part) for part in value]
        return value

    def _mask_text(self, text: str) -> str:
        masked = self._pattern.sub(lambda match: self._mark_of[match[0]], text)
        body = masked.strip()  # templates trim: the border goes inside the white space
        start = len(masked) - len(masked.lstrip())
        head = self._border if body.startswith(self._tails) else ""
        tail = self._border if body.endswith(self._heads) else ""
        masked = masked[:start] + head + body + tail + masked[start + len(body) :]
        self.used = self.used or masked != text
        return masked


# --- the process -----------------------------------------------------------------------------------------


class _Worker:
    def __init__(self) -> None:
        command = [sys.executable, "-I", str(Path(template_worker.__file__))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(  # noqa: S603 (our own file, no shell)
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )
        self._is_ready = False

    def render(self, source: str, variables: dict[str, Any]) -> dict[str, str]:
        if not self._is_ready:
            self._ask(None, START_SECONDS)
            self._is_ready = True
        return self._ask({"template": source, "variables": variables}, RENDER_SECONDS)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes and waits

    def _ask(self, request: object, seconds: float) -> dict[str, str]:
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            if request is not None:
                template_worker.write_message(cast("BinaryIO", self._process.stdin), request)
            reply = template_worker.read_message(cast("BinaryIO", self._process.stdout))
        except (OSError, ValueError):  # a broken pipe, or half a reply
            reply = None
        except BaseException:  # Ctrl-C: its reply would answer the next request
            self.close()
            raise
        finally:
            timer.cancel()
        if not isinstance(reply, dict):
            self.close()
            raise _WorkerDiedError
        return reply


class _WorkerDiedError(Exception):
    pass


_worker: _Worker | None = None
_lock = threading.Lock()


def start_worker() -> None:
    """Begin to start the process, for who knows that a chat will come and has other work meanwhile."""
    global _worker  # noqa: PLW0603 (one a process, whatever the number of models)
    with _lock, contextlib.suppress(OSError):  # the first render says what is wrong
        _worker = _worker or _Worker()


def _render(source: str, variables: dict[str, Any]) -> str:
    with _lock:
        try:
            reply = _ask_worker(source, variables)
        except _WorkerDiedError as error:
            raise ChatTemplateError(
                f"the chat template was stopped: it ran for more than {RENDER_SECONDS:g} s or used too much memory"
            ) from error
        except OSError as error:
            raise ChatTemplateError(
                f"the chat template's process cannot be started: {error.strerror}"
            ) from error
    if "error" in reply:
        raise ChatTemplateError(f"the chat template failed: {reply['error'][:300]}")
    return reply["text"]


def _ask_worker(source: str, variables: dict[str, Any]) -> dict[str, str]:
    global _worker  # noqa: PLW0603 (one a process, whatever the number of models)
    started = time.monotonic()
    old, _worker = _worker, None  # it comes back when it has answered
    worker = old or _Worker()
    try:
        reply = worker.render(source, variables)
    except _WorkerDiedError:
        if old is None or time.monotonic() - started > RENDER_SECONDS / 2:
            raise
        worker = _Worker()  # it was killed while it was idle
        reply = worker.render(source, variables)
    _worker = worker
    return reply


def _close_worker() -> None:
    global _worker
    worker, _worker = _worker, None
    if worker is not None:
        worker.close()


def _forget_worker() -> None:
    global _worker, _lock
    _worker, _lock = None, threading.Lock()


atexit.register(_close_worker)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_worker)  # the pipes are the parent's
