"""What is exported, whatever it came from: graphs to stitch, weights to store, a reference to check against."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import onnx_ir as ir
import torch

from .. import InputError
from ..runtime.bundle import FileInfo, file_info
from ..tfm_model.blocks import BlockFormat, Blocks
from ..tfm_model.checkpoint import (
    Checkpoint,
    CheckpointKind,
    GenerationDefaults,
    read_finite,
    read_finite_blocks,
)
from ..tfm_model.config import ModelConfig, TokenInputs
from ..tfm_model.inputs import position_table
from ..tfm_model.presets import PRESET, preset_checkpoint
from ..tfm_model.rotary import rotary_tables
from ..tfm_model.source import is_python_source, open_checkpoint
from ..tfm_model.state import StateSpec, model_state
from ..tfm_model.transformer import Transformer
from .cache_scales import cache_scales
from .calibrate import Calibration, calibrate
from .decoder_reference import DecoderReference
from .downstream import downstream_texts
from .fitting import can_stamp, fitted, keeps_slots
from .layout import BlockLayout, Target
from .lower_basic import COLUMNS
from .progress import Progress
from .quantiser import PLAIN, Numbers, Quantiser, rounded
from .recipe import Matrix
from .reference import Reference
from .shown_layers import Layers
from .signature import Signature, model_signature
from .smoothing import find_smoothing, recover_smoothing
from .source_check import check_source
from .stitch import (
    GRAPHS_OF_KIND,
    POSITION_TABLE,
    GraphKind,
    WeightPlan,
    stitch_decoder,
)
from .stored import StoredMatrices
from .trace import trace_decoder
from .weights import StoredTensor, stored_tensors, torch_dtype

POSITIONS = "embed.positions.weight"  # a table of positions, not of tokens


@dataclass(frozen=True, slots=True)
class Graphs:
    models: dict[GraphKind, ir.Model]
    tensors: list[StoredTensor]  # of the weights file, in order
    layouts: Mapping[str, BlockLayout] = field(default_factory=dict)  # of the quantised matrices
    all_kept: bool = False  # those are the checkpoint's own blocks
    floats: tuple[str, ...] = ()  # matrices that are not quantised beside them, though they could be
    plain: tuple[str, ...] = ()  # what else of an own module is a matrix: --quant leaves it as it is


class Source(Protocol):
    """A model that can be exported: a decoder that is stamped layer by layer, or anything that is traced whole."""

    kind: CheckpointKind
    signature: Signature
    spec: StateSpec
    max_context: int
    model_info: dict[str, object]
    generation: GenerationDefaults
    texts: dict[str, str]  # small files of the bundle: tokenizer.json, chat_template.jinja, config.json
    can_be_smoothed: bool

    def digests(self) -> dict[str, FileInfo]: ...

    def growth(self, target: Target) -> str: ...

    def graphs(self, target: Target, opset: int, progress: Progress, numbers: Numbers = PLAIN) -> Graphs: ...

    def smoothed(self, numbers: Numbers, progress: Progress) -> Source:
        """The same model, its channels evened out where matrices are to be rounded (if it can be)."""

    def smoothed_as(self, stored: StoredMatrices, progress: Progress) -> Source:
        """The same model, evened out as a bundle of it was."""

    def weight(self, name: str) -> torch.Tensor | None:
        """A matrix (out, in) as the source has it, in float32; None if it has none of that name."""

    def check_module(self, progress: Progress) -> None:
        """Refuse a module of a user's that is not consistent with itself in PyTorch."""

    def reference(self, stored: StoredMatrices | None = None) -> Reference:
        """PyTorch, with the weights of the source but for the matrices that are stored."""


def open_source(source: str, dtype: ir.DataType, max_context: int | None, attentions: Layers = ()) -> Source:
    check_source(source, max_context, attentions)
    if is_python_source(source):
        from .python_source import open_python

        return open_python(source, dtype, max_context, attentions)
    checkpoint = preset_checkpoint(source) if source.startswith(PRESET) else open_checkpoint(source)
    return checkpoint_source(checkpoint, dtype, max_context, attentions)


def checkpoint_source(
    checkpoint: Checkpoint, dtype: ir.DataType, max_context: int | None, attentions: Layers = ()
) -> Source:
    config = fitted(checkpoint.config, max_context, attentions)
    _check_generation(config, checkpoint.generation)
    checkpoint = replace(checkpoint, config=config)
    if can_stamp(config):
        return CheckpointSource(checkpoint, dtype)
    from .whole import WholeSource

    return WholeSource(
        filled(checkpoint),
        model_signature(config),
        dtype,
        kind=checkpoint.kind,
        files={path.name: file_info(path) for path in checkpoint.files},
        model_info=dataclasses.asdict(config),
        generation=checkpoint.generation,
        texts=downstream_texts(checkpoint),
    )


def filled(checkpoint: Checkpoint) -> Transformer:
    """The module with the checkpoint's weights."""
    model = Transformer(checkpoint.config)
    dtype = torch.get_default_dtype()
    weights = {name: read_finite(tensor, dtype) for name, tensor in checkpoint.tensors.items()}
    model.load_state_dict(weights, strict=False)
    return model


class CheckpointSource:
    """A decoder that is stamped layer by layer: neither its weights nor its layers are ever in memory together."""

    can_be_smoothed = True

    def __init__(
        self, checkpoint: Checkpoint, dtype: ir.DataType, importance: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """`importance`: of the inputs of matrices, where a text has shown it."""
        self._checkpoint, self._dtype, self._importance = checkpoint, dtype, importance or {}
        self.kind: CheckpointKind = checkpoint.kind
        self.config = config = checkpoint.config
        self.signature, self.max_context = model_signature(config), config.context
        self.spec = model_state(config)
        self.model_info: dict[str, object] = dataclasses.asdict(config)
        self.generation = checkpoint.generation
        self.texts = downstream_texts(checkpoint)

    def digests(self) -> dict[str, FileInfo]:
        return {path.name: file_info(path) for path in self._checkpoint.files}

    def growth(self, target: Target) -> str:
        return "capacity" if keeps_slots(self.config, target) else "append"

    def graphs(self, target: Target, opset: int, progress: Progress, numbers: Numbers = PLAIN) -> Graphs:
        matrices = self._matrices()
        layouts = numbers.layouts(matrices)
        progress.stage("tracing", 1)
        fragments = trace_decoder(self.config, torch_dtype(self._dtype))
        progress.advance()
        tied = {"head.weight": "embed.weight"} if self.config.head.tied else {}
        plan = WeightPlan(self._dtype, tied, layouts)
        kinds = GRAPHS_OF_KIND["decoder"]
        progress.stage("stitching", len(kinds))
        models: dict[GraphKind, ir.Model] = {}
        for kind in kinds:
            models[kind] = stitch_decoder(
                kind, self.config, fragments, self.spec, target, opset, plan, numbers.arithmetic
            )
            progress.advance()
        calibration = self._calibration(numbers, layouts, progress)

        def blocks_of(name: str) -> Blocks:
            assert numbers.quant is not None
            if numbers.quant.keeps(matrices[name].blocks):
                return read_finite_blocks(self._checkpoint.tensors[name])
            if name in calibration.blocks:
                return calibration.blocks[name]
            weight = self.weight(name)
            assert weight is not None
            return rounded(numbers.quant, layouts[name], weight, name, self._importance.get(name))

        quantiser = Quantiser(layouts, target, torch_dtype(self._dtype), blocks_of)
        scales = cache_scales(calibration.ranges) if numbers.kv == "int8" else {}

        def reader(value: ir.Value) -> Callable[[], torch.Tensor]:
            name = str(value.name)
            if name in scales:
                return lambda: scales[name]
            return quantiser.reader(name) or self._reader(value, plan)

        tensors = stored_tensors(models.values(), reader, layouts)
        all_kept = numbers.quant is not None and not numbers.quant.rounds(matrices, layouts)
        return Graphs(models, tensors, layouts, all_kept, left_float(matrices, layouts))

    def _calibration(
        self, numbers: Numbers, layouts: Mapping[str, BlockLayout], progress: Progress
    ) -> Calibration:
        """What a text tells about the model, where that is asked for."""
        calibrates = numbers.quant is not None and numbers.quant.calibrate is not None
        if not calibrates and numbers.kv != "int8":
            return Calibration()
        assert numbers.windows is not None
        kept = numbers.quant.keeps if numbers.quant is not None else lambda _: False

        def format_of(name: str) -> BlockFormat | None:
            if not calibrates or name not in layouts or kept(self._checkpoint.tensors[name].blocks):
                return None
            return layouts[name].format

        return calibrate(self.config, self._read, numbers.windows, format_of, progress)

    def _matrices(self) -> dict[str, Matrix]:
        """What linear layers and the embedding of tokens read."""
        return {
            name: Matrix(tensor.shape, tensor.blocks)
            for name, tensor in self._checkpoint.tensors.items()
            if len(tensor.shape) == 2 and name != POSITIONS
        }

    def _reader(self, value: ir.Value, plan: WeightPlan) -> Callable[[], torch.Tensor]:
        name, dtype = str(value.name), torch_dtype(self._dtype)
        if name == POSITION_TABLE:
            return lambda: position_table(self.config).to(dtype)
        if name in self._checkpoint.tensors:
            tensor = self._checkpoint.tensors[name]
            if plan.layout(name) == "columns":
                return lambda: read_finite(tensor, dtype).T
            return lambda: read_finite(tensor, dtype)
        if name == COLUMNS:
            return lambda: torch.arange(self.max_context)
        rotary = self.config.attention.rotary
        assert rotary is not None
        index = ("rotary.cos", "rotary.sin").index(name)
        return lambda: rotary_tables(rotary, self.max_context)[index].to(dtype)

    def smoothed(self, numbers: Numbers, progress: Progress) -> CheckpointSource:
        quant = numbers.quant
        assert quant is not None
        assert numbers.windows is not None
        matrices = self._matrices()
        layouts = quant.layouts(matrices)

        if not quant.rounds(matrices, layouts):
            return self

        def is_rounded(name: str) -> bool:
            return name in layouts and not quant.keeps(matrices[name].blocks)

        found = find_smoothing(self.config, self._read, numbers.windows, is_rounded, progress)
        return CheckpointSource(found.smoothed(self._checkpoint), self._dtype, found.importance)

    def smoothed_as(self, stored: StoredMatrices, progress: Progress) -> CheckpointSource:
        found = recover_smoothing(self.config, self._read, stored, progress)
        return CheckpointSource(found.smoothed(self._checkpoint), self._dtype)

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return read_finite(self._checkpoint.tensors[name], dtype)

    def weight(self, name: str) -> torch.Tensor | None:
        tensor = self._checkpoint.tensors.get(name)
        return None if tensor is None else read_finite(tensor, torch.float32)

    def check_module(self, progress: Progress) -> None:
        """It is ours: tests/test_family_properties.py asks every setting of it."""

    def reference(self, stored: StoredMatrices | None = None) -> Reference:
        precision = torch_dtype(self._dtype)

        def read(name: str, dtype: torch.dtype) -> torch.Tensor:
            if stored is not None and name in stored:
                return stored.read(name).to(dtype)
            return self._read(name, precision).to(dtype)

        return DecoderReference(self.config, precision, read, stored)


def left_float(matrices: Mapping[str, Matrix], layouts: Mapping[str, BlockLayout]) -> tuple[str, ...]:
    return tuple(name for name in matrices if name not in layouts)


def _check_generation(config: ModelConfig, generation: GenerationDefaults) -> None:
    """What the manifest would refuse, before anything is computed."""
    start = generation.decoder_start_token_id
    if (config.kind == "encoder-decoder") != (start is not None):
        raise InputError(
            f"decoder_start_token_id is {start}, and this is a {config.kind}: an encoder-decoder needs one "
            "(give save_model a GenerationDefaults, or the module an attribute), others have none"
        )
    vocab_size = config.inputs.vocab_size if isinstance(config.inputs, TokenInputs) else 0
    for token_id in (generation.bos_token_id, generation.pad_token_id, start, *generation.eos_token_ids):
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise InputError(f"generation names token {token_id}, the vocabulary has {vocab_size}")
