"""The quantised matrices of a bundle, read back from its files: what the gate's PyTorch computes with.

So quantisation is no part of the parity that is measured, and a matrix that was packed wrongly is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from ..tfm_model.blocks import Blocks
from .layout import CODES, PARTS, SCALES, TABLE, BlockLayout, Target, unpacked
from .lower_ort import CACHE_SCALES
from .parity_error import ParityError

# How far weights may be from their source, root mean square, in steps of their blocks. Rounding to the nearest gives 0.29
# (1 / sqrt(12)); on SmolLM2 the most was 0.42 (GPTQ), and in a row 0.9. A zero point off by one gives 1.04.
MOST_OFF = 0.7
MOST_OFF_IN_ROW = 2.0


class StoredMatrices:
    """And the scales of a cache of int8, where there are any."""

    def __init__(
        self, folder: Path, graphs: Iterable[str], layouts: Mapping[str, BlockLayout], target: Target
    ) -> None:
        self.layouts, self._target = layouts, target
        self._tensors: dict[str, ir.TensorProtocol] = {}
        for graph in graphs:
            for name, value in ir.load(folder / f"{graph}.onnx").graph.initializers.items():
                assert value.const_value is not None
                self._tensors.setdefault(name, value.const_value)

    def __contains__(self, name: str) -> bool:
        return name in self.layouts

    def read(self, name: str) -> Tensor:
        """The matrix (out, in) in float32, as its codes say."""
        return self._blocks(name).dequantised()

    def _blocks(self, name: str) -> Blocks:
        parts = {
            part: torch.from_numpy(np.array(self._tensors[name + part].numpy()))
            for part in PARTS
            if name + part in self._tensors
        }
        if CODES not in parts:  # only gathered from
            rows, n_blocks = parts[SCALES].shape
            parts[CODES] = parts[TABLE].reshape(rows, n_blocks, -1)
        return unpacked(parts, self.layouts[name], self._target)

    def vector(self, name: str) -> Tensor:
        """A tensor that is stored as it is."""
        return torch.from_numpy(np.array(self._tensors[name].numpy()))

    def check(self, source: Callable[[str], Tensor | None]) -> None:
        """Each matrix is its source's, but for the rounding; parity alone would not see another one."""
        for name in self.layouts:
            w, blocks = source(name), self._blocks(name)
            own = blocks.dequantised()
            if w is None or w.shape != own.shape:
                raise ParityError(
                    f"{name} is a matrix of {list(own.shape)} here, and not in the source; give the source that the "
                    "bundle was exported from"
                )
            steps = blocks.scales.abs().clamp_min(1e-6 * float(w.square().mean().sqrt()) + 1e-30)[..., None]
            off = ((own - w).reshape(blocks.codes.shape) / steps).square().mean(dim=(1, 2))  # (out,)
            whole, row = float(off.mean().sqrt()), float(off.max().sqrt())
            if not (whole <= MOST_OFF and row <= MOST_OFF_IN_ROW):
                raise ParityError(
                    f"{name} is {whole:.2g} steps of its blocks away from its source ({MOST_OFF} allowed), a row "
                    f"{row:.2g} ({MOST_OFF_IN_ROW}): that is no rounding"
                )

    def cache_scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Of keys and of values, (1, H_kv, 1, D) each."""
        names = [f"blocks.{layer}.{part}" for part in CACHE_SCALES]
        if names[0] not in self._tensors:
            return None
        key, value = (torch.from_numpy(np.array(self._tensors[name].numpy())) for name in names)
        return key, value

    def all_cache_scales(self) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]] | None:
        """Layer by layer, keys then values; None where the cache is no int8."""
        found: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = []
        layer = 0
        while (scales := self.cache_scales(layer)) is not None:
            found += [scales[0].numpy(), scales[1].numpy()]
            layer += 1
        return found or None
