"""Values out of a file that somebody else wrote, looked up by key and checked: JSON or GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .checks import ConfigError

Values = Mapping[str, object]


def shown(value: object) -> str:
    """A value for a message: on one line, of bounded length, with nothing that a terminal obeys."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 120 else text[:100] + "..." + text[-10:]


def whole(
    values: Values, key: str, missing: int | None = None, *, least: int = 1, most: int = 2**31 - 1
) -> int:
    """A whole number; where the key is absent or null, `missing` if there is such a default."""
    value = values.get(key)
    if value is None and missing is not None:
        return missing
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{key} is {shown(value)}, wanted a whole number from {least} to {most}")
    return value


def number(values: Values, key: str, missing: float | None = None) -> float:
    """A finite number above 0."""
    value = values.get(key)
    if value is None and missing is not None:
        return missing
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        try:
            return float(value)
        except OverflowError:  # JSON may hold a whole number of any length
            pass
    raise ConfigError(f"{key} is {shown(value)}, wanted a finite number above 0")


def flag(values: Values, key: str, missing: bool | None = None) -> bool:
    value = values.get(key)
    if value is None and missing is not None:
        return missing
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {shown(value)}, wanted true or false")
    return value


def string(values: Values, key: str, missing: str | None = None) -> str:
    value = values.get(key)
    if value is None and missing is not None:
        return missing
    if not isinstance(value, str):
        raise ConfigError(f"{key} is {shown(value)}, wanted a text")
    return value
