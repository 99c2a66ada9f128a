"""Every preset as a small model with random weights, in PyTorch and exported: what the tests of the family share.

Presets that are the same setting under another name appear once, and `vaswani-base` with fewer and shorter
vectors. Norms and biases are random too: of those that a new model has, one and zero, many faults cannot be seen.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal
from unittest import mock

import onnx_ir as ir
import torch
from torch import Tensor

from tfmx.export import whole
from tfmx.export.options import ExportOptions
from tfmx.export.pipeline import export_model
from tfmx.export.source import checkpoint_source
from tfmx.export.trace import default_dtype
from tfmx.tfm_model.config import AttentionConfig, MlpConfig, ModelConfig, PatchInputs, TokenInputs
from tfmx.tfm_model.presets import PRESETS, preset_generation
from tfmx.tfm_model.tfmx_folder import model_checkpoint
from tfmx.tfm_model.transformer import Transformer

Target = Literal["ort", "portable"]
TARGETS: tuple[Target, ...] = ("ort", "portable")
B, S = 2, 7  # rows of a batch, length of an encoder-decoder's source


def _family() -> dict[str, ModelConfig]:
    found: dict[str, ModelConfig] = {}
    for name, config in PRESETS.items():
        small = _smaller(config) if name == "vaswani-base" else config
        if small not in found.values():
            found[name] = small
    return found


def _smaller(config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        inputs=TokenInputs(vocab_size=96, scale=48**0.5),
        width=48,
        n_layers=2,
        context=128,
        mixer=AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=8),
        mlp=MlpConfig(hidden=64, activation="relu", gated=False),
        encoder=None if config.encoder is None else _smaller(config.encoder),
    )


FAMILY = _family()


def sequences(config: ModelConfig) -> bool:
    """Whether what its blocks read has a length; an image has none."""
    return not isinstance(config.inputs, PatchInputs)


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    """Weights drawn in float32, so that both dtypes have the same."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        drawn = Transformer(config)
        for parameter in drawn.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
        with default_dtype(dtype):  # tables are rounded to it once
            model = Transformer(config).eval()
        model.load_state_dict(drawn.state_dict())
    return model.requires_grad_(requires_grad=False)


def family_model(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return random_model(FAMILY[name], dtype)


def random_inputs(
    config: ModelConfig, batch: int, length: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    inputs = config.inputs
    if isinstance(inputs, TokenInputs):
        return torch.randint(0, inputs.vocab_size, (batch, length), generator=draw)
    if isinstance(inputs, PatchInputs):
        shape: tuple[int, ...] = (batch, inputs.channels, inputs.height, inputs.width)
    else:
        shape = (batch, length, inputs.features)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)


def random_source(config: ModelConfig, batch: int = B, dtype: torch.dtype = torch.float64) -> Tensor | None:
    """What an encoder-decoder's encoder reads."""
    return None if config.encoder is None else random_inputs(config.encoder, batch, S, seed=99, dtype=dtype)


def export_family(
    name: str, folder: Path, attentions: tuple[int, ...] | Literal["all"] = ()
) -> dict[Target, Path]:
    """Both targets from one trace: nearly all the time of an export is spent on that."""
    model, traced = family_model(name, torch.float32), {}

    def trace_once(*arguments: object) -> object:
        if not traced:
            traced["it"] = trace_pieces(*arguments)
        return traced["it"]

    trace_pieces = whole.trace_pieces
    checkpoint = model_checkpoint(model, "preset", (), preset_generation(model.config), None)
    with mock.patch.object(whole, "trace_pieces", trace_once):
        for target in TARGETS:
            source = checkpoint_source(checkpoint, ir.DataType.FLOAT, None, attentions)
            export_model(source, folder / target, ExportOptions(target=target, verify=False))
    return {target: folder / target for target in TARGETS}
