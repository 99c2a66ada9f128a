"""What a model's graphs take and give, beside the state: the same data for every kind of model.

| graph   | takes                                                                | gives                                     |
|---------|----------------------------------------------------------------------|-------------------------------------------|
| encode  | the input, attention_mask (not for images)                           | the main output; an encoder-decoder: last_hidden_state and the fixed state |
| prefill | the input (or the answer so far), masks, position_ids, state         | the main output, state                    |
| decode  | the same with one element                                            | the same                                  |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..tfm_model.config import HeadKind, LstmConfig, ModelConfig, ModelKind, PatchInputs, TokenInputs

ElementKind = Literal["tokens", "vectors", "images"]
_INPUT_NAMES = {"tokens": "input_ids", "vectors": "input_features", "images": "pixel_values"}
OUTPUT_NAMES = {
    "tokens": "logits", "classes": "logits", "values": "values", "embedding": "embedding", "hidden": "last_hidden_state"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """What a sequence consists of, on its way in."""

    kind: ElementKind
    length: int  # the longest; an image has always as many
    vocab_size: int | None = None
    features: int | None = None
    image: tuple[int, int, int] | None = None  # channels, height, width
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @property
    def name(self) -> str:
        return _INPUT_NAMES[self.kind]

    def shape(self, length: int | str) -> tuple[int | str, ...]:
        if self.kind == "images":
            assert self.image is not None
            return ("batch_size", *self.image)
        return ("batch_size", length) if self.features is None else ("batch_size", length, self.features)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The main output."""

    kind: HeadKind
    size: int
    pooled: bool = False  # one for each sequence, (B, size), not one for each element
    only_last: bool = False  # (B, 1, size), of the last real element
    labels: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return OUTPUT_NAMES[self.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    kind: ModelKind
    inputs: Elements  # what the user gives: to encode if there is one, else to prefill
    steps: Elements  # what prefill and decode take; the same but for an encoder-decoder
    outputs: Answer
    encoded_width: int | None = None  # of an encoder-decoder's last_hidden_state
    maps: tuple[tuple[int, int], ...] = ()  # layer and heads of each attention map
    encoder_maps: tuple[tuple[int, int], ...] = ()

    @property
    def vocab_size(self) -> int | None:
        """Tokens that it gives."""
        return self.outputs.size if self.outputs.kind == "tokens" else None

    @property
    def generates(self) -> bool:
        return self.kind != "encoder" and self.outputs.kind == "tokens"

    @property
    def map_names(self) -> tuple[str, ...]:
        """In the order in which a step's graph gives them."""
        own = [f"attentions.{layer}" for layer, _ in self.maps]
        cross = (
            [f"cross_attentions.{layer}" for layer, _ in self.maps] if self.kind == "encoder-decoder" else []
        )
        return tuple(own + cross)

    @property
    def encoder_map_names(self) -> tuple[str, ...]:
        """In the order in which encode gives them."""
        if self.kind == "encoder":
            return self.map_names
        return tuple(f"encoder_attentions.{layer}" for layer, _ in self.encoder_maps)


def token_signature(vocab_size: int, context: int) -> Signature:
    """Of a causal language model."""
    tokens = Elements(kind="tokens", length=context, vocab_size=vocab_size)
    return Signature(
        kind="decoder", inputs=tokens, steps=tokens, outputs=Answer(kind="tokens", size=vocab_size)
    )


def model_signature(config: ModelConfig) -> Signature:
    own, head = _elements(config), config.head
    return Signature(
        kind=config.kind,
        inputs=own if config.encoder is None else _elements(config.encoder),
        steps=own,
        outputs=Answer(
            kind=head.kind,
            size=config.output_size,
            pooled=config.kind == "encoder" and head.pooling != "none",
            only_last=config.kind == "decoder" and head.pooling == "last",
            labels=head.labels,
        ),
        encoded_width=None if config.encoder is None else config.encoder.width,
        maps=_maps(config),
        encoder_maps=() if config.encoder is None else _maps(config.encoder),
    )


def _elements(config: ModelConfig) -> Elements:
    inputs = config.inputs
    if isinstance(inputs, TokenInputs):
        return Elements(kind="tokens", length=config.context, vocab_size=inputs.vocab_size)
    if isinstance(inputs, PatchInputs):
        image = (inputs.channels, inputs.height, inputs.width)
        mean, std = inputs.mean or (0.0,) * inputs.channels, inputs.std or (1.0,) * inputs.channels
        return Elements(kind="images", length=config.context, image=image, mean=mean, std=std)
    return Elements(kind="vectors", length=config.context, features=inputs.features)


def _maps(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    heads = config.width if isinstance(config.mixer, LstmConfig) else config.mixer.n_heads
    return tuple((layer, heads) for layer in sorted(set(config.attention_outputs)))
