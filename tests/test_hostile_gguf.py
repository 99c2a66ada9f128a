"""GGUF files that are broken or lie: refused with one line, soon, and without eating memory."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
from tiny_checkpoints import refused, tiny_model, write_gguf

from tfmx.tfm_model.checkpoint import CheckpointError
from tfmx.tfm_model.gguf_header import read_header
from tfmx.tfm_model.source import open_checkpoint

pytestmark = pytest.mark.timeout(60)  # an endless count would hang


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tokens = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab"],
        "token_type": [1, 1, 1],
        "merges": ["a b"],
    }
    write_gguf(
        path, tiny_model("llama"), metadata={f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
    )
    return path.read_bytes()


def test_gguf_files_that_are_cut_short_are_refused(tmp_path, gguf_bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes)
    assert open_checkpoint(str(path)).kind == "gguf"
    end_of_head = min(tensor.offset for tensor in read_header(path).tensors.values())
    for size in [*range(0, end_of_head, 7), end_of_head, len(gguf_bytes) // 2, len(gguf_bytes) - 1]:
        path.write_bytes(gguf_bytes[:size])
        assert str(path) in refused(path)


def test_gguf_files_with_flipped_bits_are_refused_or_read(tmp_path, gguf_bytes):
    """Whatever is wrong with a head, nothing but a CheckpointError comes of it, soon and without much memory."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes)
    end_of_head = min(tensor.offset for tensor in read_header(path).tensors.values())
    generator = random.Random(0)
    refusals = []
    tracemalloc.start()
    for _ in range(400):
        broken = bytearray(gguf_bytes)
        for _ in range(generator.choice([1, 1, 4])):
            broken[generator.randrange(end_of_head)] ^= 1 << generator.randrange(8)
        path.write_bytes(broken)
        try:
            checkpoint = open_checkpoint(str(path))
            for tensor in checkpoint.tensors.values():
                tensor.read()
        except CheckpointError as error:
            refusals.append(str(error))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(refusals) > 200
    assert all(message.isprintable() for message in refusals)
    assert peak < 100 * 2**20


def gguf_head(
    n_tensors: int, n_values: int, rest: bytes = b"", magic: bytes = b"GGUF", version: int = 3
) -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_values) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor_info(dims: list[int], kind: int = 0, offset: int = 0, name: str = "t") -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = 2**63


HEADS = {
    "another magic": (gguf_head(0, 0, magic=b"GGML"), "starts with b'GGML'"),
    "version 1": (gguf_head(0, 0, version=1), "has version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "many values": (gguf_head(0, HUGE, bytes(100)), "values, more than the file can hold"),
    "many tensors": (gguf_head(HUGE, 0, bytes(100)), "tensors, more than the file can hold"),
    "long key": (gguf_head(0, 1, struct.pack("<Q", HUGE) + bytes(100)), "ends in the middle of its head"),
    "long array": (gguf_head(0, 1, text("a") + struct.pack("<IIQ", 9, 0, HUGE)), "numbers, more than the file can hold"),
    "long text array": (
        gguf_head(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 2**40) + bytes(64)),
        "strings, more than the file can hold",
    ),
    "array of arrays": (
        gguf_head(0, 1, text("a") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 20),
        "has an array of unsupported type 9",
    ),
    "unknown type of value": (gguf_head(0, 1, text("a") + struct.pack("<I", 77) + bytes(32)), "unknown type 77"),
    "one key twice": (gguf_head(0, 2, (text("a") + struct.pack("<IB", 7, 1)) * 2 + bytes(8)), "has 'a' twice"),
    "no UTF-8": (gguf_head(0, 1, struct.pack("<Q", 2) + b"\xff\xff" + bytes(32)), "has a text that is not UTF-8"),
    "no dimensions": (gguf_head(1, 0, tensor_info([]) + bytes(64)), "with 0 dimensions"),
    "many dimensions": (gguf_head(1, 0, tensor_info([1] * 9) + bytes(64)), "with 9 dimensions"),
    "dimension 0": (gguf_head(1, 0, tensor_info([0]) + bytes(64)), "of shape [0]"),
    "product that overflows": (gguf_head(1, 0, tensor_info([2**32, 2**32]) + bytes(64)), "ends before tensor 't' does"),
    "unknown type of tensor": (gguf_head(1, 0, tensor_info([1], kind=999) + bytes(64)), "unknown type 999"),
    "half a block": (gguf_head(1, 0, tensor_info([33], kind=8) + bytes(64)), "which Q8_0 cannot hold"),
    "far offset": (gguf_head(1, 0, tensor_info([1], offset=HUGE) + bytes(64)), "ends before tensor 't' does"),
    "one tensor twice": (gguf_head(2, 0, tensor_info([1]) * 2 + bytes(64)), "has tensor 't' twice"),
    "alignment 0": (
        gguf_head(1, 1, text("general.alignment") + struct.pack("<II", 4, 0) + tensor_info([1]) + bytes(64)),
        "has general.alignment 0",
    ),
    "nothing in it": (gguf_head(0, 0), "general.architecture is None"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
def test_gguf_heads_that_lie_are_refused(tmp_path, case):
    content, words = HEADS[case]
    (tmp_path / "model.gguf").write_bytes(content)
    tracemalloc.start()
    assert words in refused(tmp_path / "model.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * 2**20


def test_gguf_weights_cut_after_opening_are_noticed(tmp_path, gguf_bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes)
    checkpoint = open_checkpoint(str(path))
    path.write_bytes(gguf_bytes[:2000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.tensors["norm.weight"].read()
