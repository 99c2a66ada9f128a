"""Seeded random decoders of every shape that the config allows, as sources that export can take."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
import torch

from tfmx.export.source import CheckpointSource
from tfmx.tfm_model.checkpoint import Checkpoint, GenerationDefaults, LazyTensor
from tfmx.tfm_model.config import (
    AttentionConfig,
    HeadConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RotaryConfig,
    RotaryScaling,
    TokenInputs,
)
from tfmx.tfm_model.transformer import Transformer

PLAIN_ATTENTION = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=16, rotary=RotaryConfig(dim=16))
PLAIN = ModelConfig(
    inputs=TokenInputs(vocab_size=211),
    width=64,
    n_layers=3,
    context=64,
    norm=NormConfig(eps=1e-5),
    mixer=PLAIN_ATTENTION,
    mlp=MlpConfig(hidden=96),
    head=HeadConfig(tied=True),
)


def _scaled(**scaling: object) -> ModelConfig:
    rotary = RotaryConfig(dim=16, scaling=RotaryScaling(**scaling))
    return replace(PLAIN, mixer=replace(PLAIN_ATTENTION, rotary=rotary))


VARIANTS: dict[str, ModelConfig] = {
    "plain": PLAIN,
    "every head its own keys, untied": replace(
        PLAIN, head=HeadConfig(), mixer=replace(PLAIN_ATTENTION, n_kv_heads=4)
    ),
    "one key head": replace(PLAIN, mixer=replace(PLAIN_ATTENTION, n_kv_heads=1)),
    "biases and query/key norm": replace(
        PLAIN, mixer=replace(PLAIN_ATTENTION, qkv_bias=True, out_bias=True, qk_norm=NormConfig())
    ),
    "query/key layer norm": replace(
        PLAIN, mixer=replace(PLAIN_ATTENTION, qk_norm=NormConfig(kind="layer", eps=1e-6))
    ),
    "windows": replace(PLAIN, windows=(5, None, 7)),
    "partial rotary": replace(PLAIN, mixer=replace(PLAIN_ATTENTION, rotary=RotaryConfig(dim=8))),
    "partial rotary that fuses": replace(
        PLAIN, mixer=replace(PLAIN_ATTENTION, head_dim=32, rotary=RotaryConfig(dim=16))
    ),
    "no rotary, odd heads": replace(PLAIN, mixer=AttentionConfig(n_heads=3, n_kv_heads=1, head_dim=24)),
    "soft-caps and scales": replace(
        PLAIN,
        head=HeadConfig(tied=True, softcap=30.0),
        inputs=TokenInputs(vocab_size=211, scale=8.0),
        mixer=replace(PLAIN_ATTENTION, softcap=5.0, scale=0.3),
    ),
    "layer norm, plain gelu": replace(
        PLAIN,
        norm=NormConfig(kind="layer", bias=True),
        mlp=MlpConfig(hidden=96, activation="gelu", gated=False, bias=True),
    ),
    "layer norm without bias, geglu": replace(
        PLAIN,
        norm=NormConfig(kind="layer"),
        mlp=MlpConfig(hidden=96, activation="gelu_tanh", bias=True),
    ),
    "relu, head bias": replace(
        PLAIN, head=HeadConfig(bias=True), mlp=MlpConfig(hidden=96, activation="relu", gated=False)
    ),
    "linear scaling": _scaled(kind="linear", factor=2, original_context=32),
    "dynamic scaling": _scaled(kind="dynamic", factor=2, original_context=8),
    "llama3 scaling": _scaled(kind="llama3", factor=8, original_context=32),
    "yarn scaling": _scaled(kind="yarn", factor=4, original_context=16, attention_factor=1.13),
}


def random_decoder(config: ModelConfig, seed: int = 0) -> Transformer:
    """Norms and biases are random too, so that a dropped one is seen."""
    torch.manual_seed(seed)
    decoder = Transformer(config).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            scale = 0.1 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (1.0 if parameter.dim() == 1 else 0.0))
    return decoder


def random_source(config: ModelConfig, dtype: ir.DataType = ir.DataType.FLOAT) -> CheckpointSource:
    decoder = random_decoder(config)
    tensors = {
        name: LazyTensor(name, tuple(parameter.shape), parameter.detach)
        for name, parameter in decoder.named_parameters()
    }
    checkpoint = Checkpoint(
        kind="huggingface", files=(), config=config, tensors=tensors, generation=GenerationDefaults()
    )
    return CheckpointSource(checkpoint, dtype)
