"""What a run will need, from the manifest and the graphs alone, before anything is loaded; and giving memory back."""

from __future__ import annotations

import contextlib
import ctypes
import math
from dataclasses import dataclass

from .bundle import Bundle
from .manifest import ITEM_SIZES, WEIGHTS


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
    """glibc keeps what was freed until it is told: after loading SmolLM2 in int4, 29 of 230 MB."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def estimate_memory(bundle: Bundle) -> MemoryEstimate:
    manifest = bundle.manifest
    weights = manifest.files.get(WEIGHTS)
    sizes = dict.fromkeys(("append", "capacity", "constant", "fixed"), 0)  # of one position
    for state in manifest.state:
        count = math.prod(dim for dim in state.shape if isinstance(dim, int))
        sizes[state.growth] += count * ITEM_SIZES[state.dtype]
    per_token = sizes["append"] + sizes["capacity"]
    # all but recurrent states are decoded with the prefill graph too: engine.Graphs
    opened = {"encode", "prefill"} | ({"decode"} if sizes["constant"] else set())
    used = [bundle.summary(role) for role in manifest.graphs if role in opened]
    return MemoryEstimate(
        weights=weights.size if weights else 0,
        packed=sum(summary.packable_bytes for summary in used),
        cache_per_token=per_token,
        constant_state=sizes["constant"],
        fixed_state=sizes["fixed"] * manifest.inputs.length,
        cache_at_max_context=per_token * manifest.max_context,
    )
