"""The weights file: every tensor once, in the order of first use, streamed so that one is in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import onnx_ir as ir
import torch

from .layout import BlockLayout, shared_name
from .lower_basic import dims

WEIGHTS_FILE = "weights.bin"
ALIGNMENT = 4096  # a page, so that onnxruntime can map each tensor where it lies

_TORCH_DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.BOOL: torch.bool,
}


def torch_dtype(dtype: ir.DataType) -> torch.dtype:
    return _TORCH_DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file holds it; `read` gives it in just this shape and dtype."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    shares: str | None = None  # the name of the tensor whose bytes these are, in another shape

    @property
    def place(self) -> str:
        """Tensors of one place are there once."""
        return self.shares or self.name

    @property
    def nbytes(self) -> int:
        size = int(self.dtype.itemsize)
        for dim in self.shape:
            size *= dim
        return size


def stored_tensors(
    models: Iterable[ir.Model],
    reader: Callable[[ir.Value], Callable[[], torch.Tensor]],
    layouts: Mapping[str, BlockLayout] = MappingProxyType({}),
) -> list[StoredTensor]:
    """The weights of all graphs, each once, in the order of first use."""
    tensors: dict[str, StoredTensor] = {}
    for model in models:
        for name, value in model.graph.initializers.items():
            if value.const_value is None and name not in tensors:
                assert value.dtype is not None
                shares = shared_name(name, layouts)
                tensors[name] = StoredTensor(name, value.dtype, dims(value), reader(value), shares)
    return list(tensors.values())


def distinct(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """One tensor for each place, in order."""
    found: dict[str, StoredTensor] = {}
    for tensor in tensors:
        found.setdefault(tensor.place, tensor)
    return list(found.values())


def link_weights(models: Iterable[ir.Model], tensors: Iterable[StoredTensor]) -> None:
    """Point the graphs' weights at their place in the file."""
    offsets: dict[str, int] = {}
    linked: dict[str, ir.ExternalTensor] = {}
    end = 0
    for tensor in tensors:
        if tensor.place not in offsets:
            offsets[tensor.place] = end + -end % ALIGNMENT
            end = offsets[tensor.place] + tensor.nbytes
        linked[tensor.name] = ir.ExternalTensor(
            WEIGHTS_FILE,
            offsets[tensor.place],
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape),
            name=tensor.name,
        )
    for model in models:
        for name, value in model.graph.initializers.items():
            if value.const_value is None:
                value.const_value = linked[name]


def write_weights(path: Path, tensors: Iterable[StoredTensor], progress: Callable[[int], None]) -> str:
    """Write the file and return its sha256; `progress` hears of the bytes written."""
    digest = hashlib.sha256()
    offset = 0
    with path.open("xb") as file:
        for tensor in distinct(tensors):
            padding = bytes(-offset % ALIGNMENT)
            data = tensor.read().contiguous()
            assert tuple(data.shape) == tensor.shape, (tensor.name, data.shape, tensor.shape)
            assert data.dtype == torch_dtype(tensor.dtype), (tensor.name, data.dtype)
            content = data.numpy().data.cast("B") if data.numel() else memoryview(b"")
            for part in (padding, content):
                file.write(part)
                digest.update(part)
            offset += len(padding) + tensor.nbytes
            progress(tensor.nbytes)
    return digest.hexdigest()
