"""The tensors of a GGUF file: mapped where they are plain, dequantised when they are read where they are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from .checkpoint import CheckpointError, LazyTensor
from .gguf_header import GgufTensor
from .values import shown

_PLAIN = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_QUANTISED = (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q4_K, Type.Q5_K, Type.Q6_K)
_CHUNK = 2**18  # weights at a time, so that gguf's temporary arrays stay in the cache: 280 M/s, not 45


def lazy_tensor(path: Path, tensor: GgufTensor) -> LazyTensor:
    if tensor.type in _PLAIN:
        return LazyTensor(tensor.name, tensor.shape, lambda: _read_plain(path, tensor))
    if tensor.type in _QUANTISED:
        return LazyTensor(tensor.name, tensor.shape, lambda: _read_quantised(path, tensor))
    supported = ", ".join(type_.name for type_ in (*_PLAIN, *_QUANTISED))
    raise CheckpointError(
        f"{path}: tensor {shown(tensor.name)} has type {tensor.type.name}, supported are {supported}"
    )


def unpermuted(tensor: LazyTensor, n_heads: int) -> LazyTensor:
    """Rows of queries or keys back in the order of Hugging Face.

    llama.cpp turns neighbouring dimensions of a head (2i, 2i+1), Hugging Face the halves (i, i+D/2); its
    converter moves the rows of llama models (only of those) so that both compute the same.
    """

    def read() -> torch.Tensor:
        stored = tensor.read()
        pairs = stored.reshape(n_heads, stored.shape[0] // n_heads // 2, 2, *stored.shape[1:])
        return pairs.transpose(1, 2).reshape(stored.shape)

    return LazyTensor(tensor.name, tensor.shape, read)


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


def _mapped(path: Path, tensor: GgufTensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """The bytes, (rows, bytes per row), in a private mapping that lives as long as the array."""
    try:
        mapping = np.memmap(path, np.uint8, "c", tensor.offset, (tensor.n_rows, tensor.row_bytes))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {shown(tensor.name)} cannot be read: {error}") from error
    return np.asarray(mapping)
