"""In which numbers the graphs of a bundle compute, beside its precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .. import InputError

Activations = Literal["float", "int8"]
CacheNumbers = Literal["float", "int8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    activations: Activations = "float"  # int8: inputs of quantised matrices are rounded too, block by block
    kv: CacheNumbers = (
        "float"  # int8: so are keys and values in the cache, each channel by a scale of its own
    )


EXACT = Arithmetic()


def kv_error(target: str) -> InputError:
    """A cache of int8 that cannot be."""
    why = (
        "only ONNX Runtime's fused attention has one" if target == "portable" else "it has no fused attention"
    )
    return InputError(
        f"--kv int8 is not for this export: {why}; it works for decoders of tokens with --target ort and without "
        "--attentions (otherwise leave --kv out)"
    )
