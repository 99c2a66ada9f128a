"""What a model is, as data: one definition whose settings are every transformer and LSTM of the family.

Frozen configs that cannot be invalid: derived values are properties, variants are made with
`dataclasses.replace`, and every impossible value is refused where it is written, with the field's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .attention_config import (
    AttentionConfig,
    NormConfig,
    RandomFeatureConfig,
    RelativeConfig,
    RotaryConfig,
    RotaryScaling,
)
from .checks import ConfigError, check_choice, check_count, check_positive

__all__ = [
    "Activation", "AttentionConfig", "CellActivation", "ConfigError", "HeadConfig", "Inputs", "LstmConfig",
    "MlpConfig", "ModelConfig", "ModelKind", "NormConfig", "PatchInputs", "PositionConfig",
    "RandomFeatureConfig", "RelativeConfig", "RotaryConfig", "RotaryScaling", "TokenInputs", "VectorInputs",
]  # fmt: skip

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh"]
CellActivation = Literal["tanh", "sigmoid"]
PositionKind = Literal[
    "one_hot",  # x' = (x, e_i)
    "joint",  # W_z^T relu(W_x^T x + W_e^T e_i)
    "separate",  # W_zx^T relu(W_x^T x) + W_ze^T relu(W_e^T e_i)
    "sinusoidal",  # x + p_i, or with features W_zx^T relu(W_x^T x) + p_i
    "learned",  # x + w_i
]
HeadKind = Literal["tokens", "classes", "values", "embedding", "hidden"]
Pooling = Literal[
    "none",  # one output for each element
    "last",  # only the last element's
    "mean",
    "max",
    "class_token",
]
NormOrder = Literal["pre", "post"]
ModelKind = Literal["decoder", "encoder", "encoder-decoder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInputs:
    vocab_size: int
    learned: bool = True  # False: drawn once, and left alone by training
    scale: float | None = None  # embeddings are multiplied by it

    def __post_init__(self) -> None:
        check_count("vocab_size", self.vocab_size)
        if self.scale is not None:
            check_positive("inputs.scale", self.scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorInputs:
    features: int
    projected: bool = True  # False: the vectors are the model's width already
    bias: bool = False

    def __post_init__(self) -> None:
        check_count("inputs.features", self.features)
        if self.bias and not self.projected:
            raise ConfigError("inputs.bias is set, but the vectors are not projected")


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchInputs:
    """An image, cut into square patches, each flattened and projected."""

    channels: int
    height: int
    width: int
    patch: int
    bias: bool = False
    class_token: bool = False  # a learned element before the patches
    mean: tuple[float, ...] | None = None  # of each channel: pixels / 255 become (x - mean) / std
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("channels", "height", "width", "patch"):
            check_count(f"inputs.{name}", getattr(self, name), 2**20)
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and len(values) != self.channels:
                raise ConfigError(f"inputs.{name} has {len(values)} numbers, wanted one for each channel")
        for value in self.std or ():
            check_positive("inputs.std", value)
        if self.height % self.patch or self.width % self.patch:
            raise ConfigError(
                f"an image of {self.height} x {self.width} does not divide into patches of {self.patch} x {self.patch}; change one"
            )

    @property
    def length(self) -> int:
        patches = (self.height // self.patch) * (self.width // self.patch)
        return patches + (1 if self.class_token else 0)

    @property
    def patch_size(self) -> int:
        return self.channels * self.patch**2


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionConfig:
    """Positions that are part of the input; relative and rotary ones are attention's."""

    kind: PositionKind
    features: int | None = None  # joint, separate: their number; sinusoidal: None adds p_i to x itself
    base: float = 10000.0  # sinusoidal

    def __post_init__(self) -> None:
        check_choice("positions.kind", self.kind, PositionKind)
        check_positive("positions.base", self.base)
        if self.features is not None:
            check_count("positions.features", self.features)
        if self.features is None and self.kind in {"joint", "separate"}:
            raise ConfigError(f"positions.features is missing; {self.kind!r} positions need it")
        if self.features is not None and self.kind in {"one_hot", "learned"}:
            raise ConfigError(f"positions.features is set, but {self.kind!r} positions have none")


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig:
    hidden: int
    activation: Activation = "silu"
    gated: bool = True  # act(gate) * up: SwiGLU with silu, GeGLU with gelu
    bias: bool = False
    hidden_layers: int = 1  # or 2

    def __post_init__(self) -> None:
        check_count("mlp.hidden", self.hidden)
        check_choice("mlp.activation", self.activation, Activation)
        check_count("mlp.hidden_layers", self.hidden_layers, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class LstmConfig:
    """A recurrent layer; all of them have the model's width."""

    ablated: bool = False  # gates see the input only, and h = act(c): Levy et al. 2018
    bias: bool = False
    candidate: CellActivation = "tanh"  # of the new content
    output: CellActivation = "tanh"  # of the cell, on the way out

    def __post_init__(self) -> None:
        check_choice("lstm.candidate", self.candidate, CellActivation)
        check_choice("lstm.output", self.output, CellActivation)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    kind: HeadKind = "tokens"
    size: int | None = None  # of classes and values; tokens are as many as the inputs'
    pooling: Pooling = "none"
    tied: bool = False  # tokens: the head is the embedding, transposed
    bias: bool = False
    softcap: float | None = None
    normalized: bool = False  # embedding: of length 1
    labels: tuple[str, ...] | None = None  # classes: what they are called

    def __post_init__(self) -> None:
        check_choice("head.kind", self.kind, HeadKind)
        check_choice("head.pooling", self.pooling, Pooling)
        sized = self.kind in {"classes", "values"}
        if sized and self.size is None:
            raise ConfigError(f"head.size is missing: how many {self.kind}?")
        if self.size is not None:
            check_count("head.size", self.size)
            if not sized:
                raise ConfigError(
                    f"head.size is set, but a head of kind {self.kind!r} has no size of its own"
                )
        if self.softcap is not None:
            check_positive("head.softcap", self.softcap)
        if self.labels is not None and (self.kind != "classes" or len(self.labels) != self.size):
            raise ConfigError(f"head.labels has {len(self.labels)} names, wanted one for each class")
        for name, fitting in (
            ("tied", self.kind == "tokens"),
            ("bias", sized or self.kind == "tokens"),
            ("softcap", sized or self.kind == "tokens"),
            ("normalized", self.kind == "embedding"),
        ):
            if getattr(self, name) and not fitting:
                raise ConfigError(f"head.{name} is set, but a head of kind {self.kind!r} has none")


Inputs = TokenInputs | VectorInputs | PatchInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Inputs, positions, blocks, head; with an `encoder`, the blocks also attend to what it gives."""

    inputs: Inputs
    width: int
    n_layers: int
    context: int  # the longest sequence; of a decoder prompt and answer together
    mixer: AttentionConfig | LstmConfig
    norm: NormConfig | None = None
    norm_order: NormOrder = "pre"  # pre: x + f(norm(x)); post: norm(x + f(x))
    last_norm: bool = True  # one more before the head
    mlp: MlpConfig | None = None
    causal: bool = True  # an element sees only those before it
    positions: PositionConfig | None = None
    windows: tuple[int | None, ...] = ()  # per layer: how many positions back it sees; () is all
    head: HeadConfig = HeadConfig()
    encoder: ModelConfig | None = None
    attention_outputs: tuple[int, ...] = ()  # layers whose attention weights are outputs too

    def __post_init__(self) -> None:
        check_count("width", self.width, 2**20)
        check_count("n_layers", self.n_layers, 10_000)
        check_count("context", self.context)
        check_choice("norm_order", self.norm_order, NormOrder)
        if self.windows and len(self.windows) != self.n_layers:
            raise ConfigError(
                f"windows has {len(self.windows)} entries, wanted one for each of {self.n_layers} layers"
            )
        for window in self.windows:
            if window is not None:
                check_count("window", window)
        if isinstance(self.mixer, LstmConfig):
            self._check_lstm()
        else:
            self._check_attention(self.mixer)
        self._check_inputs()
        self._check_head()
        self._check_attention_outputs()
        if self.encoder is not None:
            self._check_encoder(self.encoder)

    @property
    def kind(self) -> ModelKind:
        """Which graphs there are: a decoder goes on from a state, an encoder takes all at once."""
        if self.encoder is not None:
            return "encoder-decoder"
        return "decoder" if self.causal and self.head.pooling in {"none", "last"} else "encoder"

    @property
    def attention(self) -> AttentionConfig:
        assert isinstance(self.mixer, AttentionConfig), "an LSTM has no attention"
        return self.mixer

    @property
    def vocab_size(self) -> int:
        assert isinstance(self.inputs, TokenInputs), "the inputs are no tokens"
        return self.inputs.vocab_size

    @property
    def embedding_width(self) -> int:
        one_hot = self.positions is not None and self.positions.kind == "one_hot"
        return self.width - self.context if one_hot else self.width

    @property
    def output_size(self) -> int:
        if self.head.kind == "tokens":
            return self.vocab_size
        return self.width if self.head.size is None else self.head.size

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def _check_lstm(self) -> None:
        for name, value in (("norm", self.norm), ("mlp", self.mlp), ("encoder", self.encoder)):
            if value is not None:
                raise ConfigError(f"{name} is set, but LSTM layers have none")
        if self.last_norm or not self.causal or self.windows:
            raise ConfigError(
                "an LSTM is causal, without norms and windows: wanted last_norm=False, causal=True"
            )

    def _check_attention(self, attention: AttentionConfig) -> None:
        if self.norm is None:
            raise ConfigError("norm is missing: blocks with attention need one")
        if attention.similarity == "raw" and attention.head_dim != self.width:
            raise ConfigError(
                f"attention.similarity is 'raw', so head_dim ({attention.head_dim}) must be the width ({self.width})"
            )
        if any(self.windows) and (attention.random_features or not self.causal):
            raise ConfigError("windows are for causal attention with a softmax")

    def _check_inputs(self) -> None:
        if self.positions is not None:
            if self.positions.kind == "one_hot" and self.embedding_width < 1:
                raise ConfigError(
                    f"width ({self.width}) has no room beside one-hot positions, which take one dimension "
                    f"for each of {self.context} places"
                )
            if self.positions.kind == "sinusoidal" and self.width % 2:
                raise ConfigError(f"width is {self.width}, wanted an even number for sines and cosines")
        inputs, wanted = self.inputs, self.embedding_width
        if isinstance(inputs, VectorInputs) and not inputs.projected and inputs.features != wanted:
            raise ConfigError(
                f"inputs.features ({inputs.features}) must be {wanted}, as they are not projected"
            )
        if isinstance(self.inputs, PatchInputs):
            if self.causal:
                raise ConfigError("images are read all at once: wanted causal=False")
            for name in ("relative", "rotary"):
                if getattr(self.mixer, name) is not None:
                    raise ConfigError(f"attention.{name} is set, but an image's patches stand in no line")
            if self.inputs.length != self.context:
                raise ConfigError(
                    f"context is {self.context}, but the image becomes {self.inputs.length} elements; wanted the same"
                )

    def _check_head(self) -> None:
        head = self.head
        has_class_token = isinstance(self.inputs, PatchInputs) and self.inputs.class_token
        if head.kind == "tokens" and not isinstance(self.inputs, TokenInputs):
            raise ConfigError("head.kind is 'tokens', but the inputs are none")
        if head.kind == "tokens" and head.pooling != "none" and self.kind == "encoder":
            raise ConfigError(f"head.pooling is {head.pooling!r}, but tokens are never pooled: wanted none")
        if head.tied and self.embedding_width != self.width:
            raise ConfigError(
                "head.tied needs embeddings as wide as the model; one-hot positions take a part"
            )
        if head.pooling == "class_token" and not has_class_token:
            raise ConfigError("head.pooling is 'class_token', but the inputs have none")
        if head.kind == "embedding" and head.pooling == "none":
            raise ConfigError("head.kind is 'embedding', which is pooled; wanted a pooling")

    def _check_attention_outputs(self) -> None:
        if not self.attention_outputs:
            return
        for layer in self.attention_outputs:
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.n_layers:
                raise ConfigError(f"attention_outputs names layer {layer!r}, wanted 0 to {self.n_layers - 1}")
        if isinstance(self.mixer, LstmConfig) and not self.mixer.ablated:
            raise ConfigError("attention_outputs is set, but an LSTM has no weights over its inputs to show")
        if isinstance(self.mixer, AttentionConfig) and self.mixer.random_features:
            raise ConfigError("attention_outputs is set, but random features never make the weights")

    def _check_encoder(self, encoder: ModelConfig) -> None:
        if encoder.kind != "encoder" or encoder.head != HeadConfig(kind="hidden"):
            raise ConfigError("encoder must be an encoder: causal=False and HeadConfig(kind='hidden')")
        if not self.causal or self.head.kind != "tokens" or self.head.pooling != "none":
            raise ConfigError(
                "an encoder-decoder gives tokens: wanted causal=True and a head of kind 'tokens'"
            )
        attention = self.attention
        if attention.similarity != "asymmetric" or attention.full_rank_values or attention.qk_norm:
            raise ConfigError("an encoder-decoder's attention has queries, keys and values of its own")
