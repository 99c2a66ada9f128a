"""What a model's graphs take and give, beside the state: the same data for every kind of model.

| graph   | takes                                                                | gives                                     |
|---------|----------------------------------------------------------------------|-------------------------------------------|
| encode  | the input, attention_mask (if `has_mask`)                            | the main output; an encoder-decoder: last_hidden_state and the fixed state |
| prefill | the input (or the answer so far), masks, position_ids, state         | the main output, state                    |
| decode  | the same with one element                                            | the same                                  |
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tfm_model.config import LstmConfig, ModelConfig, ModelKind, PatchInputs, TokenInputs
from ..tfm_model.declarations import Answer, Elements


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    kind: ModelKind
    inputs: Elements  # what the user gives: to encode if there is one, else to prefill
    steps: Elements  # what prefill and decode take; the same but for an encoder-decoder
    outputs: Answer
    has_mask: bool = (
        True  # of the inputs' pads; not of images, nor of modules that cannot see pads and get none
    )
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
        has_mask=not isinstance((config.encoder or config).inputs, PatchInputs),
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
