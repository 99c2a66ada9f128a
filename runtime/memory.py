"""What a run will need, from the manifest and the graphs alone: for `tfmx inspect`, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .bundle import Bundle
from .manifest import ITEM_SIZES, WEIGHTS


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes, on the CPU. Activations (a few MB, more in long prefills) and onnxruntime itself (60 MB) come on top."""

    weights: int  # the weights file: mapped, so the system may drop what is not in use
    packed: int  # the copy that a session keeps of matrices, laid out for its kernels
    cache_per_token: int  # of one sequence
    constant_state: int  # of one sequence
    cache_at_max_context: int

    @property
    def single_sequence(self) -> int:
        """Private memory of one sequence at the full context: packed weights and cache."""
        return self.packed + self.cache_at_max_context + self.constant_state


def estimate_memory(bundle: Bundle) -> MemoryEstimate:
    manifest = bundle.manifest
    weights = manifest.files.get(WEIGHTS)
    per_token = constant = 0
    for state in manifest.state:
        size = math.prod(dim for dim in state.shape if isinstance(dim, int)) * ITEM_SIZES[state.dtype]
        if state.growth == "constant":
            constant += size
        else:
            per_token += size
    return MemoryEstimate(
        weights=weights.size if weights else 0,
        packed=bundle.summaries["prefill"].packable_bytes,
        cache_per_token=per_token,
        constant_state=constant,
        cache_at_max_context=per_token * manifest.max_context,
    )
