"""Inputs and outputs of a graph that is traced whole, as data: examples for a trace, and whether a module gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

from ..tfm_model.state import StateSpec, StateTensor
from .lower_basic import FLOAT, INT64
from .own_module import ModuleError
from .signature import Signature
from .stitch import GraphKind, present_shape
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


class GraphSlots:
    """What each graph of a model takes and gives, in order."""

    def __init__(self, signature: Signature, spec: StateSpec, dtype: ir.DataType, *, forgets: bool) -> None:
        """`forgets`: nothing looks back at columns of the past, so that the mask does without them."""
        self.signature, self.spec, self._dtype, self.forgets = signature, spec, dtype, forgets

    def inputs(self, kind: GraphKind) -> list[Slot]:
        """The state comes last."""
        elements = self.signature.inputs if kind == "encode" else self.signature.steps
        length: int | str = 1 if kind == "decode" else "sequence_length"
        slots = [
            Slot(elements.name, INT64 if elements.kind == "tokens" else self._dtype, elements.shape(length))
        ]
        if kind != "encode" or self.signature.has_mask:
            columns = length if kind == "encode" or self.forgets else "total_sequence_length"
            slots.append(Slot("attention_mask", INT64, ("batch_size", columns)))
        if kind == "encode":
            return slots
        slots.append(Slot("position_ids", INT64, ("batch_size", length)))
        if self.signature.kind == "encoder-decoder" and self.signature.has_mask:
            slots.append(Slot("encoder_attention_mask", INT64, ("batch_size", "encoder_sequence_length")))
        return slots + [Slot(state.past, self._state_dtype(state), state.shape) for state in self.spec]

    def _state_dtype(self, state: StateTensor) -> ir.DataType:
        return FLOAT if state.wide else self._dtype

    def outputs(self, kind: GraphKind) -> list[Slot]:
        """The main one first, then state, then maps."""
        s, answer = self.signature, self.signature.outputs
        if kind != "encode":
            kept: int | str = 1 if kind == "decode" or answer.only_last else "logits_length"
            slots = [Slot(answer.name, FLOAT, ("batch_size", kept, answer.size))]
            moving = [state for state in self.spec if state.growth != "fixed"]
            slots += [
                Slot(state.present, self._state_dtype(state), tuple(present_shape(state.shape, "append")))
                for state in moving
            ]
            return slots + self._step_maps(1 if kind == "decode" else "sequence_length")
        T: int | str = s.inputs.length if s.inputs.kind == "images" else "sequence_length"
        maps = s.maps if s.kind == "encoder" else s.encoder_maps
        shown = [
            Slot(name, self._dtype, ("batch_size", heads, T, T))
            for name, (_, heads) in zip(s.encoder_map_names, maps, strict=True)
        ]
        if s.kind == "encoder":
            shape = ("batch_size", answer.size) if answer.pooled else ("batch_size", T, answer.size)
            return [Slot(answer.name, FLOAT, shape), *shown]
        assert s.encoded_width is not None
        fixed = [
            Slot(
                state.present,
                self._dtype,
                tuple(T if dim == "encoder_sequence_length" else dim for dim in state.shape),
            )
            for state in self.spec
            if state.growth == "fixed"
        ]
        return [Slot("last_hidden_state", FLOAT, ("batch_size", T, s.encoded_width)), *fixed, *shown]

    def _step_maps(self, T: int | str) -> list[Slot]:
        s = self.signature
        own: int | str = T if self.forgets else "total_sequence_length"
        return [
            Slot(
                name,
                self._dtype,
                ("batch_size", heads, T, "encoder_sequence_length" if name.startswith("cross") else own),
            )
            for name, (_, heads) in zip(s.map_names, s.maps * 2, strict=False)
        ]
