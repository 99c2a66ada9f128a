"""What the runtime feeds a graph: the symbols of its inputs, and what is known of them.

A batch and a sequence are never empty; a past may be. The mask has a column for each new element and for each that is
cached, so that its length is a sum. What a manifest says of them otherwise is refused: nobody would hold it.
"""

from __future__ import annotations

from ..manifest import GraphInfo, TensorInfo
from ..wire import WireError
from .contract import Value
from .dims import Dim, add, subtract, symbol

_MAIN = ("input_ids", "input_features", "pixel_values", "logits")  # one of them is in every graph
_MASK, _SOURCE_MASK, _POSITIONS = "attention_mask", "encoder_attention_mask", "position_ids"
_CACHED = "cached_length"  # where no input has it as a length of its own


def input_values(info: GraphInfo, longest: int) -> tuple[dict[str, Value], dict[str, Dim]]:
    """The inputs by name, and the symbols that are known by them. `longest`: of any sequence, with what is cached."""
    symbols = _symbols(info, longest)
    values = {
        tensor.name: Value(
            tensor.dtype, tuple(symbols[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
        )
        for tensor in info.inputs
    }
    return values, symbols


def _symbols(info: GraphInfo, longest: int) -> dict[str, Dim]:
    main = next((tensor for name in _MAIN if (tensor := info.input(name)) is not None), None)
    if main is None or not main.shape:
        raise WireError(f"it takes none of {', '.join(_MAIN)}")
    batch, *rest = main.shape
    new = rest[0] if rest and main.name != "pixel_values" else None
    symbols: dict[str, Dim] = {dim: symbol(_name(dim), 1) for dim in main.shape if isinstance(dim, str)}
    if isinstance(new, str):
        symbols[new] = symbol(new, 1, longest)
    positions, mask, source = (info.input(name) for name in (_POSITIONS, _MASK, _SOURCE_MASK))
    for tensor in info.inputs:
        if tensor.shape and isinstance(batch, str) and batch in tensor.shape[1:]:
            raise _wrong(tensor, f"{batch} first")
        if tensor in (mask, source) and (len(tensor.shape) != 2 or tensor.shape[0] != batch):
            raise _wrong(tensor, f"{batch} and a length")
        if tensor is positions and tensor.shape != (batch, new):
            raise _wrong(tensor, f"[{batch}, {new}] as {main.name}")
    if source is not None and isinstance(source.shape[1], str):
        symbols.setdefault(source.shape[1], symbol(_name(source.shape[1]), 1, longest))
    total = None if mask is None or mask.shape[1] in symbols else mask.shape[1]
    others = [tensor for tensor in info.inputs if tensor not in (main, positions, mask, source)]
    for tensor in others:
        for dim in tensor.shape:
            if isinstance(dim, str) and dim != batch:
                if dim in {new, total}:
                    raise _wrong(tensor, f"another length than {dim}")
                symbols.setdefault(dim, symbol(_name(dim), 0))
    if isinstance(total, str):
        length = symbols[new] if isinstance(new, str) else new
        past = _growing(others, info, total)
        cached = symbol(_CACHED if past is None else past, 0, subtract(longest, length))
        if past is not None:
            symbols[past] = cached
        symbols[total] = add(length, cached)
    return symbols


def _growing(others: list[TensorInfo], info: GraphInfo, total: str) -> str | None:
    """The length of a past that is an output again, with the new elements behind it."""
    outputs = {tensor.shape for tensor in info.outputs}
    for tensor in others:
        for axis, dim in enumerate(tensor.shape):
            grown = (*tensor.shape[:axis], total, *tensor.shape[axis + 1 :])
            if isinstance(dim, str) and axis and grown in outputs:
                return dim
    return None


def _name(dim: str) -> str:
    """Names of our own making, such as those of minima, are no identifiers."""
    if not dim.isidentifier() or dim == _CACHED:
        raise WireError(f"a dimension is named {dim!r}")
    return dim


def _wrong(tensor: TensorInfo, wanted: str) -> WireError:
    return WireError(f"its input {tensor.name!r} has the shape {list(tensor.shape)}, wanted {wanted}")
