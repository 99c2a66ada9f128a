"""A GGUF file taken apart into its entries and put together again, whatever they have become.

magic, version, number of tensors, number of values, the values, the tensors' entries, padding, the tensors' bytes
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
_ALIGNMENT = 32


@dataclass
class Value:
    key: bytes
    kind: int
    items: int  # the kind of a list's items
    value: Any  # bytes, a number, or a list of those
    count: int | None = None  # what a list says that it has; None is the truth


@dataclass
class Entry:
    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass
class GgufFile:
    version: int
    values: list[Value]
    tensors: list[Entry]
    data: bytes
    more_values: int = 0  # than there are, in the header
    more_tensors: int = 0

    def to_bytes(self) -> bytes:
        head = b"GGUF" + struct.pack("<I", self.version & 0xFFFFFFFF)
        head += _number("Q", len(self.tensors) + self.more_tensors) + _number(
            "Q", len(self.values) + self.more_values
        )
        head += b"".join(_written_value(value) for value in self.values)
        for entry in self.tensors:
            head += _written_text(entry.name) + _number("I", len(entry.dims))
            head += (
                b"".join(_number("Q", dim) for dim in entry.dims)
                + _number("I", entry.kind)
                + _number("Q", entry.offset)
            )
        return head + bytes(-len(head) % _ALIGNMENT) + self.data


def read_gguf(data: bytes) -> GgufFile:
    version, n_tensors, n_values = struct.unpack_from("<IQQ", data, 4)
    at = 24
    values, tensors = [], []
    for _ in range(n_values):
        value, at = _read_value(data, at)
        values.append(value)
    for _ in range(n_tensors):
        name, at = _read_text(data, at)
        (n_dims,) = struct.unpack_from("<I", data, at)
        dims = list(struct.unpack_from(f"<{n_dims}Q", data, at + 4))
        kind, offset = struct.unpack_from("<IQ", data, at + 4 + 8 * n_dims)
        at += 16 + 8 * n_dims
        tensors.append(Entry(name, dims, kind, offset))
    return GgufFile(version, values, tensors, data[at + -at % _ALIGNMENT :])


def _read_text(data: bytes, at: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + size], at + 8 + size


def _read_value(data: bytes, at: int) -> tuple[Value, int]:
    key, at = _read_text(data, at)
    (kind,) = struct.unpack_from("<I", data, at)
    at += 4
    if kind != LIST:
        value, at = _read_item(data, at, kind)
        return Value(key, kind, 0, value), at
    items, count = struct.unpack_from("<IQ", data, at)
    at += 12
    found = []
    for _ in range(count):
        value, at = _read_item(data, at, items)
        found.append(value)
    return Value(key, kind, items, found), at


def _read_item(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == TEXT:
        return _read_text(data, at)
    form = f"<{_FORMS[kind]}"
    return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)


def _written_value(value: Value) -> bytes:
    head = _written_text(value.key) + _number("I", value.kind)
    if value.kind != LIST:
        return head + _written_item(value.kind, value.value)
    items = value.value if isinstance(value.value, list) else [value.value]
    count = len(items) if value.count is None else value.count
    return (
        head
        + _number("I", value.items)
        + _number("Q", count)
        + b"".join(_written_item(value.items, item) for item in items)
    )


def _written_item(kind: int, item: Any) -> bytes:
    """As the kind says, if it can be; else as what it is, or as its first item."""
    if isinstance(item, list):
        item = item[0] if item else 0
    if isinstance(item, bytes):
        return _written_text(item)
    form = _FORMS.get(kind, "I")
    if form in "fd":
        return struct.pack(f"<{form}", max(-3e38, min(3e38, item)) if math.isfinite(item) else item)
    return _number("B" if form == "?" else form, int(item) if math.isfinite(item) else 0)


def _written_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _number(form: str, value: int) -> bytes:
    """What fits of it."""
    size = struct.calcsize(f"<{form}")
    return (value % (1 << (8 * size))).to_bytes(size, "little")
