"""Values at the edges: what an attribute, a size or a field of JSON is replaced with."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import numpy as np

INTS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    -2,
    8,
    64,
    -64,
    1000,
    2**15,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
)
FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-45,
    1e-10,
    -1e-10,
    1e30,
    -1e30,
    3.4028235e38,
    math.inf,
    -math.inf,
    math.nan,
    0.5,
)
TEXTS = (
    "",
    "x",
    "\0",
    "../x",
    "/etc/passwd",
    "a" * 300,
    "é\u202e",
    "%s%n",
    "NaN",
    "linear",
    "sum",
    "reflect",
)

DEEP = "<nested deeply>"  # stands for lists in lists in lists, which Python cannot write


def json_text(content: Any, **form: Any) -> str:
    return json.dumps(content, **form).replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000)


def extreme_int(rng: Random, near: int | None = None) -> int:
    if near is not None and rng.random() < 0.4:
        return rng.choice((near + 1, near - 1, -near, near * 2, near // 2, near * 1000))
    return rng.choice(INTS)


def small_int(rng: Random) -> int:
    """Beyond what is usual, yet small enough to get past checks of range."""
    return rng.choice((0, 0, 1, 1, -1, -2, 2, 3, 4, 5, 8, 16, 100))


def extreme_float(rng: Random) -> float:
    return rng.choice(FLOATS)


def extreme_json(rng: Random, now: Any) -> Any:
    """Another value for a field: of its own type most often."""
    kinds = {bool: "bool", int: "int", float: "float", str: "text", list: "list", dict: "dict"}
    kind = kinds.get(type(now), "null")
    if rng.random() < 0.35:
        kind = rng.choice((*kinds.values(), "null", "deep"))
    if kind == "bool":
        return not now if isinstance(now, bool) else rng.random() < 0.5
    if kind == "int":
        near = now if type(now) is int else None
        return extreme_int(rng, near) if rng.random() < 0.95 else 10**400
    if kind == "float":
        return extreme_float(rng)
    if kind == "text":
        return rng.choice((*TEXTS, "\ud800")) if rng.random() < 0.7 or not isinstance(now, str) else now + "x"
    if kind == "list":
        return rng.choice(
            ([], [None], [0] * 1000, [[]], *([now * 2, now[:-1], now[::-1]] if isinstance(now, list) else []))
        )
    if kind == "dict":
        return rng.choice(({}, {"": 0}, {"x": None}, *([{**now, "x": 1}] if isinstance(now, dict) else [])))
    if kind == "deep":
        return DEEP
    return None


def extreme_array(rng: Random, array: np.ndarray) -> np.ndarray:
    """The same shape and type, with one, some or all values at an edge."""
    found = np.array(array)
    flat = found.reshape(-1)
    if not flat.size:
        return found
    count = rng.choice((1, 1, 2, flat.size))
    places = rng.sample(range(flat.size), min(count, flat.size))
    if found.dtype == bool:
        flat[places] = ~flat[places]
    elif found.dtype.kind == "f":
        value = extreme_float(rng)
        with np.errstate(over="ignore"):
            flat[places] = np.asarray(value).astype(found.dtype)
    else:
        info = np.iinfo(found.dtype)
        value = small_int(rng) if rng.random() < 0.6 else extreme_int(rng, int(flat[places[0]]))
        if rng.random() < 0.2:
            value = info.min
        flat[places] = max(int(info.min), min(int(info.max), value))
    return found


def shown(value: Any) -> str:
    """For the report: short, whatever it is."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 80 else f"{text[:77]}..."
