"""Shapes of operators that take a part of a tensor, or put one into it.

onnxruntime's kernels compare indices that hang on data with the axis that they are for; what they do not check is here.
"""

from __future__ import annotations

from collections.abc import Sequence

from .contract import (
    Call,
    ContractError,
    Made,
    Value,
    axis_of,
    show,
    want_integers,
    want_same,
)
from .dims import Dim, Shape, add, is_at_least, maximum, minimum, subtract

_FAR = 2**31 - 1  # to the end, however long an axis is


def gathered(call: Call) -> Sequence[Made]:
    data, indices = call.given(0), call.given(1)
    axis = axis_of(call.attributes["axis"], len(data.shape))
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    places = indices.elements
    length = data.shape[axis]
    if places is not None and isinstance(length, int):
        for place in places:
            if isinstance(place, int) and not -length <= place < length:
                raise ContractError(f"index {place} of {length}, wanted one below it")
    elements = None
    if data.elements is not None and places is not None and len(data.shape) == 1:
        plain = [place for place in places if isinstance(place, int)]
        elements = tuple(data.elements[place] for place in plain) if len(plain) == len(places) else None
    return [Made(shape, elements if len(shape) <= 1 else None)]


def gathered_elements(call: Call) -> Sequence[Made]:
    _want_inside(call.given(0).shape, call.given(1).shape, call.attributes["axis"])
    return [Made(call.given(1).shape)]


def scattered_elements(call: Call) -> Sequence[Made]:
    data, indices, updates = (call.given(index).shape for index in range(3))
    _want_inside(data, indices, call.attributes["axis"])
    _want_fit(updates, indices, "updates")
    return [Made(data)]


def _want_inside(data: Shape, indices: Shape, axis: int) -> None:
    """Indices have as many dimensions, none longer but that of the axis."""
    axis = axis_of(axis, len(data))
    if len(indices) != len(data):
        raise ContractError(f"indices {show(indices)} into {show(data)}, wanted as many dimensions")
    for index, (found, limit) in enumerate(zip(indices, data, strict=True)):
        if index != axis and not is_at_least(limit, found):
            raise ContractError(
                f"indices {show(indices)} into {show(data)}, wanted none longer at axis {index}"
            )


def _want_fit(found: Shape, wanted: Shape, name: str) -> None:
    if len(found) != len(wanted):
        raise ContractError(f"{name} has the shape {show(found)}, wanted {show(wanted)}")
    for index, (dim, limit) in enumerate(zip(found, wanted, strict=True)):
        want_same(dim, limit, f"axis {index} of {name} {show(found)}")


def _depth(data: Shape, indices: Shape, batch_dims: int) -> int:
    """How many axes of the data an index is for."""
    depth = indices[-1] if indices else None
    if not isinstance(depth, int) or not 1 <= depth <= len(data) - batch_dims or batch_dims >= len(indices):
        raise ContractError(
            f"indices {show(indices)} into {show(data)} behind {batch_dims} axes of the batch, "
            "wanted a place in what is left"
        )
    for index in range(batch_dims):
        if indices[index] is None or indices[index] != data[index]:
            raise ContractError(f"indices {show(indices)} into {show(data)}, wanted the same axis {index}")
    return depth


def gathered_nd(call: Call) -> Sequence[Made]:
    data, indices, batch_dims = call.given(0).shape, call.given(1).shape, call.attributes["batch_dims"]
    depth = _depth(data, indices, batch_dims)
    return [Made((*indices[:-1], *data[batch_dims + depth :]))]


def scattered_nd(call: Call) -> Sequence[Made]:
    data, indices, updates = (call.given(index).shape for index in range(3))
    depth = _depth(data, indices, 0)
    _want_fit(updates, (*indices[:-1], *data[depth:]), "updates")
    return [Made(data)]


def sliced(call: Call) -> Sequence[Made]:
    """Starts and ends may hang on data: onnxruntime clamps them."""
    value, starts, ends = (call.given(index) for index in range(3))
    axes_input, steps_input = call.get(3), call.get(4)
    count = starts.shape[0] if len(starts.shape) == 1 else None
    if not isinstance(count, int) or starts.shape != ends.shape:
        raise ContractError(
            f"starts {show(starts.shape)} and ends {show(ends.shape)}, wanted as many of each"
        )
    listed = list(range(count)) if axes_input is None else want_integers(axes_input, "axes")
    steps = [1] * count if steps_input is None else want_integers(steps_input, "steps")
    axes = [axis_of(axis, len(value.shape)) for axis in listed]
    if len(set(axes)) != count or len(axes) != count or len(steps) != count or 0 in steps:
        raise ContractError(f"axes {listed} in steps of {steps}, wanted each axis once and no step of 0")
    shape = list(value.shape)
    for index, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        start, end = (part.elements[index] if part.elements else None for part in (starts, ends))
        shape[axis] = _length(start, end, step, shape[axis])
    elements = None
    if value.elements is not None and len(value.shape) == 1:
        elements = _part(value, starts, ends, steps[0])
    return [Made(tuple(shape), elements)]


def _part(value: Value, starts: Value, ends: Value, step: int) -> tuple[Dim, ...] | None:
    bounds = [part.elements[0] if part.elements else None for part in (starts, ends)]
    start, end = (bound if isinstance(bound, int) else None for bound in bounds)
    if start is None or end is None or value.elements is None:
        return None
    if step < 0 and end < -len(value.elements):
        return value.elements[start::step]
    return value.elements[start:end:step]


def _length(start: Dim, end: Dim, step: int, dim: Dim) -> Dim:
    if (start, step) == (-1, -1) and isinstance(end, int) and end < -(2**31):
        return dim  # all of it, backwards
    if step != 1:
        if isinstance(start, int) and isinstance(end, int) and isinstance(dim, int) and step > 0:
            return len(range(dim)[start:end:step])
        return None
    found = subtract(_place(end, dim), _place(start, dim))
    if found is None or is_at_least(found, 0):
        return found
    return 0 if is_at_least(0, found) else None


def _place(bound: Dim, dim: Dim) -> Dim:
    """A start or an end as a place from 0 to the length of the axis."""
    if bound is None or dim is None:
        return 0 if bound == 0 else None
    if isinstance(bound, int) and bound >= _FAR:
        return dim
    if isinstance(bound, int) and bound <= -_FAR:
        return 0
    if is_at_least(-1, bound):
        return maximum(add(dim, bound), 0)
    return minimum(bound, dim) if is_at_least(bound, 0) else None
