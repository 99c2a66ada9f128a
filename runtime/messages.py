"""What a user gives to a chat: messages and tools, checked one by one, so that an error names the place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .tokenizer import PromptError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and what else the template reads
Messages: TypeAlias = "str | Sequence[Message]"  # a text alone is what the user says

_WANTED = '{"role": "user", "content": "..."}'
_DEEPEST = 64  # lists and objects in each other; what templates read (tools, JSON schemas) has about ten


def read_messages(messages: Messages, tools: Sequence[Any] | None = None) -> list[Message]:
    """The messages as a list that a template can be given, or PromptError."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        found = "one message alone" if isinstance(messages, Mapping) else f"a {type(messages).__name__}"
        raise PromptError(f"messages is {found}; give a text, or a list of messages such as {_WANTED}")
    if not messages:
        raise PromptError("there are no messages")
    read = [_checked(message, f"message {index}") for index, message in enumerate(messages)]
    if tools is not None:
        if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
            raise PromptError(f"tools is a {type(tools).__name__}; give a list of tools")
        for index, tool in enumerate(tools):
            _check_plain(tool, f"tool {index}")
    return read


def _checked(message: object, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(f"{name} is {_short(message)}; wanted {_WANTED}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        found = f"has the role {_short(role)}" if "role" in message else "has no role"
        raise PromptError(f"{name} {found}; wanted {_WANTED}")
    if content is None and not message.keys() - {"role", "content"}:  # a call of a tool has no content
        raise PromptError(f"{name} (role {_short(role)}) has no content; wanted {_WANTED}")
    if content is not None and not isinstance(content, str | Sequence | Mapping):
        raise PromptError(f"{name} has the content {_short(content)}; it must be a text or a list of parts")
    _check_plain(message, name)
    return message


def _check_plain(value: object, name: str) -> None:
    """The template runs in a process of its own, so what it reads must be JSON."""
    try:
        _check_depth(value, _DEEPEST)
        json.dumps(value, ensure_ascii=False).encode()  # half a character (a lone surrogate) is no text
    except (TypeError, ValueError) as error:
        raise PromptError(f"{name} must be plain data: {error}") from error


def _check_depth(value: object, most: int) -> None:
    if most == 0:
        raise ValueError(f"lists and objects are more than {_DEEPEST} deep")
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {_short(key)} is no text")
            _check_depth(part, most - 1)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_depth(part, most - 1)


def _short(value: object) -> str:
    return repr(value)[:60]
