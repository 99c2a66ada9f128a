"""Shapes of operators that only order a tensor's numbers anew, or make a tensor of a shape."""

from __future__ import annotations

from collections.abc import Sequence

from .contract import (
    Call,
    ContractError,
    Elements,
    Made,
    axis_of,
    broadcast,
    show,
    want_elements,
    want_integers,
    want_rank,
    want_same,
    want_shape,
)
from .dims import Dim, Shape, add, exact_quotient, is_at_least, multiply, product, subtract
from .reading import read_tensor
from .rules_elementwise import scalar


def target(call: Call, index: int) -> Elements:
    """A shape that is an input: how many dimensions is always known, their lengths may hang on data."""
    value = call.given(index)
    want_rank(value, "the shape", 1)
    rank = value.shape[0]
    if value.elements is not None:
        return value.elements
    if not isinstance(rank, int):
        raise ContractError("a shape of a rank that hangs on data, wanted one that is known")
    return (None,) * rank


def reshaped(call: Call) -> Sequence[Made]:
    value = call.given(0)
    wanted, shape = target(call, 1), value.shape
    copies = not call.attributes["allowzero"]
    result: list[Dim] = []
    for index, dim in enumerate(wanted):
        if dim == 0 and copies:
            if index >= len(shape):
                raise ContractError(f"{show(shape)} as {show(wanted)}, wanted a dimension to copy")
            result.append(shape[index])
            continue
        if dim is not None and dim != -1 and not is_at_least(dim, 0):
            raise ContractError(f"{show(shape)} as {show(wanted)}, wanted lengths, and -1 once")
        result.append(dim)
    open_axes = [index for index, dim in enumerate(wanted) if dim == -1]
    if len(open_axes) > 1:
        raise ContractError(f"{show(shape)} as {show(wanted)}, wanted -1 once")
    _fill(result, open_axes, shape, wanted)
    return [Made(tuple(result), value.elements if len(result) <= 1 else None)]


def _fill(result: list[Dim], open_axes: list[int], shape: Shape, wanted: Elements) -> None:
    """What is left for -1; without it, both sides hold as many numbers."""
    # what both sides have is left out: the rest is known more often
    rest, others = list(shape), [dim for index, dim in enumerate(result) if index not in open_axes]
    for dim in list(others):
        if dim is not None and dim != 0 and dim in rest:
            rest.remove(dim)
            others.remove(dim)
    whole, part = product(rest), product(others)
    fits = whole is None or part is None or whole == part
    if open_axes:
        result[open_axes[0]] = exact_quotient(whole, part)
        both_plain = isinstance(whole, int) and isinstance(part, int)
        fits = not both_plain or result[open_axes[0]] is not None
    elif None in result:
        fits = True  # onnxruntime compares when it runs
    if not fits:
        raise ContractError(f"{show(shape)} as {show(wanted)}, wanted as many numbers")


def squeezed(call: Call) -> Sequence[Made]:
    value, axes_input = call.given(0), call.get(1)
    shape = value.shape
    if axes_input is None:
        if any(not isinstance(dim, int) for dim in shape):
            raise ContractError(f"no axes for {show(shape)}, wanted them")
        axes = [index for index, dim in enumerate(shape) if dim == 1]
    else:
        axes = [axis_of(axis, len(shape)) for axis in want_integers(axes_input, "axes")]
    for axis in axes:
        want_same(shape[axis], 1, f"axis {axis} of {show(shape)}")
    kept = tuple(dim for index, dim in enumerate(shape) if index not in axes)
    return [Made(kept, value.elements)]


def unsqueezed(call: Call) -> Sequence[Made]:
    value, listed = call.given(0), want_integers(call.given(1), "axes")
    rank = len(value.shape) + len(listed)
    axes = {axis_of(axis, rank) for axis in listed}
    if len(axes) != len(listed):
        raise ContractError(f"axes {listed}, wanted each once")
    rest = iter(value.shape)
    result = tuple(1 if index in axes else next(rest) for index in range(rank))
    return [Made(result, value.elements if rank <= 1 else None)]


def flattened(call: Call) -> Sequence[Made]:
    shape, axis = call.given(0).shape, call.attributes["axis"]
    if not -len(shape) <= axis <= len(shape):
        raise ContractError(f"axis {axis} of {len(shape)} dimensions")
    axis = axis + len(shape) if axis < 0 else axis
    return [Made((product(shape[:axis]), product(shape[axis:])))]


def transposed(call: Call) -> Sequence[Made]:
    shape = call.given(0).shape
    perm = call.attributes["perm"] or tuple(range(len(shape)))[::-1]
    if sorted(perm) != list(range(len(shape))):
        raise ContractError(f"the attribute perm = {list(perm)}, wanted each of {len(shape)} axes once")
    return [Made(tuple(shape[axis] for axis in perm))]


def expanded(call: Call) -> Sequence[Made]:
    wanted = target(call, 1)
    for dim in wanted:
        if dim is not None and not is_at_least(dim, 0):
            raise ContractError(f"to {show(wanted)}, wanted lengths")
    return [Made(broadcast(call.given(0).shape, wanted))]


def tiled(call: Call) -> Sequence[Made]:
    shape, repeats = call.given(0).shape, want_elements(call.given(1), "repeats")
    if len(repeats) != len(shape) or not all(is_at_least(repeat, 1) for repeat in repeats):
        raise ContractError(
            f"{show(shape)} repeated {show(repeats)} times, wanted a number above 0 for each axis"
        )
    return [Made(tuple(multiply(dim, repeat) for dim, repeat in zip(shape, repeats, strict=True)))]


def filled(call: Call) -> Sequence[Made]:
    """ConstantOfShape."""
    wanted = want_elements(call.given(0), "the shape")
    if not all(is_at_least(dim, 0) for dim in wanted):
        raise ContractError(f"a tensor of the shape {show(wanted)}, wanted lengths")
    return [Made(wanted)]


def counted(call: Call) -> Sequence[Made]:
    """Range: of fractions onnxruntime counts how many there are, and refuses steps of 0."""
    if call.given(0).dtype.startswith("float"):
        for index in range(3):
            want_rank(call.given(index), "start, limit and delta", 0)
        return [Made((None,))]
    start, limit, step = (
        scalar(call.given(index), name) for index, name in enumerate(("start", "limit", "delta"))
    )
    if not isinstance(step, int) or step == 0:
        raise ContractError("a step that hangs on data, wanted a number that is not 0")
    if start is None or limit is None:
        raise ContractError("a start or an end that hangs on data, wanted lengths")
    length = subtract(limit, start) if step == 1 else None
    if isinstance(start, int) and isinstance(limit, int):
        length = len(range(start, limit, step))
    if length is not None and not is_at_least(length, 0):
        length = None
    few = isinstance(length, int) and length <= 64 and isinstance(start, int)
    return [Made((length,), tuple(range(start, start + length * step, step)) if few else None)]  # type: ignore[operator,arg-type]


def joined(call: Call) -> Sequence[Made]:
    """Concat."""
    shapes = [value.shape for value in call.inputs if value is not None]
    rank = len(shapes[0])
    axis = axis_of(call.attributes["axis"], rank)
    total: Dim = 0
    result = list(shapes[0])
    for shape in shapes:
        if len(shape) != rank:
            raise ContractError(f"{show(shape)} joined to {show(shapes[0])}, wanted as many dimensions")
        for index, dim in enumerate(shape):
            if index != axis:
                want_same(dim, result[index], f"axis {index} of {' and '.join(map(show, shapes))}")
                result[index] = dim if result[index] is None else result[index]
        total = add(total, shape[axis])
    result[axis] = total
    elements: Elements | None = ()
    for value in call.inputs:
        known = value is not None and value.elements is not None and rank == 1 and elements is not None
        elements = elements + value.elements if known else None  # type: ignore[operator,union-attr]
    return [Made(tuple(result), elements)]


def split(call: Call) -> Sequence[Made]:
    """By sizes, or in as many equal parts as there are outputs."""
    shape, sizes_input = call.given(0).shape, call.get(1)
    axis, n, count = (
        axis_of(call.attributes["axis"], len(shape)),
        call.n_outputs,
        call.attributes.get("num_outputs"),
    )
    length = shape[axis]
    if sizes_input is not None:
        sizes: list[Dim] = list(want_elements(sizes_input, "split"))
        if count is not None or len(sizes) != n or not all(is_at_least(size, 0) for size in sizes):
            raise ContractError(
                f"parts of {show(tuple(sizes))} for {n} outputs, wanted a length for each, and nothing else"
            )
        total: Dim = 0
        for size in sizes:
            total = add(total, size)
        if total != length:
            raise ContractError(f"parts of {show(tuple(sizes))}, wanted {length} in all")
    else:
        if call.opset >= 18 and count != n:
            raise ContractError(f"the attribute num_outputs = {count}, wanted {n} for as many outputs")
        if not isinstance(length, int) or length % n:
            raise ContractError(f"{n} parts of {length}, wanted equal ones")
        sizes = [length // n] * n
    return [Made((*shape[:axis], size, *shape[axis + 1 :])) for size in sizes]


def padded(call: Call) -> Sequence[Made]:
    shape, pads = call.given(0).shape, want_integers(call.given(1), "pads")
    if len(pads) != 2 * len(shape) or min(pads, default=0) < 0:
        raise ContractError(f"pads {pads} for {show(shape)}, wanted two for each axis, none below 0")
    value = call.get(2)
    if value is not None:
        want_shape(value, "what is put there", () if value.shape == () else (1,))
    return [Made(tuple(add(dim, pads[i] + pads[i + len(shape)]) for i, dim in enumerate(shape)))]


def triangle(call: Call) -> Sequence[Made]:
    """Trilu."""
    value, diagonal = call.given(0), call.get(1)
    if len(value.shape) < 2:
        raise ContractError(f"{show(value.shape)}, wanted 2 dimensions or more")
    if diagonal is not None:  # what is no number is a sum of lengths, and so as small as they are
        want_rank(diagonal, "k", 0)
        [k] = want_elements(diagonal, "k")
        if isinstance(k, int) and abs(k) >= 2**31:
            raise ContractError(f"k is {k}, wanted a small number")
    return [Made(value.shape)]


def constant_value(tensor: memoryview) -> bool:
    """Of ConstantOfShape: one number, in the graph."""
    found = read_tensor(tensor)
    return found.shape == (1,) and found.offset is None
