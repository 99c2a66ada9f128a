"""The head of a GGUF file: its metadata, and where its tensors lie.

The `gguf` package has a reader too, which is not used here: it makes a numpy view of every element (2.6 s and
160 MB for the 150,000 strings of SmolLM2's tokenizer, against 0.1 s and 20 MB), and it follows counts past the
end of the file, so that a 60-byte file eats all memory. Here every length is checked against what is left.

    magic "GGUF" | version u32 | n_tensors u64 | n_values u64
    n_values  x  key string | type u32 | value            string = length u64, bytes
    n_tensors x  name string | n_dims u32 | dims u64 ... | type u32 | offset u64
    padding to the alignment | tensor data
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from .checkpoint import CheckpointError
from .values import Values, shown

_SCALARS = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    7: "?",
    10: "u8",
    11: "i8",
    12: "f8",
}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MOST = 4_000_000  # values, tensors, or entries of an array; the largest vocabulary in use has 262,144 tokens
_MOST_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # as in PyTorch: the file has it the other way round
    offset: int  # of the first byte in the file
    row_bytes: int  # of one row, that is along the last dimension

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Values
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """The head of a file that must be regular; one that is cut short or makes no sense is a CheckpointError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except (OSError, ValueError) as error:  # mmap calls an empty file a ValueError
        raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def header(self) -> GgufHeader:
        magic = self.take(4)
        if magic != b"GGUF":
            raise self.error(f"starts with {magic!r}, wanted b'GGUF'")
        version = self.u32()
        if version not in (2, 3):
            big = version in (2 << 24, 3 << 24)
            raise self.error(
                "is big-endian" if big else f"has version {version}, versions 2 and 3 can be read"
            )
        n_tensors, n_values = self.count("tensors", 24), self.count("values", 16)
        metadata: dict[str, object] = {}
        for _ in range(n_values):
            key = self.string()
            if key in metadata:
                raise self.error(f"has {shown(key)} twice")
            metadata[key] = self.value(self.u32())
        places = [self.tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.error(f"has general.alignment {shown(alignment)}")
        start = self.at + -self.at % alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in places:
            if name in tensors:
                raise self.error(f"has tensor {shown(name)} twice")
            tensors[name] = self.placed(name, kind, shape, start + offset)
        return GgufHeader(metadata, tensors)

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, n_dims = self.string(), self.u32()
        if not 1 <= n_dims <= _MOST_DIMS:
            raise self.error(f"has tensor {shown(name)} with {n_dims} dimensions")
        shape = tuple(reversed([self.u64() for _ in range(n_dims)]))
        return name, self.u32(), shape, self.u64()

    def placed(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError as error:
            raise self.error(f"has tensor {shown(name)} of unknown type {kind}") from error
        per_block, block_bytes = GGML_QUANT_SIZES[type_]
        if 0 in shape or shape[-1] % per_block:
            raise self.error(
                f"has tensor {shown(name)} of shape {list(shape)}, which {type_.name} cannot hold"
            )
        tensor = GgufTensor(name, type_, shape, offset, shape[-1] // per_block * block_bytes)
        if offset + tensor.n_rows * tensor.row_bytes > len(self.data):
            raise self.error(f"ends before tensor {shown(name)} does; was it cut short?")
        return tensor

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.error(f"has a value of unknown type {kind}")
        array = np.frombuffer(self.take(np.dtype(_SCALARS[kind]).itemsize), "<" + _SCALARS[kind])
        # A float32 is meant as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06.
        return float(str(array[0])) if kind == _FLOAT32 else array[0].item()

    def array(self) -> list[object]:
        kind = self.u32()
        if kind == _STRING:
            return [self.string() for _ in range(self.count("strings", 8))]
        if kind not in _SCALARS:
            raise self.error(f"has an array of unsupported type {kind}")
        dtype = np.dtype("<" + _SCALARS[kind])
        size = self.count("numbers", dtype.itemsize) * dtype.itemsize
        values: list[object] = np.frombuffer(self.take(size), dtype).tolist()
        return values

    def count(self, what: str, least_bytes: int) -> int:
        """A count of things that take at least so many bytes each, so that a wrong one cannot eat memory."""
        count = self.u64()
        if count > _MOST or count * least_bytes > len(self.data) - self.at:
            raise self.error(f"says that it has {count} {what}, more than the file can hold")
        return count

    def string(self) -> str:
        length = self.u64()
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(
                f"has a text that is not UTF-8 at byte {self.at - length + error.start}"
            ) from error

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.error("ends in the middle of its head; was it cut short?")
        self.at += size
        return self.data[self.at - size : self.at]

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {text}")
