"""The refusals that all configs share: each names the field, what was found and what was wanted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args

from .. import InputError


class ConfigError(InputError):
    """A model's configuration cannot be right."""


class CheckpointError(InputError):
    """A checkpoint is missing something, holds something unexpected, or cannot be trusted."""


def check_count(name: str, value: int, most: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} is {value!r}, wanted a whole number from 1 to {most}")


def check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise ConfigError(f"{name} is {value!r}, wanted a finite number above 0")


def check_choice(name: str, value: str, literal: Any) -> None:
    """`literal` is a Literal[...] of the choices."""
    if value not in get_args(literal):
        raise ConfigError(f"{name} is {value!r}, wanted one of {', '.join(get_args(literal))}")


def did_you_mean(name: str, known: Iterable[str], *, least: float = 0.6) -> str:
    """The nearest of what there is, as the middle of a sentence; nothing where none is as alike as `least`."""
    near = difflib.get_close_matches(name, known, n=2, cutoff=least)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
