"""How the weights file holds a matrix: as it is, transposed, or in blocks of 4- or 8-bit codes.

A matrix in blocks is several tensors, named after it. Each target has its own form of them:

| part    | ort: what MatMulNBits reads        | portable: what broadcasts over (n_blocks, block, out) |
|---------|------------------------------------|-------------------------------------------------------|
| .codes  | uint8 (out, n_blocks, bytes)       | uint8 (n_blocks, bytes, out), a block's first half in the lower bits |
| .scales | float (out, n_blocks)              | float (n_blocks, 1, out)                              |
| .zeros  | uint8 (out, packed), if any        | uint8 (n_blocks, 1, out)                              |
| .shifts | float (n_blocks, out), if any      | float (n_blocks, 1, out)                              |

A table that rows are gathered from lies there once: `.table` is another name for the bytes of `.codes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir
import torch
from torch import Tensor

from ..tfm_model.blocks import BlockFormat, Blocks

CODES, TABLE, SCALES, ZEROS, SHIFTS = ".codes", ".table", ".scales", ".zeros", ".shifts"
PARTS = (CODES, TABLE, SCALES, ZEROS, SHIFTS)

Target = Literal["ort", "portable"]
Part = tuple[ir.DataType, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    format: BlockFormat
    shifted: bool = False  # a number is added to the weights of each block
    fine: bool = (
        False  # where inputs are rounded to int8: in two steps, the second of what the first has lost
    )

    def parts(self, target: Target, shape: tuple[int, int], dtype: ir.DataType) -> dict[str, Part]:
        """The tensors of a matrix (out, in)."""
        uint8, (rows, columns), bits = ir.DataType.UINT8, shape, self.format.bits
        n, size = columns // self.format.block, self.format.block * bits // 8
        by_block = (n, 1, rows)
        if target == "portable":
            parts: dict[str, Part] = {CODES: (uint8, (n, size, rows)), SCALES: (dtype, by_block)}
            zeros: tuple[int, ...] = by_block
            shifts: tuple[int, ...] = by_block
        else:
            parts = {
                CODES: (uint8, (rows, n, size)),
                TABLE: (uint8, (rows, n * size)),
                SCALES: (dtype, (rows, n)),
            }
            zeros, shifts = (rows, math.ceil(n * bits / 8)), (n, rows)
        parts |= {ZEROS: (uint8, zeros)} if self.format.zero_points else {}
        return parts | ({SHIFTS: (dtype, shifts)} if self.shifted else {})


Layout = Literal["rows", "columns"] | BlockLayout


def split_name(name: str) -> tuple[str, str]:
    """Of a tensor of the file: the matrix, and which part of it; ("...", "") if it is no part."""
    matrix, dot, part = name.rpartition(".")
    return (matrix, dot + part) if dot + part in PARTS else (name, "")


def shared_name(name: str, layouts: Mapping[str, BlockLayout]) -> str | None:
    """Which other tensor's bytes these are, if they are."""
    matrix, part = split_name(name)
    return matrix + CODES if part == TABLE and matrix in layouts else None


def as_stored(blocks: Blocks, dtype: torch.dtype) -> Blocks:
    """What the graphs compute with: scales in the bundle's precision, codes around the middle.

    A Q4_1 block is scale * code + minimum, with codes from 0. Codes that lie around 0 have half the error where
    activations are rounded, so half the range moves into the shift (in float64: exact but for its last rounding).
    """
    if blocks.shifts is not None and blocks.zeros is not None:
        moved = (blocks.format.middle - blocks.zeros.double()) * blocks.scales.double()
        centred = replace(blocks.format, zero_points=False)
        blocks = Blocks(centred, blocks.codes, blocks.scales, None, (blocks.shifts.double() + moved).float())
    scales = blocks.scales.to(dtype).float()
    shifts = None if blocks.shifts is None else blocks.shifts.to(dtype).float()
    return replace(blocks, scales=scales, shifts=shifts)


def packed(blocks: Blocks, part: str, target: Target, dtype: torch.dtype) -> Tensor:
    """One of the tensors."""
    if part in {CODES, TABLE}:
        if target == "portable":
            return _halves(blocks).permute(1, 2, 0)
        codes = blocks.packed_codes()
        return codes if part == CODES else codes.flatten(1)
    if part == ZEROS and target == "ort":
        return blocks.packed_zeros()
    values = {SCALES: blocks.scales, ZEROS: blocks.zeros, SHIFTS: blocks.shifts}[part]
    assert values is not None
    values = values if part == ZEROS else values.to(dtype)
    if target == "portable":
        return values.T[:, None]
    return values.T if part == SHIFTS else values


def unpacked(parts: dict[str, Tensor], layout: BlockLayout, target: Target) -> Blocks:
    """The matrix that the tensors hold."""
    codes, scales, zeros, shifts = (parts.get(part) for part in (CODES, SCALES, ZEROS, SHIFTS))
    assert codes is not None
    assert scales is not None
    bits, n = layout.format.bits, codes.shape[0 if target == "portable" else 1]
    if target == "portable":
        codes = codes.permute(2, 0, 1)
        codes = codes if bits == 8 else torch.cat((codes & 15, codes >> 4), dim=-1)
        scales, zeros, shifts = (None if part is None else part[:, 0].T for part in (scales, zeros, shifts))
    else:
        codes = codes if bits == 8 else _nibbles(codes)
        zeros = zeros if zeros is None or bits == 8 else _nibbles(zeros)[:, :n]
        shifts = None if shifts is None else shifts.T
    assert scales is not None
    shifts = None if shifts is None else shifts.float()
    return Blocks(layout.format, codes, scales.float(), zeros, shifts)


def _halves(blocks: Blocks) -> Tensor:
    """uint8 (out, n_blocks, bytes): the first half of a block in the lower bits, the second in the upper."""
    if blocks.format.bits == 8:
        return blocks.codes
    first, second = blocks.codes.chunk(2, dim=-1)
    return first | second << 4


def _nibbles(values: Tensor) -> Tensor:
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
