"""Models that are traced whole: everything but the decoders that `stitch.py` stamps layer by layer.

All graphs of a model are traced side by side in one go. A decoder's graphs are two pieces each, so that the head runs
on the columns that were asked for only.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch
from torch import Tensor, nn

from .. import TfmxError
from ..runtime.bundle import FileInfo
from ..tfm_model.checkpoint import CheckpointKind, GenerationDefaults
from ..tfm_model.state import StateSpec
from ..tfm_model.transformer import Outputs, Transformer
from .builder import Builder
from .lower_basic import COLUMNS, FLOAT, INT64
from .lower_ort import FusedLowering
from .lower_portable import PortableLowering
from .own_module import ModuleError, OwnModule, first_line
from .progress import Progress
from .reference import Reference, WholeReference
from .signature import Signature
from .source import Graphs, stored_tensors
from .stitch import GRAPHS_OF_KIND, GraphKind, Target, Weight, WeightPlan, dims, keep_input, present_shape, stamp
from .trace import TRACE_OPSET, Fragment, Piece, trace_pieces
from .weights import torch_dtype

INLINE = 1024  # constants of more elements than this go into the weights file
Shape = tuple[int | str, ...]


class TraceError(TfmxError):
    """torch.export or its ONNX translation could not follow the module."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Names, kinds and shapes, in order; a text in a shape is a dimension that is bound at run time."""

    names: list[str]
    dtypes: list[ir.DataType]
    shapes: list[Shape]

    def add(self, name: str, dtype: ir.DataType, shape: Shape) -> None:
        self.names.append(name)
        self.dtypes.append(dtype)
        self.shapes.append(shape)


class WholeSource:
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

    def reference(self) -> Reference:
        return WholeReference(self._copy, self.signature, self.spec, torch_dtype(self._dtype))

    def _copy(self) -> Transformer | OwnModule:
        return copy.deepcopy(self._model)  # conversions are done in place

    def graphs(self, target: Target, opset: int, progress: Progress) -> Graphs:
        own = isinstance(self._model, OwnModule)
        if own and opset < TRACE_OPSET:
            raise ModuleError(f"--opset is {opset}; a module of your own is traced at {TRACE_OPSET} or above")
        progress.stage("tracing", 1)
        model = self._copy().to(torch_dtype(self._dtype)).eval()
        kinds = GRAPHS_OF_KIND[self.signature.kind]
        pieces = [piece for kind in kinds for piece in self._pieces(model, kind)]
        try:
            traced = trace_pieces(model, pieces, opset if own else TRACE_OPSET)
        except Exception as error:
            raise TraceError(f"torch could not trace the model: {first_line(error)}") from error
        progress.advance()
        plan = _ContentPlan(self._dtype)
        fragments = {name: plan.adopt(fragment) for name, fragment in traced.items()}
        models = {kind: self._stitch(kind, fragments, target, opset, plan) for kind in kinds}
        return Graphs(models, stored_tensors(models.values(), plan.reader))

    # --- what the graphs take and give --------------------------------------------------------------------

    def _inputs(self, kind: GraphKind) -> Tensors:
        """Without the state."""
        found = Tensors([], [], [])
        elements = self.signature.inputs if kind == "encode" else self.signature.steps
        length: int | str = 1 if kind == "decode" else "sequence_length"
        dtype = INT64 if elements.kind == "tokens" else self._dtype
        found.add(elements.name, dtype, elements.shape(length))
        if elements.kind != "images":
            columns = "sequence_length" if kind == "encode" else "total_sequence_length"
            found.add("attention_mask", INT64, ("batch_size", columns))
        if kind != "encode":
            found.add("position_ids", INT64, ("batch_size", length))
            if self._has_source_mask:
                found.add("encoder_attention_mask", INT64, ("batch_size", "encoder_sequence_length"))
        return found

    @property
    def _has_source_mask(self) -> bool:
        return self.signature.kind == "encoder-decoder" and self.signature.inputs.kind != "images"

    def _outputs(self, kind: GraphKind) -> Tensors:
        found, answer, s = Tensors([], [], []), self.signature.outputs, self.signature
        T: int | str = s.inputs.length if s.inputs.kind == "images" else "sequence_length"
        if kind == "encode" and s.kind == "encoder":
            found.add(answer.name, FLOAT, ("batch_size", *(() if answer.pooled else (T,)), answer.size))
        elif kind == "encode":
            assert s.encoded_width is not None
            found.add("last_hidden_state", FLOAT, ("batch_size", T, s.encoded_width))
            for state in self.spec:
                if state.growth == "fixed":
                    shape = tuple(T if dim == "encoder_sequence_length" else dim for dim in state.shape)
                    found.add(state.present, self._dtype, shape)
        else:
            T = 1 if kind == "decode" else "sequence_length"
            kept: int | str = 1 if kind == "decode" or answer.only_last else "logits_length"
            found.add(answer.name, FLOAT, ("batch_size", kept, answer.size))
            for state in self.spec:
                if state.growth != "fixed":
                    found.add(state.present, self._dtype, tuple(present_shape(state.shape, "append")))
        self._add_maps(found, kind, T)
        return found

    def _add_maps(self, found: Tensors, kind: GraphKind, T: int | str) -> None:
        s = self.signature
        if kind == "encode":
            names, maps = s.encoder_map_names, s.maps if s.kind == "encoder" else s.encoder_maps
            for name, (_, heads) in zip(names, maps, strict=True):
                found.add(name, self._dtype, ("batch_size", heads, T, T))
            return
        is_recurrent = all(state.growth == "constant" for state in self.spec)
        for name, (_, heads) in zip(s.map_names, s.maps * 2, strict=False):
            columns: int | str = T if is_recurrent else "total_sequence_length"
            if name.startswith("cross"):
                columns = s.inputs.length if s.inputs.kind == "images" else "encoder_sequence_length"
            found.add(name, self._dtype, ("batch_size", heads, T, columns))

    # --- tracing ------------------------------------------------------------------------------------------

    def _pieces(self, model: Transformer | OwnModule, kind: GraphKind) -> list[Piece]:
        taken = self._inputs(kind)
        shapes = taken.shapes + ([] if kind == "encode" else [state.shape for state in self.spec])
        dtypes = taken.dtypes + [self._dtype] * (len(shapes) - len(taken.shapes))
        examples = [_example(shape, dtype, kind) for shape, dtype in zip(shapes, dtypes, strict=True)]
        axes = [[i for i, dim in enumerate(shape) if isinstance(dim, str)] for shape in shapes]
        names = taken.names

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(names, values, strict=False))
            main = values[0]
            if kind == "encode":
                outputs = model.encode(main, given.get("attention_mask"))
            else:
                call: Callable[..., Outputs] = model.body if self._splits(model) else model.step  # type: ignore[assignment]
                outputs = call(
                    main, given["attention_mask"], given["position_ids"], list(values[len(names) :]),
                    given.get("encoder_attention_mask"),
                )  # fmt: skip
            self._check_state_count(kind, outputs)
            maps = self.signature.encoder_map_names if kind == "encode" else self.signature.map_names
            return outputs.main, *outputs.state, *(outputs.maps[name] for name in maps)

        pieces = [Piece(kind, run, examples, axes, len(self._outputs(kind).names))]
        if kind != "encode" and self._splits(model):
            assert isinstance(model, Transformer)
            T = 1 if kind == "decode" else _SIZES["sequence_length"]
            hidden = torch.zeros(_SIZES["batch_size"], T, model.config.width, dtype=torch_dtype(self._dtype))
            pieces.append(Piece(f"{kind} head", model.logits, [hidden], [[0] if kind == "decode" else [0, 1]], 1))
        return pieces

    def _splits(self, model: Transformer | OwnModule) -> bool:
        """A head that looks at each element alone can come after the choice of columns."""
        return isinstance(model, Transformer) and not self.signature.outputs.only_last

    def _check_state_count(self, kind: GraphKind, outputs: Outputs) -> None:
        wanted = sum((state.growth == "fixed") == (kind == "encode") for state in self.spec)
        if len(outputs.state) != wanted:
            raise ModuleError(
                f"the module's forward returns {len(outputs.state)} state tensors, its state_spec has {wanted}"
            )

    # --- stitching ----------------------------------------------------------------------------------------

    def _stitch(
        self, kind: GraphKind, fragments: Mapping[str, Fragment], target: Target, opset: int, plan: _ContentPlan
    ) -> ir.Model:
        builder = Builder(kind, opset)
        taken, given = self._inputs(kind), self._outputs(kind)
        inputs = [builder.input(*one) for one in zip(taken.names, taken.dtypes, taken.shapes, strict=True)]
        if kind != "encode":
            inputs += [builder.input(state.past, self._dtype, state.shape) for state in self.spec]
        keep = keep_input(builder) if kind == "prefill" and not self.signature.outputs.only_last else None
        lowering_kind = PortableLowering if target == "portable" else FusedLowering
        context = max(self.signature.inputs.length, self.signature.steps.length)
        lowering = lowering_kind(builder, self._dtype, context, is_decode=kind == "decode")
        main, *rest = stamp(fragments[kind], inputs, "", lowering, plan)
        main = main if keep is None else lowering.select(main, keep)
        if f"{kind} head" in fragments:
            builder.scope = "head"
            [main] = stamp(fragments[f"{kind} head"], [main], "", lowering, plan)
        for value, *one in zip([main, *rest], given.names, given.dtypes, given.shapes, strict=True):
            builder.output(value, *one)
        builder.drop_unused(["position_ids"])
        return builder.model()


_SIZES = {
    "batch_size": 2, "sequence_length": 5, "past_sequence_length": 3, "total_sequence_length": 8,
    "encoder_sequence_length": 7,
}  # fmt: skip


def _example(shape: Shape, dtype: ir.DataType, kind: GraphKind) -> Tensor:
    sizes = _SIZES | ({"total_sequence_length": 4} if kind == "decode" else {})
    dims_ = [sizes[dim] if isinstance(dim, str) else dim for dim in shape]
    if dtype == INT64:
        return torch.ones(dims_, dtype=torch.int64)
    return torch.zeros(dims_, dtype=torch_dtype(dtype))


class _ContentPlan(WeightPlan):
    """Weights by content: tied ones come under either name, and constants have none."""

    def __init__(self, dtype: ir.DataType) -> None:
        super().__init__(dtype, {})
        self._names: dict[str, str] = {}  # content → name in the file
        self._tensors: dict[str, Tensor] = {}

    def adopt(self, fragment: Fragment) -> Fragment:
        constants, weights = [], {}
        for value in [*fragment.weights, *fragment.constants]:
            assert value.const_value is not None
            array = value.const_value.numpy()
            if value not in fragment.weights and array.size <= INLINE:
                constants.append(value)
                continue
            digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()
            name = self._names.setdefault(digest, fragment.weights.get(value, f"constant.{len(self._names)}"))
            self._tensors[name] = torch.from_numpy(array.copy())
            weights[value] = name
        adopted = replace(fragment, constants=constants, weights=weights)
        self.see(adopted, "")
        return adopted

    def use(self, builder: Builder, name: str, shape: Sequence[int]) -> ir.Value:  # noqa: ARG002 - the tensor is known
        tensor = self._tensors[name]
        stored = tuple(reversed(tensor.shape)) if self.is_column(name) else tuple(tensor.shape)
        dtype = ir.DataType.from_numpy(tensor.numpy().dtype)
        self.weights[name] = Weight(name, dtype, stored, self.is_column(name))
        return builder.weight(name, dtype, stored)

    def reader(self, value: ir.Value) -> Callable[[], Tensor]:
        name = str(value.name)
        if name == COLUMNS:
            [length] = dims(value)
            return lambda: torch.arange(length)
        tensor = self._tensors[name]
        return lambda: tensor.T if self.is_column(name) else tensor
