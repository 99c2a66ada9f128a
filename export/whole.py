"""Models that are traced whole: everything but the decoders that `stitch.py` stamps layer by layer.

All graphs of a model are traced side by side in one go. A decoder's graphs are two pieces each, so that the head runs
on the columns that were asked for only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

from .. import TfmxError
from ..runtime.bundle import FileInfo
from ..tfm_model.blocks import Blocks
from ..tfm_model.checkpoint import CheckpointKind, GenerationDefaults
from ..tfm_model.state import StateSpec, StateTensor
from ..tfm_model.transformer import Transformer
from .arithmetic import Arithmetic
from .builder import Builder
from .content_plan import ContentPlan
from .layout import Target
from .lower_basic import FLOAT, INT64
from .own_module import ModuleError, OwnModule, first_line
from .progress import Progress
from .quantiser import PLAIN, Numbers, Quantiser, rounded
from .reference import Reference
from .signature import Signature
from .source import Graphs, left_float
from .stitch import (
    GRAPHS_OF_KIND,
    GraphKind,
    column_lowering,
    keep_input,
    present_shape,
    stamp,
)
from .stored import StoredMatrices
from .trace import TRACE_OPSET, Fragment, Piece, trace_pieces
from .weights import stored_tensors, torch_dtype
from .whole_reference import WholeReference

Shape = tuple[int | str, ...]


class TraceError(TfmxError):
    """torch.export or its ONNX translation could not follow the module."""


@dataclass(frozen=True, slots=True)
class Slot:
    """An input or output of a graph; a text in its shape is a dimension that is bound at run time."""

    name: str
    dtype: ir.DataType
    shape: Shape

    @property
    def free_axes(self) -> list[int]:
        return [axis for axis, dim in enumerate(self.shape) if isinstance(dim, str)]


class WholeSource:
    can_be_smoothed = False

    def __init__(
        self,
        model: Transformer | OwnModule,
        signature: Signature,
        dtype: ir.DataType,
        *,
        kind: CheckpointKind,
        files: Mapping[str, FileInfo],
        model_info: dict[str, object],
        generation: GenerationDefaults,
        texts: dict[str, str],
    ) -> None:
        self._model, self.signature, self._dtype = model, signature, dtype
        self.kind, self._files, self.model_info = kind, files, model_info
        self.generation, self.texts = generation, texts
        self.spec: StateSpec = model.state_spec()
        self.max_context = signature.steps.length

    def digests(self) -> dict[str, FileInfo]:
        return dict(self._files)

    def growth(self, target: Target) -> str:  # noqa: ARG002 - the same for both
        return "append"

    def weight(self, name: str) -> Tensor | None:
        weight: Tensor | None = self._model.state_dict().get(name)
        return None if weight is None else weight.float()

    def smoothed(self, numbers: Numbers, progress: Progress) -> WholeSource:  # noqa: ARG002 (it cannot be)
        return self

    def smoothed_as(self, stored: StoredMatrices, progress: Progress) -> WholeSource:  # noqa: ARG002
        return self

    def reference(self, stored: StoredMatrices | None = None) -> Reference:
        size = sum(tensor.numel() for tensor in self._model.state_dict().values())

        names = {} if stored is None else self._names_in_file(stored)

        def build() -> Transformer | OwnModule:
            model = self._copy()
            if stored is not None:
                weights = {name: stored.read(own) for name, own in names.items()}
                model.load_state_dict(weights, strict=False)
            return model

        layouts = {} if stored is None else {name: stored.layouts[own] for name, own in names.items()}
        return WholeReference(build, self.signature, self.spec, torch_dtype(self._dtype), size, layouts)

    def _names_in_file(self, stored: StoredMatrices) -> dict[str, str]:
        """Of each quantised matrix, by the model's names for it: equal ones lie in the file once (`ContentPlan`)."""
        weights = self._model.state_dict()
        return {
            name: own
            for own in stored.layouts
            if own in weights
            for name, weight in weights.items()
            if weight.shape == weights[own].shape and torch.equal(weight, weights[own])
        }

    def _copy(self) -> Transformer | OwnModule:
        return copy.deepcopy(self._model)  # conversions are done in place

    def graphs(self, target: Target, opset: int, progress: Progress, numbers: Numbers = PLAIN) -> Graphs:
        own = isinstance(self._model, OwnModule)
        if own and opset < TRACE_OPSET:
            raise ModuleError(f"--opset is {opset}; a module of your own is traced at {TRACE_OPSET} or above")
        if own and numbers.quant is not None:
            raise ModuleError(
                "--quant is for models of the built-in family; a module of your own stays as it is"
            )
        progress.stage("tracing", 1)
        model = self._copy().to(torch_dtype(self._dtype)).eval()
        kinds = GRAPHS_OF_KIND[self.signature.kind]
        pieces = [piece for kind in kinds for piece in self._pieces(model, kind)]
        try:
            if own:
                _check_state_count(pieces[0], len(self.spec))
            traced = trace_pieces(model, pieces, opset if own else TRACE_OPSET)
        except ModuleError:
            raise
        except Exception as error:
            raise TraceError(f"torch could not trace the module: {first_line(error)}") from error
        progress.advance()
        plan = ContentPlan(self._dtype)
        fragments = {name: plan.adopt(fragment) for name, fragment in traced.items()}
        matrices = plan.matrices()
        plan.blocks = layouts = numbers.layouts(matrices)
        arithmetic = numbers.arithmetic
        models = {kind: self._stitch(kind, fragments, target, opset, plan, arithmetic) for kind in kinds}

        def blocks_of(name: str) -> Blocks:
            assert numbers.quant is not None
            return rounded(numbers.quant, layouts[name], plan.tensors[name].float(), name)

        quantiser = Quantiser(layouts, target, torch_dtype(self._dtype), blocks_of)
        tensors = stored_tensors(
            models.values(), lambda value: quantiser.reader(str(value.name)) or plan.reader(value), layouts
        )
        return Graphs(models, tensors, layouts, floats=left_float(matrices, layouts))

    # --- what the graphs take and give --------------------------------------------------------------------

    def _inputs(self, kind: GraphKind) -> list[Slot]:
        """The state comes last."""
        elements = self.signature.inputs if kind == "encode" else self.signature.steps
        length: int | str = 1 if kind == "decode" else "sequence_length"
        slots = [
            Slot(elements.name, INT64 if elements.kind == "tokens" else self._dtype, elements.shape(length))
        ]
        if elements.kind != "images":
            columns = length if kind == "encode" or self._forgets else "total_sequence_length"
            slots.append(Slot("attention_mask", INT64, ("batch_size", columns)))
        if kind == "encode":
            return slots
        slots.append(Slot("position_ids", INT64, ("batch_size", length)))
        if self.signature.kind == "encoder-decoder" and self.signature.inputs.kind != "images":
            slots.append(Slot("encoder_attention_mask", INT64, ("batch_size", "encoder_sequence_length")))
        return slots + [Slot(state.past, self._state_dtype(state), state.shape) for state in self.spec]

    def _state_dtype(self, state: StateTensor) -> ir.DataType:
        return FLOAT if state.wide else self._dtype

    @property
    def _forgets(self) -> bool:
        """Whether nothing of ours looks back at columns of the past, so that the mask does without them."""
        recurrent = all(state.growth in {"constant", "fixed"} for state in self.spec)
        return recurrent and isinstance(self._model, Transformer)

    def _outputs(self, kind: GraphKind) -> list[Slot]:
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
        own: int | str = T if self._forgets else "total_sequence_length"
        source: int | str = s.inputs.length if s.inputs.kind == "images" else "encoder_sequence_length"
        return [
            Slot(name, self._dtype, ("batch_size", heads, T, source if name.startswith("cross") else own))
            for name, (_, heads) in zip(s.map_names, s.maps * 2, strict=False)
        ]

    # --- tracing ------------------------------------------------------------------------------------------

    def _pieces(self, model: Transformer | OwnModule, kind: GraphKind) -> list[Piece]:
        slots = self._inputs(kind)
        names = [slot.name for slot in slots]
        count = len(names) - (0 if kind == "encode" else len(self.spec))  # without the state

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(names, values, strict=True))
            if kind == "encode":
                outputs = model.encode(values[0], given.get("attention_mask"))
            else:
                call = model.body if isinstance(model, Transformer) and self._splits else model.step
                outputs = call(
                    values[0], given["attention_mask"], given["position_ids"], list(values[count:]),
                    given.get("encoder_attention_mask"),
                )  # fmt: skip
            maps = self.signature.encoder_map_names if kind == "encode" else self.signature.map_names
            return outputs.main, *outputs.state, *(outputs.maps[name] for name in maps)

        examples = [_example(slot, kind) for slot in slots]
        pieces = [Piece(kind, run, examples, [slot.free_axes for slot in slots], len(self._outputs(kind)))]
        if kind != "encode" and isinstance(model, Transformer) and self._splits:
            length: int | str = 1 if kind == "decode" else "sequence_length"
            hidden = Slot("hidden", self._dtype, ("batch_size", length, model.config.width))
            pieces.append(
                Piece(f"{kind} head", model.logits, [_example(hidden, kind)], [hidden.free_axes], 1)
            )
        return pieces

    @property
    def _splits(self) -> bool:
        """A head that looks at each element alone can come after the choice of columns."""
        return not self.signature.outputs.only_last

    # --- stitching ----------------------------------------------------------------------------------------

    def _stitch(
        self,
        kind: GraphKind,
        fragments: Mapping[str, Fragment],
        target: Target,
        opset: int,
        plan: ContentPlan,
        arithmetic: Arithmetic,
    ) -> ir.Model:
        builder = Builder(kind, opset)
        inputs = [builder.input(slot.name, slot.dtype, slot.shape) for slot in self._inputs(kind)]
        keep = keep_input(builder) if kind == "prefill" and not self.signature.outputs.only_last else None
        context = max(self.signature.inputs.length, self.signature.steps.length)
        lowering = column_lowering(
            target, builder, self._dtype, context, arithmetic, is_decode=kind == "decode"
        )
        main, *rest = stamp(fragments[kind], inputs, "", lowering, plan)
        main = main if keep is None else lowering.select(main, keep)
        if f"{kind} head" in fragments:
            builder.scope = "head"
            [main] = stamp(fragments[f"{kind} head"], [main], "", lowering, plan)
        for value, slot in zip([main, *rest], self._outputs(kind), strict=True):
            builder.output(value, slot.name, slot.dtype, slot.shape)
        builder.drop_unused(["position_ids"])
        return builder.model()


_SIZES = {
    "batch_size": 2, "sequence_length": 5, "past_sequence_length": 3, "total_sequence_length": 8,
    "encoder_sequence_length": 7,
}  # fmt: skip


def _example(slot: Slot, kind: GraphKind) -> Tensor:
    sizes = _SIZES | ({"total_sequence_length": 4} if kind == "decode" else {})
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in slot.shape]
    return (
        torch.ones(shape, dtype=torch.int64)
        if slot.dtype == INT64
        else torch.zeros(shape, dtype=torch_dtype(slot.dtype))
    )


@torch.no_grad()
def _check_state_count(piece: Piece, wanted: int) -> None:
    count = len(piece.run(*piece.inputs)) - 1  # type: ignore[arg-type]
    if count != wanted:
        raise ModuleError(f"the module's forward returns {count} state tensors, its state_spec has {wanted}")
