"""What decoding carries from step to step, as data.

Export, manifest and runtime read this and nothing else of an architecture: each tensor has the name under
which a graph takes it (`past`) and gives it back (`present`), a shape whose named dimensions are bound at
run time, and how it changes from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .config import LstmConfig, ModelConfig

Growth = Literal[
    "append",  # present = past with the new tokens behind it along `past_sequence_length`
    "capacity",  # a buffer of fixed length that the graph writes in place: past and present are one tensor
    "constant",  # a recurrent state: the same shape for ever
    "fixed",  # given by the encoder once (`present` is its output), read by every step, never given back
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    past: str
    present: str
    shape: tuple[int | str, ...]  # e.g. ("batch_size", 3, "past_sequence_length", 64)
    growth: Growth = "append"
    wide: bool = False  # float32 also where the bundle is of half precision: sums over any length


StateSpec = tuple[StateTensor, ...]


def model_state(config: ModelConfig) -> StateSpec:
    """The state of a decoder, layer by layer, under the names that downstream runtimes expect."""
    if config.kind == "encoder":
        return ()
    return tuple(tensor for layer in range(config.n_layers) for tensor in _layer_state(config, layer))


def _layer_state(config: ModelConfig, layer: int) -> Iterator[StateTensor]:
    mixer = config.mixer
    if isinstance(mixer, LstmConfig):
        for part in ("cell",) if mixer.ablated else ("hidden", "cell"):
            yield _recurrent(layer, part, config.width)
        return
    H_kv, D, Dv = mixer.n_kv_heads, mixer.head_dim, mixer.value_dim(config.width)
    own = ".decoder" if config.encoder is not None else ""
    if mixer.random_features is not None:
        rows = 2 * mixer.random_features.features
        yield _recurrent(layer, "sums", mixer.n_heads, rows, Dv, wide=True)
        yield _recurrent(layer, "normalizer", mixer.n_heads, rows, wide=True)
        if not mixer.random_features.unit_norm:
            yield _recurrent(layer, "peak", mixer.n_heads, wide=True)
    else:
        for part, size in (("key", D), ("value", Dv)):
            yield StateTensor(
                past=f"past_key_values.{layer}{own}.{part}",
                present=f"present.{layer}{own}.{part}",
                shape=("batch_size", H_kv, "past_sequence_length", size),
            )
    if config.encoder is not None:
        for part in ("key", "value"):
            yield StateTensor(
                past=f"past_key_values.{layer}.encoder.{part}",
                present=f"present.{layer}.encoder.{part}",
                shape=("batch_size", H_kv, "encoder_sequence_length", D),
                growth="fixed",
            )


def _recurrent(layer: int, part: str, *shape: int, wide: bool = False) -> StateTensor:
    return StateTensor(
        past=f"past_recurrent.{layer}.{part}",
        present=f"present_recurrent.{layer}.{part}",
        shape=("batch_size", *shape),
        growth="constant",
        wide=wide,
    )
