"""What a transformer is, as data: frozen configs that cannot be invalid.

Derived values are properties, variants are made with `dataclasses.replace`, and every impossible value
is refused where it is written, with the field's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .. import InputError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
NormKind = Literal["rms", "layer"]
RotaryScalingKind = Literal["linear", "dynamic", "llama3", "yarn"]


class ConfigError(InputError):
    """A model's configuration cannot be right."""


def _count(name: str, value: int, most: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} is {value!r}, wanted a whole number from 1 to {most}")


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise ConfigError(f"{name} is {value!r}, wanted a finite number above 0")


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, wanted one of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    kind: NormKind = "rms"
    eps: float = 1e-5
    bias: bool = False  # LayerNorm's shift; RMSNorm has none

    def __post_init__(self) -> None:
        _choice("norm.kind", self.kind, ("rms", "layer"))
        _positive("norm.eps", self.eps)
        if self.kind == "rms" and self.bias:
            raise ConfigError("norm.bias is set, but RMSNorm has no bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryScaling:
    """How rotary frequencies are changed to reach past the context that the model was first trained with."""

    kind: RotaryScalingKind
    factor: float  # how many times longer the context became
    original_context: int  # the context before that
    low_freq_factor: float = 1.0  # llama3: wavelengths above original/low are divided by `factor`
    high_freq_factor: float = 4.0  # llama3: wavelengths below original/high are left alone
    beta_fast: float = 32.0  # yarn: rotations over the original context above which nothing changes
    beta_slow: float = 1.0  # yarn: rotations below which frequencies are divided by `factor`
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: round the borders of the ramp to whole dimensions

    def __post_init__(self) -> None:
        _choice("rotary.scaling.kind", self.kind, ("linear", "dynamic", "llama3", "yarn"))
        _positive("rotary.scaling.factor", self.factor)
        _count("rotary.scaling.original_context", self.original_context)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            _positive(f"rotary.scaling.{name}", getattr(self, name))
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rotary.scaling.low_freq_factor ({self.low_freq_factor}) must be below "
                f"high_freq_factor ({self.high_freq_factor})"
            )
        if self.kind == "dynamic" and self.factor < 1:
            raise ConfigError(
                f"rotary.scaling.factor is {self.factor}, wanted at least 1 for dynamic scaling"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryConfig:
    dim: int  # how many of a head's dimensions turn; fewer than head_dim is partial rotary
    theta: float = 10000.0
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        _count("rotary.dim", self.dim)
        if self.dim % 2:
            raise ConfigError(f"rotary.dim is {self.dim}, wanted an even number: dimensions turn in pairs")
        _positive("rotary.theta", self.theta)
        if self.theta <= 1:
            raise ConfigError(f"rotary.theta is {self.theta!r}, wanted a number above 1")
        if self.scaling is not None and self.scaling.kind == "dynamic" and self.dim < 4:
            raise ConfigError(f"rotary.dim is {self.dim}, wanted at least 4 for dynamic scaling")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    n_heads: int
    n_kv_heads: int  # fewer than n_heads is grouped-query attention
    head_dim: int  # free: n_heads * head_dim need not be the model's width
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormConfig | None = None  # over each head's queries and keys, before rotary
    rotary: RotaryConfig | None = None
    scale: float | None = None  # None is 1 / sqrt(head_dim)
    softcap: float | None = None  # scores become c * tanh(scores / c)

    def __post_init__(self) -> None:
        _count("attention.n_heads", self.n_heads, 65536)
        _count("attention.n_kv_heads", self.n_kv_heads, 65536)
        _count("attention.head_dim", self.head_dim, 65536)
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"attention.n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})"
            )
        if self.rotary is not None and self.rotary.dim > self.head_dim:
            raise ConfigError(f"rotary.dim ({self.rotary.dim}) must not be above head_dim ({self.head_dim})")
        for name in ("scale", "softcap"):
            if getattr(self, name) is not None:
                _positive(f"attention.{name}", getattr(self, name))

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig:
    hidden: int
    activation: Activation = "silu"
    gated: bool = True  # act(gate) * up: SwiGLU with silu, GeGLU with gelu
    bias: bool = False

    def __post_init__(self) -> None:
        _count("mlp.hidden", self.hidden)
        _choice("mlp.activation", self.activation, ("silu", "gelu", "gelu_tanh", "relu"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: pre-norm blocks between an embedding and a head."""

    vocab_size: int
    width: int
    n_layers: int
    context: int  # the longest sequence, prompt and answer together
    norm: NormConfig
    attention: AttentionConfig
    mlp: MlpConfig
    windows: tuple[
        int | None, ...
    ] = ()  # per layer: how many positions back it sees, itself included; () = all
    tied_head: bool = False  # the head is the embedding, transposed
    head_bias: bool = False
    logit_softcap: float | None = None
    embedding_scale: float | None = None

    def __post_init__(self) -> None:
        _count("vocab_size", self.vocab_size)
        _count("width", self.width, 2**20)
        _count("n_layers", self.n_layers, 10_000)
        _count("context", self.context)
        if self.windows and len(self.windows) != self.n_layers:
            raise ConfigError(
                f"windows has {len(self.windows)} entries, wanted one for each of {self.n_layers} layers"
            )
        for window in self.windows:
            if window is not None:
                _count("window", window)
        for name in ("logit_softcap", "embedding_scale"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None
