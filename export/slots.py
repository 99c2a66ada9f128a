"""Inputs and outputs of a graph that is traced whole, as data: examples for a trace, and whether a module gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

from .lower_basic import INT64
from .own_module import ModuleError
from .stitch import GraphKind
from .weights import torch_dtype

Shape = tuple[int | str, ...]

# what a trace sees: distinct, and above 1, which torch.export would take for constants
SIZES: Mapping[str, int] = {
    "batch_size": 2, "sequence_length": 5, "past_sequence_length": 3, "total_sequence_length": 8,
    "encoder_sequence_length": 7,
}  # fmt: skip
# all others, and none larger
OTHER_SIZES: Mapping[str, int] = {
    "batch_size": 1, "sequence_length": 4, "past_sequence_length": 2, "total_sequence_length": 6,
    "encoder_sequence_length": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slot:
    """An input or output of a graph; a text in its shape is a dimension that is bound at run time."""

    name: str
    dtype: ir.DataType
    shape: Shape

    @property
    def free_axes(self) -> list[int]:
        return [axis for axis, dim in enumerate(self.shape) if isinstance(dim, str)]

    def example(self, sizes: Mapping[str, int], kind: GraphKind) -> Tensor:
        shape = [_size(dim, sizes, kind) if isinstance(dim, str) else dim for dim in self.shape]
        return (
            torch.ones(shape, dtype=torch.int64)
            if self.dtype == INT64
            else torch.zeros(shape, dtype=torch_dtype(self.dtype))
        )


def sizes_of(slots: Sequence[Slot], sizes: Mapping[str, int], kind: GraphKind) -> str:
    """batch_size 2, sequence_length 5, ..."""
    free = dict.fromkeys(dim for slot in slots for dim in slot.shape if isinstance(dim, str))
    one = ["sequence_length 1"] if kind == "decode" else []
    return ", ".join(one + [f"{dim} {_size(dim, sizes, kind)}" for dim in free])


def _size(dim: str, sizes: Mapping[str, int], kind: GraphKind) -> int:
    """A step's mask has one column more than its past."""
    if kind == "decode" and dim == "total_sequence_length":
        return sizes["past_sequence_length"] + 1
    return sizes[dim]


def check_outputs(found: Sequence[Tensor], slots: Sequence[Slot]) -> None:
    if len(found) != len(slots):
        raise ModuleError(
            f"the module's forward returns {len(found) - 1} state tensors, its state_spec has {len(slots) - 1}"
        )
    for tensor, slot in zip(found, slots, strict=True):
        if tensor.dtype != torch_dtype(slot.dtype):
            raise ModuleError(
                f"the module gives {slot.name} in {tensor.dtype}, wanted {torch_dtype(slot.dtype)}, which its state and "
                "weights have; convert it with .to(...)"
            )
