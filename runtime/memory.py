"""What a run will need, from the manifest and the graphs alone, before anything is loaded; and giving memory back."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from dataclasses import dataclass

from .bundle import Bundle
from .manifest import ITEM_SIZES, WEIGHTS
from .mappings import DONTNEED, advise, mappings


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes, on the CPU. Activations (a few MB, more in long prefills) and onnxruntime itself (60 MB) come on top."""

    weights: int  # the weights file: mapped, so the system may drop what is not in use
    packed: int  # the copies that the sessions keep of matrices, laid out for their kernels
    cache_per_token: int  # of one sequence
    constant_state: int  # of one sequence
    fixed_state: int  # of one sequence: what the encoder leaves of the longest input
    cache_at_max_context: int

    @property
    def single_sequence(self) -> int:
        """Private memory of one sequence at the full context: packed weights and state."""
        return self.packed + self.cache_at_max_context + self.constant_state + self.fixed_state


def give_back_freed() -> None:
    """glibc keeps what was freed until it is told: after reading SmolLM2's tokenizer, 29 of 105 MB."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def give_back_read(bundle: Bundle) -> None:
    """Quantised weights that were read to be packed stay mapped: scales and embedding of SmolLM2 in int4, 17 MB.

    What is needed of them is mapped again, from the page cache. (A float embedding that is also the head lies by columns: all
    of it is needed again at once.) Of a page that was written to, the writing would be lost: onnxruntime does so where
    bytes must be swapped, and nowhere else.
    """
    if bundle.manifest.quant is None or sys.byteorder != "little":
        return
    file = os.path.realpath(bundle.path / WEIGHTS)
    with contextlib.suppress(AttributeError, OSError):  # another system
        for mapping in mappings():
            if mapping.path == file:
                advise(mapping.start, mapping.end, DONTNEED)


def estimate_memory(bundle: Bundle) -> MemoryEstimate:
    manifest = bundle.manifest
    weights = manifest.files.get(WEIGHTS)
    sizes = dict.fromkeys(("append", "capacity", "constant", "fixed"), 0)  # of one position
    for state in manifest.state:
        count = math.prod(dim for dim in state.shape if isinstance(dim, int))
        sizes[state.growth] += count * ITEM_SIZES[state.dtype]
    per_token = sizes["append"] + sizes["capacity"]
    return MemoryEstimate(
        weights=weights.size if weights else 0,
        packed=sum(bundle.summary(role).packable_bytes for role in manifest.used_graphs),
        cache_per_token=per_token,
        constant_state=sizes["constant"],
        fixed_state=sizes["fixed"] * manifest.inputs.length,
        cache_at_max_context=per_token * manifest.max_context,
    )
