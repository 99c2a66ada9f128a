"""The tensors of a GGUF file: mapped where they are plain, dequantised when they are read where they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from .blocks import BlockFormat, Blocks, LazyBlocks
from .checkpoint import CheckpointError, LazyTensor
from .gguf_header import GgufTensor
from .values import shown

_PLAIN = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_QUANTISED = (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q4_K, Type.Q5_K, Type.Q6_K)
_BLOCKS = {  # types whose blocks are kept as they are
    Type.Q4_0: BlockFormat(bits=4),
    Type.Q4_1: BlockFormat(bits=4, zero_points=True),  # all zero points are 0, and shifts follow
    Type.Q8_0: BlockFormat(bits=8),
}
_CHUNK = 2**18  # weights at a time, so that gguf's temporary arrays stay in the cache: 280 M/s, not 45

Bytes = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


def lazy_tensor(path: Path, tensor: GgufTensor) -> LazyTensor:
    if tensor.type in _PLAIN:
        return LazyTensor(tensor.name, tensor.shape, lambda: _read_plain(path, tensor))
    if tensor.type in _QUANTISED:
        blocks = None
        if tensor.type in _BLOCKS and len(tensor.shape) == 2:
            kind = _BLOCKS[tensor.type], tensor.type == Type.Q4_1
            blocks = LazyBlocks(*kind, lambda: gguf_blocks(_mapped(path, tensor), tensor.type))
        return LazyTensor(tensor.name, tensor.shape, lambda: _read_quantised(path, tensor), blocks)
    supported = ", ".join(type_.name for type_ in (*_PLAIN, *_QUANTISED))
    raise CheckpointError(
        f"{path}: tensor {shown(tensor.name)} has type {tensor.type.name}, supported are {supported}"
    )


def unpermuted(tensor: LazyTensor, n_heads: int) -> LazyTensor:
    """Rows of queries or keys back in the order of Hugging Face.

    llama.cpp turns neighbouring dimensions of a head (2i, 2i+1), Hugging Face the halves (i, i+D/2); its
    converter moves the rows of llama models (only of those) so that both compute the same.
    """

    def order() -> (
        torch.Tensor
    ):  # when it is read: until then nobody has looked whether the heads divide the rows
        rows = torch.arange(tensor.shape[0])
        return rows.reshape(n_heads, len(rows) // n_heads // 2, 2).transpose(1, 2).reshape(-1)

    stored = tensor.blocks
    blocks = None if stored is None else replace(stored, read=lambda: stored.read().rows(order()))
    return LazyTensor(tensor.name, tensor.shape, lambda: tensor.read()[order()], blocks)


def gguf_blocks(rows: Bytes, type_: Type) -> Blocks:
    """Rows of whole blocks (rows, bytes per row) of Q4_0, Q4_1 or Q8_0, exactly as they are.

    A 4-bit block of 32 keeps weights 0 to 15 in the lower halves of its 16 bytes and the others in the upper ones.
    """
    blocks = rows.reshape(len(rows), -1, GGML_QUANT_SIZES[type_][1])
    n_floats = 2 if type_ == Type.Q4_1 else 1  # a scale, and the smallest weight
    floats = np.ascontiguousarray(blocks[:, :, : 2 * n_floats]).view(np.float16).astype(np.float32)
    bytes_ = torch.from_numpy(np.ascontiguousarray(blocks[:, :, 2 * n_floats :]))
    scales, *shifts = torch.from_numpy(floats).movedim(-1, 0)
    if type_ == Type.Q8_0:
        return Blocks(_BLOCKS[type_], bytes_ ^ 0x80, scales)  # int8 + 128
    codes = torch.cat((bytes_ & 0x0F, bytes_ >> 4), dim=-1)
    if type_ == Type.Q4_0:
        return Blocks(_BLOCKS[type_], codes, scales)
    return Blocks(_BLOCKS[type_], codes, scales, torch.zeros(scales.shape, dtype=torch.uint8), *shifts)


def _read_plain(path: Path, tensor: GgufTensor) -> torch.Tensor:
    values = _mapped(path, tensor).reshape(-1)
    dtype = _PLAIN[tensor.type]
    if tensor.offset % dtype.itemsize:
        values = values.copy()  # torch wants its elements aligned
    return torch.from_numpy(values).view(dtype).reshape(tensor.shape)


def _read_quantised(path: Path, tensor: GgufTensor) -> torch.Tensor:
    per_block, block_bytes = GGML_QUANT_SIZES[tensor.type]
    blocks = _mapped(path, tensor).reshape(-1, block_bytes)
    values = torch.empty(len(blocks), per_block)
    step = max(1, _CHUNK // per_block)
    for first in range(0, len(blocks), step):
        row = blocks[first : first + step].reshape(1, -1)  # as one row: gguf works on 16 rows at a time
        with np.errstate(all="ignore"):  # a scale that is not finite is found in the weights, by their name
            part = dequantize(row, tensor.type)
        values[first : first + step] = torch.from_numpy(part).reshape(-1, per_block)
    return values.reshape(tensor.shape)


def _mapped(path: Path, tensor: GgufTensor) -> Bytes:
    """The bytes, (rows, bytes per row), in a private mapping that lives as long as the array."""
    try:
        mapping = np.memmap(path, np.uint8, "c", tensor.offset, (tensor.n_rows, tensor.row_bytes))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {shown(tensor.name)} cannot be read: {error}") from error
    return np.asarray(mapping)
