"""Reads protobuf's wire format, strictly, one message level at a time.

A schema lists the fields that a message may have; any other field, a field of another type, a repeated field
that should be single, and bytes that end early are errors. Payloads are views: nothing is copied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["int", "ints", "float", "floats", "text", "texts", "bytes", "messages", "message"]
Schema = dict[int, tuple[str, Kind]]
Value = int | float | str | memoryview

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_SINGLE = {"int", "float", "text", "bytes", "message"}
_INTS, _FLOATS, _TEXTS = {"int", "ints"}, {"float", "floats"}, {"text", "texts"}
_VIEWS = {"bytes", "message", "messages"}


class WireError(Exception):
    """Bytes that are no message of the schema."""


@dataclass(frozen=True, slots=True)
class Message:
    values: dict[str, list[Value]]

    def has(self, name: str) -> bool:
        return name in self.values

    def number(self, name: str, default: int = 0) -> int:
        value = self.values[name][-1] if name in self.values else default
        assert isinstance(value, int)
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.values[name][-1] if name in self.values else default
        assert isinstance(value, str)
        return value

    def numbers(self, name: str) -> list[int]:
        return [value for value in self.values.get(name, ()) if isinstance(value, int)]

    def floats(self, name: str) -> list[float]:
        return [value for value in self.values.get(name, ()) if isinstance(value, float)]

    def texts(self, name: str) -> list[str]:
        return [value for value in self.values.get(name, ()) if isinstance(value, str)]

    def views(self, name: str) -> list[memoryview]:
        return [value for value in self.values.get(name, ()) if isinstance(value, memoryview)]


def read_message(data: memoryview, schema: Schema, what: str) -> Message:
    """The fields of one message; `what` names it in errors."""
    values: dict[str, list[Value]] = {}
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if number not in schema:
            raise WireError(f"{what} holds field {number}, which the exporter does not write")
        name, kind = schema[number]
        found, position = _payload(data, position, wire, what)
        if kind in _SINGLE and name in values:
            raise WireError(f"{what} holds {name} twice")
        values.setdefault(name, []).extend(_convert(found, wire, kind, what, name))
    return Message(values)


def _payload(data: memoryview, position: int, wire: int, what: str) -> tuple[int | memoryview, int]:
    if wire == _VARINT:
        return _varint(data, position)
    if wire == _LENGTH:
        size, position = _varint(data, position)
    elif wire in {_FIXED32, _FIXED64}:
        size = 4 if wire == _FIXED32 else 8
    else:
        raise WireError(f"{what} has wire type {wire}")
    if size > len(data) - position:
        raise WireError(f"{what} ends early")
    return data[position : position + size], position + size


def _convert(found: int | memoryview, wire: int, kind: Kind, what: str, name: str) -> Sequence[Value]:
    if isinstance(found, int):
        if kind in _INTS:
            return (_signed(found),)
    elif wire == _LENGTH:
        if kind in _VIEWS:
            return (found,)
        if kind in _TEXTS:
            try:
                return (str(found, "utf-8"),)
            except UnicodeDecodeError as error:
                raise WireError(f"{what}, {name} is not UTF-8") from error
        if kind == "ints":
            return _packed_ints(found)
        if kind == "floats" and len(found) % 4 == 0:
            return struct.unpack(f"<{len(found) // 4}f", found)
    elif wire == _FIXED32 and kind in _FLOATS:
        return struct.unpack("<f", found)
    raise WireError(f"{what}, {name} has wire type {wire}")


def _packed_ints(found: memoryview) -> list[int]:
    values, position = [], 0
    while position < len(found):
        value, position = _varint(found, position)
        values.append(_signed(value))
    return values


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    if position < len(data) and data[position] < 0x80:  # nearly all
        return data[position], position + 1
    value = shift = 0
    while shift < 70:  # ten bytes hold 64 bits
        if position >= len(data):
            raise WireError("a number ends early")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise WireError("a number has more than 64 bits")
            return value, position
        shift += 7
    raise WireError("a number has more than ten bytes")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
