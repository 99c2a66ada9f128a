"""What decoding carries from step to step, as data.

Export, manifest and runtime read this and nothing else of an architecture: each tensor has the name under
which a graph takes it (`past`) and gives it back (`present`), a shape whose named dimensions are bound at
run time, and how it changes from one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Growth = Literal[
    "append",  # present = past with the new tokens behind it along `past_sequence_length`
    "capacity",  # a buffer of fixed length that the graph writes in place: past and present are one tensor
    "constant",  # a recurrent state: the same shape for ever
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    past: str
    present: str
    shape: tuple[int | str, ...]  # e.g. ("batch_size", 3, "past_sequence_length", 64)
    growth: Growth = "append"


StateSpec = tuple[StateTensor, ...]


def key_value_spec(n_layers: int, n_kv_heads: int, head_dim: int) -> StateSpec:
    """One key and one value tensor a layer, under the names that downstream runtimes expect."""
    return tuple(
        StateTensor(
            past=f"past_key_values.{layer}.{part}",
            present=f"present.{layer}.{part}",
            shape=("batch_size", n_kv_heads, "past_sequence_length", head_dim),
        )
        for layer in range(n_layers)
        for part in ("key", "value")
    )
