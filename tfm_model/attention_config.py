"""Attention in all its settings, as data: frozen configs that cannot be invalid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .checks import ConfigError, check_choice, check_count, check_positive

NormKind = Literal["rms", "layer"]
RotaryScalingKind = Literal["linear", "dynamic", "llama3", "yarn"]
RelativeKind = Literal["shaw", "t5", "alibi"]
Similarity = Literal[
    "asymmetric",  # queries U_q x, keys U_k x: the usual
    "symmetric",  # both are U x
    "raw",  # both are x itself
]
Combination = Literal["concat", "sum"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    kind: NormKind = "rms"
    eps: float = 1e-5
    bias: bool = False  # LayerNorm's shift; RMSNorm has none

    def __post_init__(self) -> None:
        check_choice("norm.kind", self.kind, NormKind)
        check_positive("norm.eps", self.eps)
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
        check_choice("rotary.scaling.kind", self.kind, RotaryScalingKind)
        check_positive("rotary.scaling.factor", self.factor)
        check_count("rotary.scaling.original_context", self.original_context)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            check_positive(f"rotary.scaling.{name}", getattr(self, name))
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
        check_count("rotary.dim", self.dim)
        if self.dim % 2:
            raise ConfigError(f"rotary.dim is {self.dim}, wanted an even number: dimensions turn in pairs")
        check_positive("rotary.theta", self.theta)
        if self.theta <= 1:
            raise ConfigError(f"rotary.theta is {self.theta!r}, wanted a number above 1")
        if self.scaling is not None and self.scaling.kind == "dynamic" and self.dim < 4:
            raise ConfigError(f"rotary.dim is {self.dim}, wanted at least 4 for dynamic scaling")


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeConfig:
    """Positions that attention sees as distances between two elements."""

    kind: RelativeKind  # shaw: learned vectors; t5: learned biases of buckets; alibi: fixed slopes
    max_distance: int = 128  # shaw, t5: larger distances count as this one; alibi has no limit
    buckets: int = 32  # t5: half for short distances, one each, half for longer ones, by logarithm

    def __post_init__(self) -> None:
        check_choice("relative.kind", self.kind, RelativeKind)
        check_count("relative.max_distance", self.max_distance, 2**20)
        check_count("relative.buckets", self.buckets, 2**16)
        if self.kind == "t5" and (self.buckets < 4 or self.buckets % 4):
            raise ConfigError(f"relative.buckets is {self.buckets}, wanted a multiple of 4")
        if self.kind == "t5" and self.max_distance <= self.buckets // 2:
            raise ConfigError(
                f"relative.max_distance ({self.max_distance}) must be above half the buckets ({self.buckets // 2})"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomFeatureConfig:
    """Attention whose softmax is approximated by random features: see recurrent_ops.py for the derivation.

    Of a sequence over itself; attention to an encoder stays a softmax.
    """

    features: int  # D: there are D sines and D cosines; the error falls like 1/sqrt(D)
    sigma: float = 1.0  # of the normal distribution that the directions are drawn from
    seed: int = 0
    unit_norm: bool = False  # queries and keys are brought to length 1 first

    def __post_init__(self) -> None:
        check_count("random_features.features", self.features, 2**20)
        check_positive("random_features.sigma", self.sigma)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**62:
            raise ConfigError(f"random_features.seed is {self.seed!r}, wanted a whole number from 0 to 2^62")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    n_heads: int
    n_kv_heads: int  # fewer than n_heads is grouped-query attention
    head_dim: int  # free: n_heads * head_dim need not be the model's width
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormConfig | None = None  # over each head's queries and keys, before rotary
    rotary: RotaryConfig | None = None
    relative: RelativeConfig | None = None
    scale: float | None = None  # None is 1 / sqrt(head_dim)
    softcap: float | None = None  # scores become c * tanh(scores / c)
    similarity: Similarity = "asymmetric"
    full_rank_values: bool = False  # V_h of width x width, summed over heads, without a W_O
    combination: Combination = "concat"  # of heads: concat(H_1 ... H_h) W_O, or the same as a sum over heads
    random_features: RandomFeatureConfig | None = None

    def __post_init__(self) -> None:
        check_count("attention.n_heads", self.n_heads, 65536)
        check_count("attention.n_kv_heads", self.n_kv_heads, 65536)
        check_count("attention.head_dim", self.head_dim, 65536)
        check_choice("attention.similarity", self.similarity, Similarity)
        check_choice("attention.combination", self.combination, Combination)
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"attention.n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})"
            )
        if self.rotary is not None and self.rotary.dim > self.head_dim:
            raise ConfigError(f"rotary.dim ({self.rotary.dim}) must not be above head_dim ({self.head_dim})")
        for name in ("scale", "softcap"):
            if getattr(self, name) is not None:
                check_positive(f"attention.{name}", getattr(self, name))
        if self.qk_norm is not None and self.qk_norm.bias:
            raise ConfigError(
                "attention.qk_norm has a bias, but queries and keys are only scaled: wanted no bias"
            )
        self._check_grouping()
        if self.similarity == "raw" and (self.n_heads > 1 or self.qk_norm is not None):
            raise ConfigError(
                "attention.similarity is 'raw', which has one matrix of scores and nothing to normalise; "
                f"wanted n_heads 1 (found {self.n_heads}) and no qk_norm"
            )
        if self.full_rank_values and (self.combination != "sum" or self.out_bias):
            raise ConfigError(
                "attention.full_rank_values has no W_O: wanted combination 'sum' and no out_bias"
            )
        if self.random_features and (self.softcap or self.relative):
            raise ConfigError(
                "attention.random_features has no scores, so no softcap and no relative positions"
            )

    def _check_grouping(self) -> None:
        """What needs a key head for each query head."""
        grouped = self.n_kv_heads != self.n_heads
        for name, is_set in (
            ("similarity", self.similarity != "asymmetric"),
            ("full_rank_values", self.full_rank_values),
            ("random_features", self.random_features is not None),
        ):
            if grouped and is_set:
                raise ConfigError(
                    f"attention.{name} wants n_kv_heads ({self.n_kv_heads}) to be n_heads ({self.n_heads})"
                )

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def value_dim(self, width: int) -> int:
        return width if self.full_rank_values else self.head_dim
