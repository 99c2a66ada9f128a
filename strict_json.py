"""JSON to frozen dataclasses and back, strictly: what is missing, unknown or of another type is named.

The dataclasses' own annotations are the schema: `int`, `str`, `float`, `None`, `Literal`, `X | Y`,
`tuple[X, ...]`, `dict[str, X]`, nested dataclasses, and `Any` for a part that is free JSON.
"""

from __future__ import annotations

import functools
import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class SchemaError(Exception):
    """Data that does not fit; the message begins with the place, e.g. `graphs.decode.file`."""


def decode(kind: type[T], data: object, place: str = "") -> T:
    """`data`, as json.loads gives it, as an instance of the dataclass `kind`."""
    return cast("T", _decode(kind, data, place))


def encode(value: object) -> Any:
    """What json.dumps takes, for any value that `decode` can give."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: encode(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [encode(part) for part in value]
    return value


def _decode(kind: Any, data: object, place: str) -> object:
    if kind is Any:
        return data
    if is_dataclass(kind):
        return _decode_record(kind, data, place)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in {Union, types.UnionType}:
        return _decode_union(arguments, data, place)
    if origin is Literal:
        # a bool equals 0 or 1, and 1.0 equals 1: compare the types too
        if any(data == choice and type(data) is type(choice) for choice in arguments):
            return data
        raise SchemaError(
            f"{place} is {data!r}, expected {' or '.join(repr(choice) for choice in arguments)}"
        )
    if origin is tuple:
        items = _expect(list, data, place)
        return tuple(_decode(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(items))
    if origin is dict:
        entries = _expect(dict, data, place)
        return {key: _decode(arguments[1], value, _join(place, key)) for key, value in entries.items()}
    if kind is float and type(data) is int:
        return float(data)
    return _expect(kind, data, place)


def _decode_record(kind: Any, data: object, place: str) -> object:
    entries = _expect(dict, data, place)
    hints = _hints(kind)
    for name in hints:
        if name not in entries:
            raise SchemaError(f"{_join(place, name)} is missing")
    for name in entries:
        if name not in hints:
            raise SchemaError(f"{_join(place, name)} is not a known key")
    return kind(**{name: _decode(hint, entries[name], _join(place, name)) for name, hint in hints.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of a record's fields, in their order."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _decode_union(choices: tuple[Any, ...], data: object, place: str) -> object:
    if data is None and type(None) in choices:
        return None
    reason = SchemaError(f"{place} has a wrong value")
    for choice in sorted(
        choices, key=lambda choice: _in_common(choice, data)
    ):  # the likeliest's reason is told
        if choice is type(None):
            continue
        try:
            return _decode(choice, data, place)
        except SchemaError as error:
            reason = error
    raise reason


def _in_common(kind: Any, data: object) -> int:
    """How many of a record's keys are there."""
    if not is_dataclass(kind) or not isinstance(data, dict):
        return 0
    return sum(field.name in data for field in fields(kind))


def _expect(kind: Any, data: object, place: str) -> Any:
    if kind is type(None) and data is None:
        return None
    if type(data) is kind:  # not isinstance: a bool is no int here
        return data
    words = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}
    words |= {bool: "true or false", type(None): "null"}
    raise SchemaError(f"{place or 'the top'} is {_short(data)}, expected {words.get(kind, kind.__name__)}")


def _short(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
