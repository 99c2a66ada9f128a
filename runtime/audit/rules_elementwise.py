"""Shapes of operators that look at each element alone, and of small integers that are shapes themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .contract import Call, ContractError, Elements, Made, Value, broadcast, want_rank
from .dims import Dim, add, floor_quotient, is_at_least, maximum, minimum, multiply, subtract

_Arithmetic = Callable[[Dim, Dim], Dim]


def same(call: Call) -> Sequence[Made]:
    value = call.given(0)
    return [Made(value.shape)]


def kept(call: Call) -> Sequence[Made]:
    """Of Identity, and of Cast: whole numbers stay what they are, if the result is one."""
    value = call.given(0)
    is_whole = call.attributes.get("to", 7) in {6, 7}
    return [Made(value.shape, value.elements if is_whole and _fits_32(value.elements) else None)]


def _fits_32(elements: Elements | None) -> bool:
    """Symbols are lengths, which do; plain numbers may not."""
    return elements is not None and all(
        not isinstance(element, int) or abs(element) < 2**31 for element in elements
    )


def negated(call: Call) -> Sequence[Made]:
    value = call.given(0)
    elements = value.elements
    return [Made(value.shape, None if elements is None else tuple(multiply(e, -1) for e in elements))]


def broadcasting(call: Call) -> Sequence[Made]:
    return [Made(broadcast(*(value.shape for value in call.inputs if value is not None)))]


def arithmetic(compute: _Arithmetic) -> Callable[[Call], Sequence[Made]]:
    def rule(call: Call) -> Sequence[Made]:
        values = [call.given(index) for index in range(len(call.inputs))]
        shape = broadcast(*(value.shape for value in values))
        elements = values[0].elements
        for value in values[1:]:
            elements = _each(compute, elements, value.elements)
        return [Made(shape, elements if len(shape) <= 1 else None)]

    return rule


def _each(compute: _Arithmetic, a: Elements | None, b: Elements | None) -> Elements | None:
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    n = len(b) if len(a) == 1 else len(a)  # none at all, beside one, is none
    left, right = (part * n if len(part) == 1 else part for part in (a, b))
    return tuple(compute(x, y) for x, y in zip(left, right, strict=True))


added, subtracted, multiplied = arithmetic(add), arithmetic(subtract), arithmetic(multiply)
smallest, largest = arithmetic(minimum), arithmetic(maximum)


def _quotient(a: Dim, b: Dim) -> Dim:
    return floor_quotient(a, b) if isinstance(b, int) and b > 0 and is_at_least(a, 0) else None


def divided(call: Call) -> Sequence[Made]:
    _check_divisor(call)
    return arithmetic(_quotient)(call)


def remainder(call: Call) -> Sequence[Made]:
    is_float = call.given(0).dtype.startswith("float")
    if call.attributes["fmod"] != int(is_float):
        raise ContractError(f"the attribute fmod = {call.attributes['fmod']} for {call.given(0).dtype}")
    _check_divisor(call)
    return broadcasting(call)


def _check_divisor(call: Call) -> None:
    """The smallest whole number divided by -1, or any by 0, ends the process."""
    divisor = call.given(1)
    if divisor.dtype.startswith("float"):
        return
    if divisor.elements is None or not all(is_at_least(element, 1) for element in divisor.elements):
        raise ContractError("divides whole numbers by what may be 0 or -1, wanted numbers above 0")


def chosen(call: Call) -> Sequence[Made]:
    """Where."""
    return broadcasting(call)


def clipped(call: Call) -> Sequence[Made]:
    for index in (1, 2):
        limit = call.get(index)
        if limit is not None:
            want_rank(limit, "a limit", 0)
    return same(call)


def converted_like(call: Call) -> Sequence[Made]:
    return same(call)


def lengths(call: Call) -> Sequence[Made]:
    """Shape."""
    dims = call.given(0).shape
    start, end = call.attributes["start"], call.attributes["end"]
    part = dims[start : len(dims) if end is None else end]
    return [Made((len(part),), part)]


def count(call: Call) -> Sequence[Made]:
    """Size."""
    total: Dim = 1
    for dim in call.given(0).shape:
        total = multiply(total, dim)
    return [Made((), (total,))]


def scalar(value: Value, name: str) -> Dim:
    want_rank(value, name, 0)
    return None if value.elements is None else value.elements[0]
