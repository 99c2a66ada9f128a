"""A matrix in blocks of 4- or 8-bit codes: how it is stored, what it means, and how ONNX Runtime wants it packed.

A block is a run of weights of one row that share a scale: w = (code - zero) * scale, with an integer zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .. import InputError

Bits = Literal[4, 8]
BlockSize = Literal[16, 32, 64, 128]  # those that MatMulNBits's fast kernels know


class BlockError(InputError):
    """A matrix cannot be stored in the blocks that were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """How one matrix is stored."""

    bits: Bits
    block: BlockSize = 32  # weights of a row that share a scale
    zero_points: bool = False  # an integer zero point a block; else symmetric: the code `middle` is 0

    def __post_init__(self) -> None:
        if self.bits not in get_args(Bits):
            raise BlockError(f"weights of {self.bits} bits, wanted {_either(get_args(Bits))}")
        if self.block not in get_args(BlockSize):
            raise BlockError(f"blocks of {self.block} weights, wanted {_either(get_args(BlockSize))}")

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def top(self) -> int:
        """The largest code; the smallest is 0."""
        return (1 << self.bits) - 1

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """BlockError unless the matrix (out, in) falls into whole blocks."""
        if len(shape) == 2 and shape[1] and shape[1] % self.block == 0:
            return
        if len(shape) != 2:
            raise BlockError(f"{name} has shape {list(shape)}, wanted a matrix; leave it as it is")
        whole = [size for size in get_args(BlockSize) if shape[1] and shape[1] % size == 0]
        advice = f"blocks of {_either(whole)} do" if whole else "leave it as it is (--quant-skip)"
        raise BlockError(f"{name} has rows of {shape[1]} weights, no multiple of {self.block}; {advice}")


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix (out, in)."""

    format: BlockFormat
    codes: Tensor  # uint8 (out, n_blocks, block), one code a byte
    scales: Tensor  # float32 (out, n_blocks), of either sign
    zeros: Tensor | None = None  # uint8 (out, n_blocks); None: format.middle
    # float32 (out, n_blocks), added to each weight of a block: a GGUF's Q4_1, whose minimum is no integer zero
    shifts: Tensor | None = None

    def __post_init__(self) -> None:
        rows, blocks, size = self.codes.shape
        found = {part.shape for part in (self.scales, self.zeros, self.shifts) if part is not None}
        if size != self.format.block or found != {(rows, blocks)}:
            raise ValueError(f"codes {list(self.codes.shape)} and {found} are no matrix of {self.format}")
        if self.format.zero_points != (self.zeros is not None):
            raise ValueError(f"zeros are {self.zeros}, the format is {self.format}")

    @property
    def shape(self) -> tuple[int, int]:
        rows, blocks, size = self.codes.shape
        return rows, blocks * size

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(out, in), computed in float32 as GGUF does, to the bit."""
        zero = self.format.middle if self.zeros is None else self.zeros[:, :, None].float()
        values = self.codes.float().sub_(zero).mul_(self.scales[:, :, None])
        if self.shifts is not None:
            values += self.shifts[:, :, None]
        return values.reshape(self.shape).to(dtype)

    def packed_codes(self) -> Tensor:
        """uint8 (out, n_blocks, block * bits / 8): the B of MatMulNBits, the lower half of a byte first."""
        return _packed(self.codes, self.format.bits)

    def packed_zeros(self) -> Tensor:
        """uint8 (out, n_blocks * bits / 8, rounded up): the zero_points of MatMulNBits."""
        if self.zeros is None:
            raise ValueError("a symmetric matrix has no zero points")
        return _packed(self.zeros, self.format.bits)

    def rows(self, index: Tensor) -> Blocks:
        """These rows, in this order."""
        chosen = [None if part is None else part[index] for part in (self.zeros, self.shifts)]
        return Blocks(self.format, self.codes[index], self.scales[index], *chosen)


@dataclass(frozen=True, slots=True)
class LazyBlocks:
    """A matrix that its file holds in blocks, which stay there until `read` is called."""

    format: BlockFormat
    shifted: bool  # the blocks have shifts
    read: Callable[[], Blocks]

    @property
    def kind(self) -> tuple[BlockFormat, bool]:
        return self.format, self.shifted


def concat(parts: Sequence[Blocks]) -> Blocks:
    """The matrices below each other; all must have the same format."""
    first = parts[0]
    if any(part.format != first.format or (part.shifts is None) != (first.shifts is None) for part in parts):
        raise ValueError("blocks of different formats cannot be one matrix")
    zeros = [part.zeros for part in parts if part.zeros is not None]
    shifts = [part.shifts for part in parts if part.shifts is not None]
    return Blocks(
        first.format,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zeros) if zeros else None,
        torch.cat(shifts) if shifts else None,
    )


def _packed(codes: Tensor, bits: Bits) -> Tensor:
    """The last dimension as bytes."""
    if bits == 8:
        return codes.contiguous()
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _either(choices: Sequence[object]) -> str:
    """16, 32 or 64."""
    *rest, last = map(str, choices)
    return f"{', '.join(rest)} or {last}" if rest else last
