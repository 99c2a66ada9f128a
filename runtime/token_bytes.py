"""The bytes that one token stands for: it may be a part of a character, which no text can show.

A tokenizer's own `decode` is made for whole answers: of a lone token it drops the space before a word, or gives U+FFFD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    def __init__(self, data: bytes, spelling: Callable[[int], str | None]) -> None:
        """`data`: the content of tokenizer.json, whose decoder says how tokens are written; `spelling`: of each."""
        content = json.loads(data)
        self._spelling = spelling
        self._added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
        self._steps = list(_steps(content.get("decoder")))
        self._from_letters = {letter: byte for byte, letter in _byte_letters()}

    def __call__(self, token_id: int) -> bytes | None:
        """None for an id that is no token: vocabularies are padded."""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        token = self._spelling(token_id)
        if token is None:
            return None
        for step in self._steps:
            kind = step["type"]
            if kind == "ByteLevel" and all(letter in self._from_letters for letter in token):
                return bytes(self._from_letters[letter] for letter in token)
            if kind == "ByteFallback" and (match := _BYTE.fullmatch(token)):
                return bytes([int(match[1], 16)])
            if kind == "Metaspace":
                token = token.replace(step["replacement"], " ")
            if kind == "Replace" and "String" in step["pattern"]:
                token = token.replace(step["pattern"]["String"], step["content"])
        return token.encode()


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _steps(part)
    else:
        yield decoder


def _byte_letters() -> Iterator[tuple[int, str]]:
    """GPT-2's alphabet: printable bytes are themselves, the other 68 are the letters from U+0100 on."""
    others = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            yield byte, chr(byte)
        else:
            yield byte, chr(0x100 + others)
            others += 1
