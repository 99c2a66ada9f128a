"""Settings with names: `tfmx export preset:NAME -o OUT` makes one with random weights, to see what it is and how it runs.

All but `vaswani-base` are small. Each differs from a plain model in the one thing that it is named after.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .. import InputError
from .checks import did_you_mean
from .config import (
    AttentionConfig,
    HeadConfig,
    LstmConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    PatchInputs,
    PositionConfig,
    RandomFeatureConfig,
    RelativeConfig,
    RotaryConfig,
    TokenInputs,
    VectorInputs,
)

if TYPE_CHECKING:  # the settings are known without PyTorch; what makes models of them imports it
    from .checkpoint import Checkpoint, GenerationDefaults
    from .transformer import Transformer

PRESET = "preset:"
_LAYER_NORM = NormConfig(kind="layer", bias=True)
_HEADS = AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=8)  # head_dim is free: 4 * 8 is not the width
_RELU = MlpConfig(hidden=64, activation="relu", gated=False)
_LEARNED = PositionConfig(kind="learned")

_DECODER = ModelConfig(
    inputs=TokenInputs(vocab_size=96),
    width=48,
    n_layers=2,
    context=128,
    mixer=_HEADS,
    norm=_LAYER_NORM,
    mlp=_RELU,
    positions=_LEARNED,
)
_ENCODER = replace(_DECODER, causal=False, head=HeadConfig(kind="hidden"))
_SET = replace(
    _ENCODER,
    inputs=VectorInputs(features=6),
    positions=None,
    head=HeadConfig(kind="classes", size=5, pooling="mean"),
)
_PATCHES = PatchInputs(channels=3, height=16, width=24, patch=8, bias=True, class_token=True)
_IMAGE = replace(
    _ENCODER,
    inputs=_PATCHES,
    context=7,
    head=HeadConfig(kind="classes", size=10, pooling="class_token"),
)
_SEQ2SEQ = replace(_DECODER, encoder=replace(_ENCODER, width=40, n_layers=3))
_LSTM = ModelConfig(
    inputs=TokenInputs(vocab_size=96),
    width=48,
    n_layers=2,
    context=128,
    mixer=LstmConfig(bias=True),
    last_norm=False,
)
_SERIES = replace(_LSTM, inputs=VectorInputs(features=3), head=HeadConfig(kind="values", size=2, bias=True))
_PRINTED = LstmConfig(candidate="sigmoid", output="sigmoid")  # sigmoids and no biases, as printed


def _attention(**settings: object) -> ModelConfig:
    return replace(_DECODER, mixer=replace(_HEADS, **settings))  # type: ignore[arg-type]


def _position(model: ModelConfig, **settings: object) -> ModelConfig:
    return replace(model, positions=PositionConfig(**settings))  # type: ignore[arg-type]


VASWANI_BASE = ModelConfig(
    inputs=TokenInputs(vocab_size=37_000, scale=512**0.5),
    width=512,
    n_layers=6,
    context=512,
    mixer=AttentionConfig(n_heads=8, n_kv_heads=8, head_dim=64),
    norm=_LAYER_NORM,
    norm_order="post",
    last_norm=False,
    mlp=MlpConfig(hidden=2048, activation="relu", gated=False),
    positions=PositionConfig(kind="sinusoidal"),
    head=HeadConfig(tied=True),
)

PRESETS: dict[str, ModelConfig] = {
    # blocks
    "vaswani-base": replace(
        VASWANI_BASE, encoder=replace(VASWANI_BASE, causal=False, head=HeadConfig(kind="hidden"))
    ),
    "post-norm": replace(_DECODER, norm_order="post", last_norm=False),
    "post-norm-bias": replace(
        _DECODER,
        norm_order="post",
        last_norm=False,
        mixer=replace(_HEADS, qkv_bias=True, out_bias=True),
        mlp=replace(_RELU, activation="sigmoid", bias=True),
    ),
    "pre-norm": _DECODER,
    "pre-norm-two-layer-mlp": replace(
        _DECODER, last_norm=False, mlp=replace(_RELU, activation="tanh", hidden_layers=2)
    ),
    "sum-over-heads": _attention(combination="sum", out_bias=True),
    "full-rank-values": _attention(combination="sum", full_rank_values=True),
    # scores
    "scaled": _attention(scale=0.2),
    "unscaled": _attention(scale=1.0),
    "raw-similarity": _attention(n_heads=1, n_kv_heads=1, head_dim=48, similarity="raw"),
    "symmetric": _attention(similarity="symmetric"),
    "asymmetric": _attention(similarity="asymmetric", qkv_bias=True),
    "set": _SET,
    "causal-classifier": replace(_ENCODER, causal=True, head=HeadConfig(kind="classes", size=4, pooling="mean")),
    "random-features": _attention(random_features=RandomFeatureConfig(features=64)),
    "random-features-unit": _attention(
        scale=1.0, random_features=RandomFeatureConfig(features=64, sigma=0.5, unit_norm=True)
    ),
    "random-features-encoder": replace(
        _ENCODER, mixer=replace(_HEADS, random_features=RandomFeatureConfig(features=32))
    ),
    # positions
    "no-positions": replace(_DECODER, positions=None),
    "one-hot": _position(replace(_DECODER, context=40, width=88), kind="one_hot"),
    "joint": _position(_DECODER, kind="joint", features=56),
    "separate": _position(_DECODER, kind="separate", features=56),
    "sinusoidal": _position(_DECODER, kind="sinusoidal", base=1000.0),
    "sinusoidal-features": _position(_DECODER, kind="sinusoidal", features=56),
    "learned": _DECODER,
    "relative": replace(_attention(relative=RelativeConfig(kind="shaw", max_distance=6)), positions=None),
    "relative-encoder": replace(
        _ENCODER, positions=None, mixer=replace(_HEADS, relative=RelativeConfig(kind="shaw", max_distance=6))
    ),
    "t5-bias": replace(
        _attention(scale=1.0, relative=RelativeConfig(kind="t5", max_distance=40, buckets=16)), positions=None
    ),
    "t5-bias-encoder": replace(
        _ENCODER,
        positions=None,
        mixer=replace(_HEADS, relative=RelativeConfig(kind="t5", max_distance=40, buckets=16)),
    ),
    "alibi": replace(_attention(n_heads=6, n_kv_heads=2, relative=RelativeConfig(kind="alibi")), positions=None),
    "rotary": replace(_attention(rotary=RotaryConfig(dim=8)), positions=None),
    # inputs
    "fixed-embeddings": replace(_DECODER, inputs=TokenInputs(vocab_size=96, learned=False)),
    "patches": replace(
        _IMAGE,
        inputs=PatchInputs(channels=1, height=12, width=12, patch=4, mean=(0.5,), std=(0.25,)),
        context=9,
        head=HeadConfig(kind="hidden"),
    ),
    "vectors": replace(_SET, head=HeadConfig(kind="classes", size=5)),
    # heads
    "language-model": replace(_DECODER, head=HeadConfig(tied=True, softcap=20.0)),
    "last-element": replace(_DECODER, head=HeadConfig(pooling="last", bias=True)),
    "mean-pooled": _SET,
    "max-pooled": replace(_SET, head=HeadConfig(kind="classes", size=5, pooling="max", bias=True)),
    "class-token": _IMAGE,
    "regression": replace(_SET, head=HeadConfig(kind="values", size=2, bias=True)),
    "embedding": replace(_ENCODER, head=HeadConfig(kind="embedding", pooling="mean", normalized=True)),
    "attention-maps": replace(_DECODER, mixer=replace(_HEADS, n_kv_heads=2), attention_outputs=(0, 1), norm_order="post"),
    # whole models
    "encoder": _ENCODER,
    "decoder": replace(
        _DECODER,
        norm=NormConfig(),
        mixer=replace(_HEADS, n_kv_heads=2, rotary=RotaryConfig(dim=8)),
        mlp=MlpConfig(hidden=64),
        positions=None,
    ),
    "encoder-decoder": _SEQ2SEQ,
    "captioner": replace(
        _DECODER, encoder=replace(_IMAGE, inputs=replace(_PATCHES, class_token=False), context=6, head=HeadConfig(kind="hidden"))
    ),
    "vision-transformer": replace(_IMAGE, head=HeadConfig(kind="classes", size=10, pooling="mean", bias=True)),
    "lstm": _LSTM,
    "lstm-printed": replace(_LSTM, mixer=_PRINTED),
    "lstm-regressor": _SERIES,
    "lstm-classifier": replace(_SERIES, head=HeadConfig(kind="classes", size=3, pooling="max")),
    "ablated-lstm": replace(_LSTM, mixer=replace(_PRINTED, ablated=True), attention_outputs=(0, 1)),
    "ablated-lstm-regressor": replace(_SERIES, mixer=LstmConfig(ablated=True, bias=True)),
}  # fmt: skip


def preset_config(source: str) -> ModelConfig:
    """The settings that `preset:NAME` names."""
    name = source.removeprefix(PRESET)
    if name not in PRESETS:
        raise InputError(
            f"there is no preset {name!r}{did_you_mean(name, PRESETS)}; there are {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def preset_checkpoint(source: str) -> Checkpoint:
    """`preset:NAME` as a checkpoint; the same weights every time."""
    from .tfmx_folder import model_checkpoint

    generation = preset_generation(preset_config(source))
    return model_checkpoint(preset_model(source.removeprefix(PRESET)), "preset", (), generation, None)


def preset_model(name: str) -> Transformer:
    import torch

    from .transformer import Transformer

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer(PRESETS[name]).eval()


def preset_generation(config: ModelConfig) -> GenerationDefaults:
    from .checkpoint import GenerationDefaults

    return GenerationDefaults(decoder_start_token_id=0 if config.kind == "encoder-decoder" else None)
