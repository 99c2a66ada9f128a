"""Faults that the largest difference of an output lets through where graphs round on the way: a replay finds them all the same.

Each is planted into the bundle's own files, and the manifest made to fit.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import reseal
from onnx import helper
from planted_faults import constant, insert_before, node, set_attribute
from random_models import PLAIN, random_source

from tfmx.export.options import DTYPES, ExportOptions
from tfmx.export.pipeline import export_model
from tfmx.export.recipe import Quant
from tfmx.export.source import open_source
from tfmx.runtime.bundle import Bundle, BundleError
from tfmx.runtime.devices import Device
from tfmx.runtime.golden import GOLDEN, CaseResult, replay_golden

CPU = Device("cpu", "test")
CONFIG = replace(PLAIN, n_layers=6)  # noise adds up on the way, as it does in a trained model
OPTIONS = {
    "int8": ExportOptions(quant=Quant(bits=8)),
    "int4": ExportOptions(quant=Quant(bits=4)),
    "int8 cache": ExportOptions(quant=Quant(bits=8), kv="int8"),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, options in OPTIONS.items():
        found[name] = tmp_path_factory.mktemp("bundles") / name
        export_model(random_source(CONFIG), found[name], options)
    return found


def stored(folder: Path, name: str) -> np.memmap:
    model = onnx.load(folder / "prefill.onnx", load_external_data=False)
    tensor = next(i for i in model.graph.initializer if i.name == name)
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    dtype = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.UINT8: np.uint8}[tensor.data_type]
    return np.memmap(folder / "weights.bin", dtype, "r+", offset=offset, shape=tuple(tensor.dims))


def weight(name: str, change: Callable[[np.memmap], None]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        array = stored(folder, name)
        before = array.copy()
        change(array)
        array.flush()
        assert not np.array_equal(before, array), "the fault changed nothing"

    return plant


def graphs(
    change: Callable[[onnx.ModelProto], None], kinds: tuple[str, ...] = ("prefill", "decode")
) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        for kind in kinds:
            model = onnx.load(folder / f"{kind}.onnx", load_external_data=False)
            change(model)
            (folder / f"{kind}.onnx").write_bytes(model.SerializeToString())

    return plant


def lost_block(name: str, rows: int | None = None) -> Callable[[Path], None]:
    """What a kernel does that leaves the last 32 inputs out, of all outputs or of the last few."""
    return weight(f"{name}.scales", lambda scales: scales[-(rows or len(scales)) :, -1].fill(0))


def off_by_one(name: str) -> Callable[[Path], None]:
    """4-bit codes, as with a zero point one too small."""

    def change(codes: np.memmap) -> None:
        low, high = np.minimum(codes & 15, 14) + 1, np.minimum(codes >> 4, 14) + 1
        np.copyto(codes, low | high << 4)

    return weight(f"{name}.codes", change)


def fewer_bits(name: str, mask: int) -> Callable[[Path], None]:
    return weight(f"{name}.codes", lambda codes: np.bitwise_and(codes, mask, out=codes))


def swapped_rows(name: str) -> Callable[[Path], None]:
    """Two heads' queries."""
    return weight(f"{name}.codes", lambda codes: np.copyto(codes[:32], np.roll(codes[:32], 16, axis=0)))


def attention(layer: int) -> Callable[[onnx.ModelProto], onnx.NodeProto]:
    return lambda model: node(model, f"blocks.{layer}.GroupQueryAttention_0")


def scaled_scores(layer: int, factor: float) -> Callable[[Path], None]:
    return graphs(lambda model: set_attribute(attention(layer)(model), "scale", lambda s: s * factor))


def stale_slot(layer: int) -> Callable[[Path], None]:
    """Decode writes over the newest token's slot instead of behind it."""

    def change(model: onnx.ModelProto) -> None:
        op = attention(layer)(model)
        less = helper.make_node("Sub", [op.input[5], constant(model, [1], np.int32)], ["fault"], name="fault")
        insert_before(model, op, less)
        op.input[5] = "fault"

    return graphs(change, ("decode",))


def swapped_scales(layer: int) -> Callable[[Path], None]:
    def change(model: onnx.ModelProto) -> None:
        op = attention(layer)(model)
        op.input[12], op.input[13] = op.input[13], op.input[12]

    return graphs(change)


def wrong_rotary(name: str) -> Callable[[Path], None]:
    return weight(name, lambda table: table.__setitem__(5, table[6]))


@dataclass(frozen=True)
class Fault:
    name: str
    bundle: str
    plant: Callable[[Path], None]
    hides: bool = False  # from the largest difference


FAULTS = [
    Fault("a block lost", "int8", lost_block("blocks.2.mlp.down.weight")),
    Fault("a block lost for 8 rows", "int8", lost_block("blocks.2.mlp.down.weight", 8)),
    Fault("a block lost for 8 rows", "int4", lost_block("blocks.2.attention.qkv.weight", 8)),
    Fault(
        "the last layer loses a block for 16 rows",
        "int8",
        lost_block("blocks.5.mlp.up.weight", 16),
        hides=True,
    ),
    Fault("a zero point off by one", "int4", off_by_one("blocks.2.mlp.up.weight")),
    Fault(
        "the last layer's zero point off by one", "int4", off_by_one("blocks.5.mlp.down.weight"), hides=True
    ),
    Fault("codes of 5 bits", "int8", fewer_bits("blocks.2.mlp.up.weight", 0xF8)),
    Fault("codes of 3 bits", "int4", fewer_bits("blocks.1.attention.qkv.weight", 0xEE)),
    Fault("heads swapped", "int4", swapped_rows("blocks.3.attention.qkv.weight")),
    Fault("scores too large by a quarter", "int8", scaled_scores(1, 1.25)),
    Fault("a wrong rotary entry", "int8", wrong_rotary("rotary.cos")),
    Fault("a stale slot in the cache", "int8", stale_slot(2), hides=True),
    Fault("a stale slot in the last layer's cache", "int8 cache", stale_slot(5), hides=True),
    Fault("scales of keys and values swapped", "int8 cache", swapped_scales(3), hides=True),
]


def replayed(folder: Path, threads: int = 1) -> list[CaseResult]:
    return replay_golden(Bundle.open(folder), CPU, threads=threads)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.bundle}: {fault.name}")
def test_a_planted_fault_is_caught(fault: Fault, bundles: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(bundles[fault.bundle], tmp_path / "faulty")
    fault.plant(folder)
    reseal(folder)
    results = replayed(folder)
    assert not all(result.passed for result in results)
    if fault.hides:
        assert all(result.passed for result in results if ":" not in result.name)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_right_bundle_passes_with_room(name: str, threads: int, bundles: dict[str, Path]) -> None:
    results = replayed(bundles[name], threads)
    assert [result.name.partition(":")[0] for result in results] == ["one_prompt"] * 3 + ["ragged_batch"] * 3
    assert all(0 < result.error < 0.8 * result.budget for result in results)


def test_kernels_that_round_otherwise_pass(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another processor: without rounding of activations, by the kernel that dequantises."""
    folder = shutil.copytree(bundles["int8"], tmp_path / "other")

    def change(model: onnx.ModelProto) -> None:
        for op in model.graph.node:
            if op.op_type == "MatMulNBits":
                set_attribute(op, "accuracy_level", lambda _: 1)

    graphs(change)(folder)
    reseal(folder)
    assert all(result.passed for result in replayed(folder))


def golden(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / GOLDEN) as arrays:
        return dict(arrays)


def rewrite(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    (folder / GOLDEN).write_bytes(buffer.getvalue())
    reseal(folder)


def test_bundles_that_have_only_the_largest_difference_are_still_replayed(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(bundles["int8"], tmp_path / "old")
    new = ("spread", "cache", "cache_budget")
    rewrite(folder, {name: a for name, a in golden(folder).items() if name.rpartition(".")[2] not in new})
    assert [result.name for result in replayed(folder)] == ["one_prompt", "ragged_batch"]


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("spread", None, "holds"),
        ("cache", None, "holds"),
        ("cache_budget", None, "holds"),
        ("spread", np.zeros(2), "do not fit together"),
        ("spread", np.array("x"), "expected numbers"),
        ("cache", np.zeros((3, 3)), "do not fit together"),
        ("cache_budget", np.zeros(12), "do not fit together"),
    ],
)
def test_a_file_that_cannot_be_right_is_an_error(
    part: str, value: np.ndarray | None, words: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(bundles["int8"], tmp_path / "wrong")
    arrays = golden(folder)
    arrays.pop(f"one_prompt.{part}")
    rewrite(folder, arrays | ({} if value is None else {f"one_prompt.{part}": value}))
    with pytest.raises(BundleError, match=words):
        replayed(folder)


@pytest.mark.parametrize(("preset", "looks"), [("relative", 3), ("lstm", 2)])
def test_models_that_are_traced_whole_have_it_too(preset: str, looks: int, tmp_path: Path) -> None:
    """By a cache that is appended to; a recurrent state is none that grows."""
    source = open_source(f"preset:{preset}", DTYPES["fp32"], None)
    export_model(source, tmp_path / "b", ExportOptions(quant=Quant(bits=8, block=16)))
    results = replayed(tmp_path / "b")
    assert len(results) == 2 * looks
    assert all(result.passed for result in results)


def test_a_cache_that_is_no_number_fails(bundles: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(bundles["int8"], tmp_path / "nan")
    arrays = golden(folder)
    arrays["one_prompt.cache"][3, 4] = np.nan
    rewrite(folder, arrays)
    failed = [result for result in replayed(folder) if not result.passed]
    assert [result.name for result in failed] == ["one_prompt: present.0.key"]
