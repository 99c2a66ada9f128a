"""`tfmx bench`: figures from known times, costs of real graphs, what it prints, draws and refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import checkpoint, exported, program_without, tfmx
from PIL import Image
from tiny_bundle import VOCAB

from tfmx import InputError
from tfmx.cli.bench import _as_json, _title
from tfmx.cli.bench_png import draw_bench
from tfmx.export.pipeline import ExportOptions, export
from tfmx.runtime import bench as module
from tfmx.runtime import machine
from tfmx.runtime.bench import (
    STEPS,
    BenchError,
    BenchOptions,
    Spread,
    bench,
    state_bytes,
)
from tfmx.runtime.bundle import Bundle
from tfmx.runtime.graph_costs import Costs, graph_costs
from tfmx.runtime.machine import Limits

REAL_LINES = module._lines  # without the stand-in below


class Quiet:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.advanced = 0

    def stage(self, title: str, total: int) -> None:
        self.stages.append((title, total))

    def advance(self, amount: int = 1) -> None:
        self.advanced += amount


@pytest.fixture(autouse=True)
def _a_small_machine(monkeypatch):
    """Seconds of exact limits are no use here."""
    limits = {"read_bytes_per_second": 2e10, "flops_per_second": 1e11}
    monkeypatch.setattr(
        module,
        "_lines",
        lambda name, job: iter([(limits, 0.1)]) if name == "machine" else REAL_LINES(name, job),
    )


# --- what a step costs -----------------------------------------------------------------------------------


def matrix_bytes() -> int:
    """Of the tiny checkpoint in float32, by hand: what products read."""
    width, heads, kv, head_dim, hidden, layers = 64, 4, 2, 16, 96, 3
    block = width * (heads + 2 * kv) * head_dim + heads * head_dim * width + 3 * width * hidden
    return 4 * (layers * block + width * VOCAB)


def test_costs_are_those_of_the_matrices():
    found = Bundle.open(exported()[0])
    for role in ("prefill", "decode"):
        costs = graph_costs(found.graph(role), VOCAB)
        assert costs.head == 2 * 64 * VOCAB
        assert costs.body + costs.head == matrix_bytes() // 4 * 2
        norms = 4 * 64 * (2 * 3 + 1)
        assert 0 <= costs.weight_bytes - matrix_bytes() - norms < 200  # and a few constants
    table = 4 * 64 * VOCAB  # the embedding is not tied here, and only its rows are read
    assert costs.weight_bytes + table < found.manifest.files["weights.bin"].size


@pytest.mark.slow
def test_costs_of_the_portable_target_are_the_same(tmp_path):
    export(str(checkpoint()), tmp_path / "portable", ExportOptions(target="portable", verify=False))
    portable = Bundle.open(tmp_path / "portable")
    ours = graph_costs(Bundle.open(exported()[0]).graph("decode"), VOCAB)
    theirs = graph_costs(portable.graph("decode"), VOCAB)
    assert (theirs.body, theirs.head) == (ours.body, ours.head)
    assert theirs.weight_bytes == pytest.approx(ours.weight_bytes, rel=0.2)


@pytest.mark.slow
def test_the_products_of_an_lstm_are_counted(tmp_path):
    export("preset:lstm", tmp_path / "lstm", ExportOptions(verify=False))
    found = Bundle.open(tmp_path / "lstm")
    costs = graph_costs(found.graph("decode"), 96)
    assert costs.body == 2 * 2 * (2 * 4 * 48 * 48)  # two layers, four gates, from the input and the state
    assert costs.head == 2 * 48 * 96
    assert state_bytes(found.manifest, 5) == state_bytes(found.manifest, 500) == 4 * 2 * 2 * 48


def test_the_state_of_a_step_grows_with_the_context():
    manifest = Bundle.open(exported()[0]).manifest
    assert state_bytes(manifest, 10) == 4 * 3 * 2 * 2 * 16 * 10  # layers, keys and values, heads, size


# --- figures ---------------------------------------------------------------------------------------------


def test_a_spread_is_the_median_with_the_least_and_the_most():
    assert Spread.of([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0)


def test_figures_follow_from_the_times():
    manifest = Bundle.open(exported()[0]).manifest
    runs = [
        {"prefill": seconds, "steps": [0.001, step, 0.9]}
        for seconds, step in ((0.5, 0.01), (1.0, 0.02), (2.0, 0.04))
    ]
    costs, limits = (
        Costs(weight_bytes=10**8, body=10**9, head=10**8),
        Limits(read_bytes_per_second=2e10, flops_per_second=1e12),
    )
    found = module._at_length(runs, 100, 4, manifest, costs, limits)
    assert found.prefill_tokens_per_second == Spread(400, 200, 800)
    assert found.decode_tokens_per_second == Spread(200, 100, 400)  # 4 rows a step of 20 ms
    assert found.decode_bytes == 10**8 + 4 * state_bytes(manifest, 100 + STEPS // 2)
    assert found.decode_share == pytest.approx(found.decode_bytes / 2e10 / 0.02)
    assert found.prefill_share == pytest.approx(400 * (10**9 + 10**6) / 1e12)


def test_a_bundle_is_measured():
    stages = Quiet()
    found = bench(Bundle.open(exported()[0]), BenchOptions(lengths=(40, 8), repeats=2, threads=1), stages)
    assert [entry.length for entry in found.lengths] == [8, 40]
    assert (found.threads, found.batch, found.repeats) == (1, 1, 2)
    for entry in found.lengths:
        for rate in (entry.prefill_tokens_per_second, entry.decode_tokens_per_second):
            assert 0 < rate.least <= rate.median <= rate.most < 1e7
        assert entry.decode_share > 0
        assert entry.prefill_share is not None
    assert found.lengths[1].decode_bytes > found.lengths[0].decode_bytes
    assert 0 < found.load_seconds.least <= found.load_seconds.median < found.first_token_seconds.most < 60
    assert found.limits_moved == 0
    assert dict(stages.stages)["prefill and decode"] == 4
    if Path("/proc/self/status").exists():
        assert 2e7 < found.first_token_peak_bytes < 2e9
        assert 2e7 < found.peak_bytes < 2e9


def test_rows_of_a_batch_are_counted_together():
    found = bench(Bundle.open(exported()[0]), BenchOptions(lengths=(8,), repeats=1, batch=3), Quiet())
    assert found.batch == 3
    [entry] = found.lengths
    single = bench(Bundle.open(exported()[0]), BenchOptions(lengths=(8,), repeats=1), Quiet()).lengths[0]
    assert entry.decode_bytes - single.decode_bytes == 2 * state_bytes(
        Bundle.open(exported()[0]).manifest, 8 + STEPS // 2
    )


def test_the_first_token_counts_from_the_start_of_the_process(monkeypatch):
    """A worker that sleeps before it does anything is that much later."""
    slow = [sys.executable, "-c", "import time; time.sleep(0.4); print('{\"first\": true}')"]
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: real(slow, **rest))
    assert module._start({"threads": 1})["first"] > 0.4


def test_lengths_are_as_the_context_allows():
    manifest = Bundle.open(exported()[0]).manifest  # a context of 128
    assert module._lengths(manifest, None) == [32]
    longer = dataclasses.replace(manifest, max_context=2048)
    assert module._lengths(longer, None) == [32, 512, 1024]
    assert module._lengths(manifest, (5, 3, 5)) == [3, 5]
    assert module._lengths(manifest, (128 - STEPS,)) == [128 - STEPS]


# --- the machine -----------------------------------------------------------------------------------------


def test_limits_are_measured():
    bandwidth = machine.read_bandwidth(1, 64 << 20)
    assert 1e8 < bandwidth < 1e13
    assert 1e8 < machine.product_peak(256) < 1e15


def test_bandwidth_counts_the_bytes_that_are_read(monkeypatch):
    monkeypatch.setattr(machine, "_shortest", lambda work: (work(), 0.5)[1])
    assert machine.read_bandwidth(3, 12 << 20) == (12 << 20) / 0.5
    assert machine.product_peak(64) == 2 * 64**3 / 0.5


def test_the_worker_measures_with_the_threads_of_its_environment():
    code = (
        "import sys, os, json; from tfmx.runtime import machine, bench_worker\n"
        "machine.measure_limits = lambda threads: machine.Limits(read_bytes_per_second=threads, "
        "flops_per_second=float(os.environ['OPENBLAS_NUM_THREADS']))\n"
        "bench_worker.main('machine', json.loads(sys.argv[1]))"
    )
    real = subprocess.Popen

    def popen(command, **rest):
        return real([sys.executable, "-c", code, command[-1]], **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        [(found, _)] = REAL_LINES("machine", {"threads": 3})
    assert found == {"read_bytes_per_second": 3, "flops_per_second": 3.0}


def test_physical_cores_are_no_more_than_processors():
    assert 1 <= machine.physical_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_is_that_of_the_process_itself():
    code = "from tfmx.runtime.machine import peak_memory; a = bytearray(150 << 20); print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 150 << 20 < int(done.stdout) < 400 << 20


# --- the command -----------------------------------------------------------------------------------------


def test_it_prints_a_table():
    done = tfmx("bench", exported()[0], "--repeats", "1", "--lengths", "8,16", "--threads", "1")
    assert (done.code, done.err) == (0, "")
    title, header, *rows = done.out.splitlines()
    assert title.endswith("ort, fp32, 1 thread, batch 1, 1 repeat")
    assert header.split() == [
        "context",
        "prefill,",
        "tokens/s",
        "of",
        "limit",
        "decode,",
        "tokens/s",
        "of",
        "limit",
    ]
    assert [row.split()[0] for row in rows[:2]] == ["8", "16"]
    assert [row.strip().split("  ")[0] for row in rows[2:]] == [
        "process start to first token",
        "of that, loading",
        "peak memory",
        "memory reads, at best",
        "float32 matrix products, at best",
    ]
    assert "20.0 GB/s" in done.out
    assert "100 GFLOP/s" in done.out


def test_it_prints_json_and_draws(tmp_path):
    place = tmp_path / "out.png"
    done = tfmx("bench", exported()[0], "--repeats", "1", "--json", "--plot", place, "--batch", "2")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["target"], found["dtype"], found["quant"], found["batch"]) == ("ort", "fp32", None, 2)
    assert found["cache"] == "float32"
    [entry] = found["lengths"]
    assert entry["length"] == 32
    assert entry["decode_tokens_per_second"].keys() == {"median", "least", "most"}
    assert found["limits"] == {"read_bytes_per_second": 2e10, "flops_per_second": 1e11}
    assert place.read_bytes().startswith(b"\x89PNG")


def test_a_cache_of_int8_is_said():
    state = [SimpleNamespace(dtype="int8", growth="capacity")]
    quant = SimpleNamespace(weights="int4")
    manifest = SimpleNamespace(target="ort", dtype="fp32", quant=quant, state=state, has_int8_cache=True)
    bundle = SimpleNamespace(path="b", manifest=manifest)
    title = _title(bundle, SimpleNamespace(threads=2, batch=1, repeats=5))
    assert title == "b: ort, int4 in fp32, cache int8, 2 threads, batch 1, 5 repeats"
    assert _as_json(bundle, Spread(1.0, 1.0, 1.0))["cache"] == "int8"


def test_the_picture_shows_each_bar_before_its_limit():
    rate = Spread(100.0, 90.0, 110.0)
    entry = module.AtLength(
        length=32,
        prefill_tokens_per_second=rate,
        decode_tokens_per_second=rate,
        prefill_share=None,
        decode_share=0.5,
        decode_bytes=1,
    )
    image = np.asarray(Image.open(io.BytesIO(draw_bench("a título", [("x", "y")], [entry]))).convert("RGB"))
    tall = {}
    for name, colour in {"prefill": "3b6fb6", "decode": "c8692c", "limit": "e4e6eb"}.items():
        rows, _ = (image == tuple(bytes.fromhex(colour))).all(-1).nonzero()
        tall[name] = rows.max() - rows.min() + 1
    assert tall["limit"] == pytest.approx(2 * tall["decode"], abs=4)
    assert tall["prefill"] == pytest.approx(
        300 * 100 / 110, abs=4
    )  # without a limit, the most is the highest


def test_a_machine_that_is_not_quiet_is_told(monkeypatch):
    speeds = iter([3e10, 2e10])
    monkeypatch.setattr(
        module,
        "_lines",
        lambda name, job: (
            iter([({"read_bytes_per_second": next(speeds), "flops_per_second": 1e11}, 0.1)])
            if name == "machine"
            else REAL_LINES(name, job)
        ),
    )
    done = tfmx("bench", exported()[0], "--repeats", "1")
    assert done.code == 0
    assert done.err == "the machine was not quiet: its bandwidth changed by 33% meanwhile; measure again\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--lengths", "32,4096"], ["--lengths has 4096; wanted 1 to 96", "the context holds 128 tokens"]),
        (["--lengths", "0"], ["--lengths has 0; wanted 1 to 96"]),
        (["--lengths", "many"], ["--lengths is 'many'; wanted numbers such as 32,512"]),
        (["--batch", "0"], ["--batch is 0, wanted 1 to 1024"]),
        (["--threads", "-1"], ["--threads is -1"]),
        (["--repeats", "5000"], ["--repeats is 5000"]),
        (["--plot", "out.jpg"], ["--plot is 'out.jpg'; wanted a name that ends in .png"]),
        (["--plot", "no/where/out.png"], ["--plot no/where/out.png: there is no folder"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, parts):
    tfmx("bench", exported()[0], *arguments).fails(2, *parts)


def test_what_is_no_bundle_is_refused(tmp_path):
    tfmx("bench", tmp_path / "none").fails(2, "does not exist")


@pytest.mark.parametrize("name", ["encoder", "encoder-decoder"])
def test_a_bundle_of_another_kind_is_told_what_it_is(name, tmp_path):
    export(f"preset:{name}", tmp_path / "bundle", ExportOptions(verify=False))
    done = tfmx("bench", tmp_path / "bundle")
    done.fails(2, f"this bundle is of kind {name}, takes tokens", "bench measures decoders", "`tfmx run`")


def test_without_pillow_a_plot_is_refused_before_anything_is_measured():
    begin = time.perf_counter()
    done = program_without("PIL", "bench", exported()[0], "--plot", "out.png")
    done.fails(1, "PIL", "pip install '.[images]'")
    assert time.perf_counter() - begin < 20


def test_a_worker_that_fails_is_one_line(monkeypatch):
    real = subprocess.Popen
    broken = [sys.executable, "-c", "import sys; sys.exit('ImportError: no such thing')"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: real(broken, **rest))
    with pytest.raises(BenchError, match=r"failed \(start\): ImportError: no such thing"):
        module._start({"threads": 1})


def test_an_error_of_the_bundle_in_the_worker_is_told_as_it_is(tmp_path):
    with pytest.raises(BenchError, match="does not exist"):
        module._start({"threads": 1, "bundle": str(tmp_path / "gone"), "length": 3, "batch": 1})


def test_what_does_not_fit_the_machine_is_refused_before_it_is_measured(monkeypatch):
    monkeypatch.setattr(module, "total_memory", lambda: 2**20)
    monkeypatch.setattr(module, "_lines", None)  # nothing is started
    options = BenchOptions(lengths=(16,), batch=1024)
    with pytest.raises(
        InputError, match=r"--batch 1024 at 16 tokens needs .* GB .*; lower --batch or --lengths"
    ):
        bench(Bundle.open(exported()[0]), options, Quiet())


def test_a_context_that_is_too_short_is_refused():
    manifest = Bundle.open(exported()[0]).manifest
    with pytest.raises(InputError, match=r"--lengths has 97; wanted 1 to 96: .* 32 are decoded behind them"):
        module._lengths(manifest, (97,))
    inputs = dataclasses.replace(manifest.inputs, length=STEPS)
    with pytest.raises(InputError, match="too short to measure; wanted at least 33"):
        module._lengths(dataclasses.replace(manifest, max_context=STEPS, inputs=inputs), None)
