"""Quantises the matrices of a source as the weights file asks for them, one at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tfm_model.blocks import Blocks
from .arithmetic import Arithmetic, CacheNumbers
from .layout import BlockLayout, Target, as_stored, packed, split_name
from .recipe import Matrix, Quant
from .rounding import round_nearest, round_search


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What an export was asked to compute with, beside its precision."""

    quant: Quant | None = None
    kv: CacheNumbers = "float"
    windows: Tensor | None = (
        None  # (n, T) token ids of a text, where ranges or roundings are to be calibrated
    )

    @property
    def arithmetic(self) -> Arithmetic:
        is_float = self.quant is None or self.quant.activations == "float"
        return Arithmetic(activations="float" if is_float else "int8", kv=self.kv)

    def layouts(self, matrices: Mapping[str, Matrix]) -> dict[str, BlockLayout]:
        return {} if self.quant is None else self.quant.layouts(matrices)


PLAIN = Numbers()


class Quantiser:
    """`blocks` of a matrix stay until those of the next are asked for: its tensors follow each other in the file."""

    def __init__(
        self,
        layouts: Mapping[str, BlockLayout],
        target: Target,
        dtype: torch.dtype,
        blocks_of: Callable[[str], Blocks],  # a matrix in blocks of the format that its layout has
    ) -> None:
        self._layouts, self._target, self._dtype = layouts, target, dtype
        self._blocks = functools.lru_cache(maxsize=1)(lambda name: as_stored(blocks_of(name), dtype))

    def reader(self, name: str) -> Callable[[], Tensor] | None:
        """Of a tensor of the file; None if it is no part of a quantised matrix."""
        matrix, part = split_name(name)
        if not part or matrix not in self._layouts:
            return None
        return lambda: packed(self._blocks(matrix), part, self._target, self._dtype)


def rounded(
    quant: Quant, layout: BlockLayout, matrix: Tensor, name: str, importance: Tensor | None = None
) -> Blocks:
    """A matrix (out, in) of float32 in blocks. `importance` (in,): of its inputs, where a text has shown it."""
    if quant.rounding == "nearest":
        return round_nearest(matrix, layout.format, name)
    return round_search(matrix, layout.format, name, importance)
