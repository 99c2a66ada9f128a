"""Layers whose attention weights the graphs also give: `--attentions`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .. import InputError
from ..tfm_model.config import ConfigError, ModelConfig


@dataclass(frozen=True, slots=True)
class Maps:
    """Layers whose attention weights are outputs: the model's own, and its encoder's."""

    own: tuple[int, ...]
    encoder: tuple[int, ...]


Layers = tuple[int, ...] | Literal["all"] | Maps


def with_attentions(config: ModelConfig, layers: Layers) -> ModelConfig:
    """The same with these layers' attention weights as outputs; of an encoder too, where it has such a layer."""
    if not layers:
        return config
    own, inner = range(config.n_layers), range(config.encoder.n_layers if config.encoder else 0)
    if layers == "all":
        layers = Maps(tuple(own), tuple(inner))
    elif not isinstance(layers, Maps):
        for layer in layers:
            if layer not in own and layer not in inner:
                raise InputError(f"--attentions names layer {layer}, wanted 0 to {max(*own, *inner, 0)}")
        layers = Maps(tuple(n for n in layers if n in own), tuple(n for n in layers if n in inner))
    try:
        config = replace(config, attention_outputs=layers.own)
        if config.encoder is not None:
            config = replace(config, encoder=replace(config.encoder, attention_outputs=layers.encoder))
    except ConfigError as error:
        raise InputError(f"--attentions is not for this model: {error}") from error
    return config
