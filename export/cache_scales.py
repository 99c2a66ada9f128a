"""The scales of a cache of int8: each channel of keys and values reaches as far as a text has shown, and a bit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .lower_ort import CACHE_SCALES
from .rounded import INT8_TOP

MARGIN = 1.1  # beyond the largest that was seen; what lies farther still is cut off


def cache_scales(ranges: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """By name in the weights file, (1, H_kv, 1, D) each; `ranges` are (H_kv, D) of keys and values, layer by layer."""
    return {
        f"blocks.{layer}.{part}": (reach * (MARGIN / INT8_TOP)).clamp_min(1e-30)[None, :, None, :].float()
        for layer, reaches in enumerate(ranges)
        for part, reach in zip(CACHE_SCALES, reaches, strict=True)
    }
