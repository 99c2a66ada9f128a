"""`tfmx bench`: speed, start and memory of a bundle, and their share of what the machine could do.

Everything runs in processes of its own (`bench_worker.py`), so that a start is a start and a peak is its own. Each
figure is the median of some repeats, with the least and the most; rounds go through all lengths before they repeat,
so that a machine that slows down does so for all. The limits are measured before and after.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .. import InputError, TfmxError
from .bundle import Bundle
from .graph_costs import Costs, graph_costs
from .machine import THREAD_VARIABLES, Limits, physical_cores, total_memory
from .manifest import ITEM_SIZES, Manifest

LENGTHS = (32, 512, 1024)
STEPS = 32  # tokens decoded after each prefill
REPEATS = 5
_MOST = 1024  # threads, rows or repeats: a slip must not ask for billions


class BenchError(TfmxError):
    """A measurement that failed."""


class BenchInputError(InputError):
    """What was asked for cannot be measured."""


class Stages(Protocol):
    """What tells people how far it is."""

    def stage(self, title: str, total: int) -> None: ...

    def advance(self, amount: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure and its noise."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class AtLength:
    length: int  # tokens of context
    prefill_tokens_per_second: Spread  # all rows together
    decode_tokens_per_second: Spread
    prefill_share: (
        float | None
    )  # of what the machine's matrix products allow; None: this graph's are not known
    decode_share: float  # of what its memory allows
    decode_bytes: int  # read in a step: weights once, and each row's cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    threads: int
    batch: int
    repeats: int
    steps: int
    lengths: tuple[AtLength, ...]
    first_token_seconds: Spread  # from the start of a process, with a prompt of the shortest length
    load_seconds: Spread  # of these, for imports, checking and loading
    peak_bytes: int | None  # of the process that ran all lengths; None: the system does not say
    first_token_peak_bytes: int | None
    limits: Limits  # the best of all
    limits_moved: float  # how much lower the bandwidth was, the worse time that it was measured; 0.2: by 20 %


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    lengths: tuple[int, ...] | None = None  # None: those of LENGTHS that the context holds
    batch: int = 1
    threads: int | None = None  # None: the physical cores
    repeats: int = REPEATS

    def __post_init__(self) -> None:
        for name in ("batch", "threads", "repeats"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST:
                raise BenchInputError(f"--{name} is {value}, wanted 1 to {_MOST}")


def bench(bundle: Bundle, options: BenchOptions, stages: Stages) -> Benchmark:
    manifest = bundle.manifest
    _check_kind(manifest)
    lengths = _lengths(manifest, options.lengths)
    _check_memory(bundle, lengths[-1], options.batch)
    threads = options.threads or physical_cores()
    job = {
        "bundle": str(bundle.path),
        "threads": threads,
        "batch": options.batch,
        "repeats": options.repeats,
        "lengths": lengths,
        "length": lengths[0],
        "steps": STEPS,
    }
    stages.stage("measuring the machine", 1)
    limits = [_measure_machine(job)]
    stages.stage("starting", options.repeats + 1)
    starts = []
    for _ in range(options.repeats + 1):
        starts.append(_start(job | {"batch": 1}))
        stages.advance()
    del starts[0]  # the files may not have been in memory
    stages.stage("prefill and decode", options.repeats * len(lengths))
    runs, peak = _run(job, stages)
    stages.stage("measuring the machine again", 1)
    limits.append(_measure_machine(job))
    best = Limits(
        read_bytes_per_second=max(found.read_bytes_per_second for found in limits),
        flops_per_second=max(found.flops_per_second for found in limits),
    )
    costs = graph_costs(bundle.graph("decode"), manifest.outputs.size)
    return Benchmark(
        threads=threads,
        batch=options.batch,
        repeats=options.repeats,
        steps=STEPS,
        lengths=tuple(_at_length(runs[n], n, options.batch, manifest, costs, best) for n in lengths),
        first_token_seconds=Spread.of([start["first"] for start in starts]),
        load_seconds=Spread.of([start["loaded"] for start in starts]),
        peak_bytes=peak,
        first_token_peak_bytes=max((start["peak"] for start in starts if start["peak"]), default=None),
        limits=best,
        limits_moved=1 - min(found.read_bytes_per_second for found in limits) / best.read_bytes_per_second,
    )


# --- what is asked for -----------------------------------------------------------------------------------


def _check_kind(manifest: Manifest) -> None:
    if manifest.kind != "decoder" or not manifest.generates or manifest.inputs.kind != "tokens":
        raise BenchInputError(
            f"this bundle is of kind {manifest.kind}, takes {manifest.inputs.kind} and gives "
            f"{manifest.outputs.kind}; bench measures decoders that continue tokens (`tfmx run` applies it)"
        )


def _lengths(manifest: Manifest, wanted: tuple[int, ...] | None) -> list[int]:
    most = manifest.max_context - STEPS  # of a prefill and STEPS steps: their last token is never run
    if most < 1:
        raise BenchInputError(
            f"the bundle's context is {manifest.max_context}, too short to measure; wanted at least {STEPS + 1}"
        )
    if wanted is None:
        return [length for length in LENGTHS if length <= most] or [most]
    for length in wanted:
        if not 1 <= length <= most:
            raise BenchInputError(
                f"--lengths has {length}; wanted 1 to {most:,}: the context holds {manifest.max_context:,} tokens, "
                f"and {STEPS} are decoded behind them"
            )
    return sorted(set(wanted))


def _check_memory(bundle: Bundle, length: int, batch: int) -> None:
    """A machine that swaps measures nothing, and says so late."""
    cache = batch * state_bytes(bundle.manifest, length + STEPS)
    needed = cache + sum(info.size for info in bundle.manifest.files.values())
    there = total_memory()
    if there is not None and needed > there:
        raise BenchInputError(
            f"--batch {batch} at {length:,} tokens needs {needed / 1e9:,.0f} GB ({cache / 1e9:,.0f} GB of cache), this machine has "
            f"{there / 1e9:,.0f}; lower --batch or --lengths"
        )


# --- processes -------------------------------------------------------------------------------------------


def _measure_machine(job: dict[str, Any]) -> Limits:
    [(found, _)] = _lines("machine", job)
    return Limits(**found)


def _start(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line, seconds in _lines("start", job):
        found |= {"first": seconds} if "first" in line else line
    return found


def _run(job: dict[str, Any], stages: Stages) -> tuple[dict[int, list[dict[str, Any]]], int | None]:
    runs: dict[int, list[dict[str, Any]]] = {}
    peak = None
    for line, _ in _lines("run", job):
        if "length" in line:
            runs.setdefault(line["length"], []).append(line)
            stages.advance()
        else:
            peak = line["peak"]
    return runs, peak


def _lines(name: str, job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """What a worker says, with the seconds since just before it was started."""
    # -P: what lies in the current folder is not a library
    command = [sys.executable, "-P", "-m", f"{__package__}.bench_worker", name, json.dumps(job)]
    threads = {variable: str(job["threads"]) for variable in THREAD_VARIABLES} if name == "machine" else {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        begin = time.perf_counter()
        with subprocess.Popen(  # noqa: S603 (ourselves, no shell)
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, env={**os.environ, **threads}
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield _read_line(line), time.perf_counter() - begin
            except BaseException:  # also Ctrl-C, and who stops listening
                process.kill()
                raise
        if process.returncode:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise BenchError(f"the process that was to be measured failed ({name}): {last}")


def _read_line(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    if "error" in found:
        raise BenchError(found["error"])
    return found


# --- figures ---------------------------------------------------------------------------------------------


def _at_length(
    runs: Sequence[dict[str, Any]], length: int, batch: int, manifest: Manifest, costs: Costs, limits: Limits
) -> AtLength:
    prefill = Spread.of([batch * length / run["prefill"] for run in runs])
    decode = Spread.of([batch / statistics.median(run["steps"]) for run in runs])
    context = length + STEPS // 2  # in the middle of the steps
    step_bytes = costs.weight_bytes + batch * state_bytes(manifest, context)
    flops = costs.body + costs.head / length  # of a token: the head runs on each row's last
    return AtLength(
        length=length,
        prefill_tokens_per_second=prefill,
        decode_tokens_per_second=decode,
        prefill_share=prefill.median * flops / limits.flops_per_second if costs.body else None,
        decode_share=step_bytes / limits.read_bytes_per_second * decode.median / batch,
        decode_bytes=step_bytes,
    )


def state_bytes(manifest: Manifest, length: int) -> int:
    """What a step reads of one row's state, after so many tokens."""
    total = 0
    for state in manifest.state:
        numbers = math.prod(dim for dim in state.shape if isinstance(dim, int))
        total += numbers * ITEM_SIZES[state.dtype] * (1 if state.growth == "constant" else length)
    return total
