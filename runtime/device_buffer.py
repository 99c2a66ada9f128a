"""Memory that runs read and write in place: a numpy array on the CPU, an OrtValue on CUDA.

It is bound by address, so one row of a batch can be bound alone. It begins as zeros, for a graph may read slots before a
token was written to them, and what lay there before is nobody's answer. CPU memory is aligned for vector instructions
and not touched before it is used (the system's own pages are zeros): a large capacity costs address space, not memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .devices import Device, import_onnxruntime

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector


class DeviceBuffer:
    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic], device: Device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._array: npt.NDArray[Any] | None = None
        self._value: Any = None
        if device.kind == "cpu":
            self._array = _aligned_zeros(shape, dtype)
            self.pointer = int(self._array.ctypes.data)
        else:
            self._put(np.zeros(shape, dtype))

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    def row_pointer(self, row: int) -> int:
        return self.pointer + row * self.row_bytes

    def to_host(self) -> npt.NDArray[Any]:
        """The memory itself on the CPU, a copy of it elsewhere."""
        return self._array if self._array is not None else np.asarray(self._value.numpy())

    def grown(self, axis: int, size: int, lengths: list[int]) -> DeviceBuffer:
        """A longer buffer with the first `lengths[row]` entries of each row along `axis` copied."""
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        if self._array is not None:
            larger = DeviceBuffer(shape, self.dtype, self.device)
            _copy_rows(self._array, larger.to_host(), axis, range(len(lengths)), lengths)
            return larger
        array = np.zeros(shape, self.dtype)
        _copy_rows(self.to_host(), array, axis, range(len(lengths)), lengths)
        larger = DeviceBuffer((0,), self.dtype, self.device)
        larger._put(array)
        return larger

    def keep(self, axis: int, rows: list[int], lengths: list[int]) -> None:
        """Move `rows` (ascending) to the front, of each the first `lengths[row]` entries; the rest is dropped."""
        array = self.to_host()
        _copy_rows(array, array, axis, rows, lengths)
        self.shape = (len(rows), *self.shape[1:])
        if self._array is not None:
            self._array = array[: len(rows)]  # the same address: rows are contiguous
        else:
            self._put(np.ascontiguousarray(array[: len(rows)]))

    def _put(self, array: npt.NDArray[Any]) -> None:
        self._value = import_onnxruntime().OrtValue.ortvalue_from_numpy(array, self.device.kind, 0)
        self.pointer = int(self._value.data_ptr())
        self.shape = array.shape


def _copy_rows(
    source: npt.NDArray[Any], target: npt.NDArray[Any], axis: int, rows: list[int] | range, lengths: list[int]
) -> None:
    for to, row in enumerate(rows):
        if source is target and to == row:
            continue
        part = (slice(None),) * (axis - 1) + (slice(lengths[row]),)
        target[to][part] = source[row][part]


def _aligned_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
