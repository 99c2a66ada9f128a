"""What is exported, whatever it came from: graphs to stitch, weights to store, a reference to check against."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import onnx_ir as ir
import torch

from .. import InputError
from ..runtime.bundle import FileInfo, file_info
from ..tfm_model.checkpoint import Checkpoint, GenerationDefaults, read_finite
from ..tfm_model.config import ModelConfig
from ..tfm_model.decoder import Decoder
from ..tfm_model.rotary import rotary_tables
from ..tfm_model.source import is_python_source, open_checkpoint
from ..tfm_model.state import StateSpec
from .lower_portable import COLUMNS
from .progress import Progress
from .reference import DecoderReference, Reference
from .stitch import GraphKind, Target, WeightPlan, dims, stitch_decoder
from .trace import trace_decoder
from .weights import StoredTensor, torch_dtype

KINDS: tuple[GraphKind, ...] = ("prefill", "decode")
MIN_CONTEXT = 2  # a prompt of one token, and one answer
SourceKind = Literal["gguf", "huggingface", "python"]


@dataclass(frozen=True, slots=True)
class Graphs:
    models: dict[GraphKind, ir.Model]
    tensors: list[StoredTensor]  # of the weights file, in order


class Source(Protocol):
    """A model that can be exported: a checkpoint of a built-in decoder, or a user's own module."""

    kind: SourceKind
    spec: StateSpec
    vocab_size: int
    max_context: int
    model_info: dict[str, object]
    generation: GenerationDefaults
    texts: dict[str, str]  # small files of the bundle: tokenizer.json, chat_template.jinja, config.json

    def digests(self) -> dict[str, FileInfo]: ...

    def growth(self, target: Target) -> str: ...

    def graphs(self, target: Target, opset: int, progress: Progress) -> Graphs: ...

    def reference(self) -> Reference: ...


def open_source(source: str, dtype: ir.DataType, max_context: int | None) -> Source:
    if is_python_source(source):
        from .module import ModuleSource

        return ModuleSource(source, dtype, max_context)
    return CheckpointSource(open_checkpoint(source), dtype, max_context)


class CheckpointSource:
    def __init__(self, checkpoint: Checkpoint, dtype: ir.DataType, max_context: int | None) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self.kind: SourceKind = "gguf" if checkpoint.kind == "gguf" else "huggingface"
        self.config = config = _with_context(checkpoint, max_context)
        self.vocab_size, self.max_context = config.vocab_size, config.context
        with torch.device("meta"):
            self.spec = Decoder(replace(config, context=1)).state_spec()
        self.model_info: dict[str, object] = dataclasses.asdict(config)
        self.generation = checkpoint.generation
        self.texts = downstream_texts(checkpoint)

    def digests(self) -> dict[str, FileInfo]:
        return {path.name: file_info(path) for path in self._checkpoint.files}

    def growth(self, target: Target) -> str:
        return "append" if target == "portable" else "capacity"

    def graphs(self, target: Target, opset: int, progress: Progress) -> Graphs:
        progress.stage("tracing", 1)
        fragments = trace_decoder(self.config, torch_dtype(self._dtype))
        progress.advance()
        tied = {"head.weight": "embed.weight"} if self.config.tied_head else {}
        plan = WeightPlan(self._dtype, tied)
        progress.stage("stitching", len(KINDS))
        models: dict[GraphKind, ir.Model] = {}
        for kind in KINDS:
            models[kind] = stitch_decoder(kind, self.config, fragments, self.spec, target, opset, plan)
            progress.advance()
        return Graphs(models, stored_tensors(models.values(), lambda value: self._reader(value, plan)))

    def _reader(self, value: ir.Value, plan: WeightPlan) -> Callable[[], torch.Tensor]:
        name, dtype = str(value.name), torch_dtype(self._dtype)
        if name in plan.weights:
            tensor = self._checkpoint.tensors[name]
            if plan.is_column(name):
                return lambda: read_finite(tensor, dtype).T
            return lambda: read_finite(tensor, dtype)
        if name == COLUMNS:
            return lambda: torch.arange(self.max_context)
        rotary = self.config.attention.rotary
        assert rotary is not None
        index = ("rotary.cos", "rotary.sin").index(name)
        return lambda: rotary_tables(rotary, self.max_context)[index].to(dtype)

    def reference(self) -> Reference:
        precision = torch_dtype(self._dtype)
        return DecoderReference(
            self.config,
            precision,
            lambda name, dtype: read_finite(self._checkpoint.tensors[name], precision).to(dtype),
        )


def stored_tensors(
    models: Iterable[ir.Model], reader: Callable[[ir.Value], Callable[[], torch.Tensor]]
) -> list[StoredTensor]:
    """The weights of all graphs, each once, in the order of first use."""
    tensors: dict[str, StoredTensor] = {}
    for model in models:
        for name, value in model.graph.initializers.items():
            if value.const_value is None and name not in tensors:
                assert value.dtype is not None
                tensors[name] = StoredTensor(name, value.dtype, dims(value), reader(value))
    return list(tensors.values())


def _with_context(checkpoint: Checkpoint, max_context: int | None) -> ModelConfig:
    config = checkpoint.config
    if config.context < MIN_CONTEXT:
        raise InputError(f"the model's context is {config.context}, wanted at least {MIN_CONTEXT}")
    if max_context is None:
        return config
    if max_context < MIN_CONTEXT:
        raise InputError(f"--max-context is {max_context}, wanted at least {MIN_CONTEXT}")
    rotary = config.attention.rotary
    stretches = rotary is not None and rotary.scaling is not None and rotary.scaling.kind == "dynamic"
    if max_context > config.context and not stretches:
        raise InputError(
            f"--max-context is {max_context}, but the model was made for {config.context} positions; "
            f"ask for {config.context} or fewer"
        )
    return replace(config, context=max_context)


def downstream_texts(checkpoint: Checkpoint) -> dict[str, str]:
    """The small files that the runtime and other runtimes look for."""
    texts: dict[str, str] = {}
    if checkpoint.tokenizer_json is not None:
        texts["tokenizer.json"] = checkpoint.tokenizer_json
    if checkpoint.chat_template is not None:
        texts["chat_template.jinja"] = checkpoint.chat_template
    if checkpoint.huggingface_config is not None:
        texts["config.json"] = _json(checkpoint.huggingface_config)
    generation = checkpoint.generation
    defaults: dict[str, object] = {
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": list(generation.eos_token_ids) or None,
        "pad_token_id": generation.pad_token_id,
        **generation.sampling,
    }
    texts["generation_config.json"] = _json(
        {key: value for key, value in defaults.items() if value is not None}
    )
    return texts


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
