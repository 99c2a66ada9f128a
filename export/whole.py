"""Models that are traced whole: everything but the decoders that `stitch.py` stamps layer by layer.

All graphs of a model are traced side by side in one go. A decoder's graphs are two pieces each, so that the head runs
on the columns that were asked for only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import onnx_ir as ir
import torch
from torch import Tensor

from ..runtime.bundle import FileInfo
from ..tfm_model.blocks import Blocks
from ..tfm_model.checkpoint import CheckpointKind, GenerationDefaults
from ..tfm_model.state import StateSpec
from ..tfm_model.transformer import Transformer
from .arithmetic import Arithmetic
from .builder import Builder
from .content_plan import ContentPlan
from .eval_mode import TrainingOps, check_eval
from .held_module import HeldModule
from .layout import Target
from .own_calls import OwnModule
from .own_module import ModuleError
from .own_trace import TRANSLATIONS, with_columns
from .progress import Progress
from .properties import check_properties
from .quantiser import PLAIN, Numbers, Quantiser, rounded
from .recipe import Matrix
from .rounded import RoundedInputs
from .signature import Signature
from .slots import OTHER_SIZES, SIZES, GraphSlots, Slot, check_outputs, sizes_of
from .source import Graphs, left_float
from .stitch import (
    GRAPHS_OF_KIND,
    GraphKind,
    column_lowering,
    keep_input,
    stamp,
)
from .stored import StoredMatrices
from .trace import TRACE_OPSET, Fragment, Piece, trace_pieces
from .trace_failures import check_operators, noted_sizes, trace_failure
from .transposed_products import products_first
from .user_code import users_code
from .weights import stored_tensors, torch_dtype
from .whole_reference import WholeReference


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
        self.is_own = isinstance(model, OwnModule)
        self._prefix = "own." if self.is_own else ""  # `OwnModule` holds the user's module under this name
        self._held = HeldModule(model, self._prefix)
        self.signature, self._dtype = signature, dtype
        self.kind, self._files, self.model_info = kind, files, model_info
        self.generation, self.texts = generation, texts
        self.spec: StateSpec = model.state_spec()
        self.max_context = signature.steps.length
        recurrent = all(state.growth in {"constant", "fixed"} for state in self.spec)
        self._slots = GraphSlots(signature, self.spec, dtype, forgets=recurrent and not self.is_own)

    def digests(self) -> dict[str, FileInfo]:
        return dict(self._files)

    def growth(self, target: Target) -> str:  # noqa: ARG002 - the same for both
        return "append"

    def weight(self, name: str) -> Tensor | None:
        weight = self._held.tensors.get(name)
        return None if weight is None else weight.float()

    def smoothed(self, numbers: Numbers, progress: Progress) -> WholeSource:  # noqa: ARG002 (it cannot be)
        return self

    def smoothed_as(self, stored: StoredMatrices, progress: Progress) -> WholeSource:  # noqa: ARG002
        return self

    def check_module(self, progress: Progress) -> None:
        if not self.is_own:  # tests/test_family_properties.py asks the built-in family, every setting of it
            return
        with self._in_precision() as model:  # first, since it names the user's line
            self._probe(model)
        check_properties(self.reference(), progress)

    def _in_precision(self) -> AbstractContextManager[Transformer | OwnModule]:
        dtype = torch_dtype(self._dtype)
        return self._held.converted(lambda _, tensor: tensor.to(dtype))

    def reference(self, stored: StoredMatrices | None = None) -> WholeReference:
        names = {} if stored is None else self._names_in_file(stored)
        layouts = {} if stored is None else {name: stored.layouts[own] for name, own in names.items()}

        def read(name: str) -> Tensor:
            assert stored is not None
            return stored.read(names[name])

        return WholeReference(self._held, self.signature, self.spec, torch_dtype(self._dtype), read, layouts)

    def _names_in_file(self, stored: StoredMatrices) -> dict[str, str]:
        """Of each quantised matrix, by the model's names for it: equal ones lie in the file once (`ContentPlan`)."""
        weights = self._held.tensors
        return {
            name: own
            for own in stored.layouts
            if own in weights
            for name, weight in weights.items()
            if weight.shape == weights[own].shape and torch.equal(weight, weights[own])
        }

    def graphs(self, target: Target, opset: int, progress: Progress, numbers: Numbers = PLAIN) -> Graphs:
        if self.is_own and opset < TRACE_OPSET:
            raise ModuleError(f"--opset is {opset}; a module of your own is traced at {TRACE_OPSET} or above")
        progress.stage("tracing", 1)
        kinds = GRAPHS_OF_KIND[self.signature.kind]
        plan = ContentPlan(self._dtype)
        with self._in_precision() as model:
            traced, linear = self._traced(model, kinds, opset)
            fragments = {name: plan.adopt(fragment) for name, fragment in traced.items()}
        progress.advance()
        matrices = self._matrices(plan, linear)
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
        plain = () if numbers.quant is None else tuple(self._plain_matrices(plan, matrices))
        return Graphs(models, tensors, layouts, floats=left_float(matrices, layouts), plain=plain)

    def _matrices(self, plan: ContentPlan, linear: set[str]) -> dict[str, Matrix]:
        """What can be quantised."""
        if not self.is_own:
            return plan.matrices()
        weights = self._held.tensors
        places = {weights[name].data_ptr() for name in linear}  # a tied weight has several names
        return plan.own_matrices(
            lambda name: name in weights and weights[name].data_ptr() in places,
            {self.signature.inputs.vocab_size, self.signature.steps.vocab_size},
        )

    def _plain_matrices(self, plan: ContentPlan, matrices: Mapping[str, Matrix]) -> Iterator[str]:
        """What cannot be quantised."""
        for name, tensor in plan.tensors.items():
            is_matrix = name in self._held.tensors and tensor.dim() == 2 and tensor.is_floating_point()
            if is_matrix and name not in matrices:
                yield name

    def _traced(
        self, model: Transformer | OwnModule, kinds: Sequence[GraphKind], opset: int
    ) -> tuple[dict[str, Fragment], set[str]]:
        """And of an own module the weights that F.linear multiplies by."""
        pieces = [piece for kind in kinds for piece in self._pieces(model, kind)]
        if not self.is_own:
            return trace_pieces(model, pieces), set()
        lines, linear = self._probe(model)
        shapes = [slot.shape for kind in kinds for slot in self._slots.inputs(kind)]
        with noted_sizes() as notes:
            try:
                traced = trace_pieces(model, pieces, opset, TRANSLATIONS)
            except Exception as error:
                raise trace_failure(error, shapes, notes, lines) from error
        check_operators(traced.values())
        return traced, linear

    @torch.no_grad()
    def _probe(self, model: Transformer | OwnModule) -> tuple[Mapping[str, str | None], set[str]]:
        """Run an own module before it is traced: what fails here has the user's line, and not a page of torch's.

        At the sizes that it is traced with and at others, so that a size which is built in is noticed.
        """
        check_eval(model)
        linear: set[str] = set()
        note = RoundedInputs(lambda weight: linear.add(self._held.name_of(weight) or ""))  # rounds nothing
        watch, before, dtype = TrainingOps(), "", torch_dtype(self._dtype)
        for sizes in (SIZES, OTHER_SIZES):
            for kind in GRAPHS_OF_KIND[self.signature.kind]:
                slots = self._slots.inputs(kind)
                [piece, *_] = self._pieces(model, kind, sizes)
                given = sizes_of(slots, sizes, kind)
                with users_code(f"the module fails with {given}{before}", model, dtype), watch, note:
                    found = piece.run(*piece.inputs)
                check_outputs(found, self._slots.outputs(kind))  # type: ignore[arg-type]
                before = f", though not with {given}"
        return watch.lines, linear - {""}

    # --- tracing ------------------------------------------------------------------------------------------

    def _pieces(
        self, model: Transformer | OwnModule, kind: GraphKind, sizes: Mapping[str, int] = SIZES
    ) -> list[Piece]:
        slots = self._slots.inputs(kind)
        names = [slot.name for slot in slots]
        count = len(names) - (0 if kind == "encode" else len(self.spec))  # without the state

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(names, values, strict=True))
            if kind == "encode":
                outputs = model.encode(values[0], given.get("attention_mask"))
            else:
                call = model.body if isinstance(model, Transformer) and self._splits else model.step
                outputs = call(
                    values[0], self._mask(values[0], given), given["position_ids"], list(values[count:]),
                    given.get("encoder_attention_mask"),
                )  # fmt: skip
            maps = self.signature.encoder_map_names if kind == "encode" else self.signature.map_names
            return outputs.main, *outputs.state, *(outputs.maps[name] for name in maps)

        examples = [slot.example(sizes, kind) for slot in slots]
        axes = [slot.free_axes for slot in slots]
        pieces = [Piece(kind, run, examples, axes, len(self._slots.outputs(kind)), self._prefix)]
        if kind != "encode" and isinstance(model, Transformer) and self._splits:
            length: int | str = 1 if kind == "decode" else "sequence_length"
            hidden = Slot("hidden", self._dtype, ("batch_size", length, model.config.width))
            pieces.append(
                Piece(f"{kind} head", model.logits, [hidden.example(sizes, kind)], [hidden.free_axes], 1)
            )
        return pieces

    def _mask(self, inputs: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        mask, growing = given["attention_mask"], [state for state in self.spec if state.growth == "append"]
        if not self.is_own or not growing:
            return mask
        axis = growing[0].shape.index("past_sequence_length")
        return with_columns(mask, inputs, given[growing[0].past].shape[axis])

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
        inputs = [builder.input(slot.name, slot.dtype, slot.shape) for slot in self._slots.inputs(kind)]
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
        for value, slot in zip([main, *rest], self._slots.outputs(kind), strict=True):
            builder.output(value, slot.name, slot.dtype, slot.shape)
        products_first(builder)
        builder.drop_unused(["position_ids"])
        return builder.model()
