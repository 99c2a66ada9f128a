"""Shapes of sums, norms and products of matrices."""

from __future__ import annotations

from collections.abc import Sequence

from .contract import (
    Call,
    ContractError,
    Made,
    Value,
    axis_of,
    broadcast,
    show,
    want_integers,
    want_rank,
    want_same,
    want_shape,
)
from .dims import Dim, Shape, add, floor_quotient, is_at_least, multiply, subtract


def reduced(call: Call) -> Sequence[Made]:
    """Axes are an input, or an attribute in older opsets; none is all."""
    axes_input = call.get(1)
    listed = call.attributes.get("axes") if axes_input is None else want_integers(axes_input, "axes")
    return _without(call.given(0).shape, listed, keeps=call.attributes["keepdims"] == 1)


def extreme_place(call: Call) -> Sequence[Made]:
    """ArgMax, ArgMin."""
    shape = call.given(0).shape
    axis = axis_of(call.attributes["axis"], len(shape))
    if not is_at_least(shape[axis], 1):
        raise ContractError(f"axis {axis} of {show(shape)}, wanted one that has an element")
    return _without(shape, [axis], keeps=call.attributes["keepdims"] == 1)


def _without(shape: Shape, listed: Sequence[int] | None, *, keeps: bool) -> Sequence[Made]:
    axes = [axis_of(axis, len(shape)) for axis in (listed or range(len(shape)))]
    if len(set(axes)) != len(axes):
        raise ContractError(f"axes {list(listed or ())}, wanted each once")
    if keeps:
        return [Made(tuple(1 if index in axes else dim for index, dim in enumerate(shape)))]
    return [Made(tuple(dim for index, dim in enumerate(shape) if index not in axes))]


def along_axis(call: Call) -> Sequence[Made]:
    """Softmax, LogSoftmax."""
    shape = call.given(0).shape
    axis_of(call.attributes["axis"], len(shape))
    return [Made(shape)]


def running_sum(call: Call) -> Sequence[Made]:
    shape, axis = call.given(0).shape, call.given(1)
    want_rank(axis, "axis", 0)
    axis_of(want_integers(axis, "axis")[0], len(shape))
    return [Made(shape)]


def best(call: Call) -> Sequence[Made]:
    """TopK: onnxruntime compares k with the axis when it runs."""
    shape, k = call.given(0).shape, call.given(1)
    axis = axis_of(call.attributes["axis"], len(shape))
    want_shape(k, "k", (1,))
    wanted = None if k.elements is None else k.elements[0]
    if wanted is not None and not (is_at_least(wanted, 1) and is_at_least(shape[axis], wanted)):
        raise ContractError(f"the best {wanted} of {shape[axis]}, wanted 1 to that many")
    return [Made((*shape[:axis], wanted, *shape[axis + 1 :]))] * 2


def layer_norm(call: Call) -> Sequence[Made]:
    """All norms of the last axis: a scale of another size is read past its end."""
    shape = call.given(0).shape
    want_last_axis(call, len(shape))
    for name, value in zip(("scale", "bias"), call.inputs[1:], strict=False):
        if value is not None:
            want_shape(value, name, shape[-1:])
    return [Made(shape)]


def want_last_axis(call: Call, rank: int) -> None:
    if not rank or axis_of(call.attributes["axis"], rank) != rank - 1:
        raise ContractError(
            f"the attribute axis = {call.attributes['axis']} of {rank} dimensions, wanted the last"
        )


def skip_norm(call: Call) -> Sequence[Made]:
    """x + skip, normed: the outputs are that, two that we never ask for, and the sum."""
    x, skip, scale = (call.given(index) for index in range(3))
    shape = want_rank(x, "x", 2, 3)
    if None in shape[-1:] or skip.shape != shape:
        raise ContractError(f"skip has the shape {show(skip.shape)}, wanted {show(shape)} as x")
    want_shape(scale, "scale", shape[-1:])
    return [Made(shape)] * 4


def product(call: Call) -> Sequence[Made]:
    """MatMul."""
    a, b = call.given(0).shape, call.given(1).shape
    if not a or not b:
        raise ContractError(f"a product of {show(a)} and {show(b)}, wanted a dimension in each")
    left: Shape = a if len(a) > 1 else (1, *a)
    right: Shape = b if len(b) > 1 else (*b, 1)
    want_same(left[-1], right[-2], f"the inner dimension of {show(a)} and {show(b)}")
    batch = broadcast(left[:-2], right[:-2])
    rows = left[-2:-1] if len(a) > 1 else ()
    columns = right[-1:] if len(b) > 1 else ()
    return [Made((*batch, *rows, *columns))]


def general_product(call: Call) -> Sequence[Made]:
    """Gemm."""
    a, b = (want_rank(call.given(index), "AB"[index], 2) for index in (0, 1))
    rows, inner = a[::-1] if call.attributes["transA"] else a
    deep, columns = b[::-1] if call.attributes["transB"] else b
    want_same(inner, deep, f"the inner dimension of {show(a)} and {show(b)}")
    added = call.get(2)
    if added is not None:
        _want_fits(added, (rows, columns))
    return [Made((rows, columns))]


def _want_fits(added: Value, shape: Shape) -> None:
    if len(added.shape) > 2 or any(
        dim not in {1, wanted} for dim, wanted in zip(added.shape[::-1], shape[::-1], strict=False)
    ):
        raise ContractError(
            f"C has the shape {show(added.shape)}, wanted one that broadcasts to {show(shape)}"
        )


def summed(call: Call) -> Sequence[Made]:
    """Einsum: a letter for each axis, each letter of one length."""
    equation = call.attributes["equation"].decode().replace(" ", "")
    sides, arrow, result = equation.partition("->")
    parts = sides.split(",")
    lengths: dict[str, Dim] = {}
    if len(parts) != len(call.inputs) or not arrow or not (sides.replace(",", "") + result).isalpha():
        raise ContractError(
            f"the equation {equation} for {len(call.inputs)} inputs, wanted a letter for each axis"
        )
    for index, letters in enumerate(parts):
        shape = want_rank(call.given(index), letters, len(letters))
        for letter, dim in zip(letters, shape, strict=True):
            want_same(dim, lengths.setdefault(letter, dim), f"{letter} of the equation {equation}")
    if len(set(result)) != len(result) or not set(result) <= lengths.keys():
        raise ContractError(
            f"the equation {equation}, wanted letters of its inputs behind the arrow, each once"
        )
    return [Made(tuple(lengths[letter] for letter in result))]


def convolved(call: Call) -> Sequence[Made]:
    """Conv: patches of images, mostly; every kernel must fit into what it slides over."""
    shape = want_rank(call.given(0), "x", 3, 4)
    kernel = want_rank(call.given(1), "W", len(shape))
    n, group = len(shape) - 2, call.attributes["group"]
    channels, fits = kernel[0], isinstance(kernel[0], int) and kernel[0] % group == 0
    if not fits or not all(is_at_least(dim, 1) for dim in kernel):
        raise ContractError(
            f"W has the shape {show(kernel)}, wanted {group} groups of channels, and no empty axis"
        )
    want_same(shape[1], multiply(kernel[1], group), f"the channels of x {show(shape)} and W {show(kernel)}")
    bias = call.get(2)
    if bias is not None:
        want_shape(bias, "B", (channels,))
    strides, dilations, pads = (_for_each_axis(call, name, n) for name in ("strides", "dilations", "pads"))
    if call.attributes["kernel_shape"] not in {None, kernel[2:]}:
        raise ContractError(
            f"kernel_shape {call.attributes['kernel_shape']} and W {show(kernel)}, wanted the same"
        )
    lengths = []
    for axis in range(n):
        covered = multiply(subtract(kernel[2 + axis], 1), dilations[axis])
        room = subtract(add(shape[2 + axis], pads[axis] + pads[n + axis]), add(covered, 1))
        if not is_at_least(room, 0):
            raise ContractError(f"a kernel {show(kernel)} for x {show(shape)}, wanted one that fits")
        lengths.append(add(floor_quotient(room, strides[axis]), 1))
    return [Made((shape[0], channels, *lengths))]


def _for_each_axis(call: Call, name: str, n: int) -> tuple[int, ...]:
    """Pads stand before each axis, then behind each."""
    wanted = 2 * n if name == "pads" else n
    found: tuple[int, ...] | None = call.attributes[name]
    if found is None:
        return (0 if name == "pads" else 1,) * wanted
    if len(found) != wanted:
        raise ContractError(f"{name} {found}, wanted {wanted} numbers")
    return found
