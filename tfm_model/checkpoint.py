"""A checkpoint, whatever file it came from: config, lazily read tensors, tokenizer, defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from .blocks import Blocks, LazyBlocks, concat
from .checks import CheckpointError as CheckpointError  # noqa: PLC0414 (lives there for whoever does without torch)
from .config import ModelConfig

CheckpointKind = Literal["gguf", "huggingface", "tfmx", "preset", "python"]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor whose bytes stay in the file until `read` is called."""

    name: str  # as the file calls it, for messages
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    blocks: LazyBlocks | None = (
        None  # what the file holds, if that is blocks of codes; `read` dequantises them
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What the model's makers say about generating with it."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None  # an encoder-decoder's answer begins with it
    sampling: dict[str, float] = field(default_factory=dict)  # temperature, top_p, ...: only what they set


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    kind: CheckpointKind
    files: tuple[Path, ...]  # what was read, for the digests in the manifest
    config: ModelConfig
    tensors: Mapping[str, LazyTensor]  # by the parameter names of `tfm_model.transformer.Transformer`
    generation: GenerationDefaults
    tokenizer_json: str | None = None
    chat_template: str | None = None
    huggingface_config: Mapping[str, object] | None = None  # a config.json for downstream runtimes


def concat_rows(name: str, parts: Sequence[LazyTensor]) -> LazyTensor:
    """The parts below each other, as one tensor that is read part by part."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return LazyTensor(name, shape, lambda: torch.cat([part.read() for part in parts]), _concat_blocks(parts))


def _concat_blocks(parts: Sequence[LazyTensor]) -> LazyBlocks | None:
    """The parts' blocks, if all have them, and of one kind."""
    blocks = [part.blocks for part in parts if part.blocks is not None]
    if len(blocks) < len(parts) or len({part.kind for part in blocks}) > 1:
        return None
    return LazyBlocks(*blocks[0].kind, lambda: concat([part.read() for part in blocks]))


def read_finite(tensor: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the dtype that is wanted, or CheckpointError if a value is not finite in either."""
    source = tensor.read()
    if not _is_finite(source):
        raise CheckpointError(f"tensor {tensor.name} holds a value that is not finite (NaN or infinite)")
    values = source.to(dtype)
    if not _is_finite(values):
        low, high = torch.aminmax(source)
        raise CheckpointError(
            f"tensor {tensor.name} reaches {max(-float(low), float(high)):.6g}, more than {dtype} can hold "
            f"({torch.finfo(dtype).max:.6g}); export it as float32"
        )
    return values


def read_finite_blocks(tensor: LazyTensor) -> Blocks:
    """The blocks of a tensor that has them, or CheckpointError if one stands for values that are not finite."""
    assert tensor.blocks is not None
    blocks = tensor.blocks.read()
    if not all(_is_finite(part) for part in (blocks.scales, blocks.shifts) if part is not None):
        raise CheckpointError(f"tensor {tensor.name} holds a value that is not finite (NaN or infinite)")
    return blocks


def _is_finite(values: torch.Tensor) -> bool:
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)  # NaN comes through; unlike isfinite(), this makes no copy
    return math.isfinite(low) and math.isfinite(high)
