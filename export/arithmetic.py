"""In which numbers the graphs of a bundle compute, beside its precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activations = Literal["float", "int8"]
CacheNumbers = Literal["float", "int8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    activations: Activations = "float"  # int8: inputs of quantised matrices are rounded too, block by block
    kv: CacheNumbers = (
        "float"  # int8: so are keys and values in the cache, each channel by a scale of its own
    )


EXACT = Arithmetic()
