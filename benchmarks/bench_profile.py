"""Where the time of a step goes, operator by operator: onnxruntime's own profiler, on a bundle. Then what Python adds.

    python benchmarks/bench_profile.py [BUNDLE] [--lengths 32,512,1024] [--steps 64]

Batch 1. Milliseconds and shares are of what the nodes take: of the median decode step after so many tokens, and of the
whole prefill. Python's share is of the steps that `generate` gives, all that is outside of the session's run: the choice of
the token and its text too. Without BUNDLE, SmolLM2-135M as int4 is exported into .cache/bench.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import smollm2

import tfmx
from tfmx.runtime import session
from tfmx.runtime.engine import open_engine
from tfmx.runtime.sampling import SamplingOptions

WARM = 32  # steps before those that count
CHOICES = {
    "greedy": SamplingOptions(),
    "temperature": SamplingOptions(temperature=0.8),
    "top-k 40": SamplingOptions(temperature=0.8, top_k=40),
    "top-p 0.9": SamplingOptions(temperature=0.8, top_p=0.9),
    "top-p 0.9, repetition penalty": SamplingOptions(temperature=0.8, top_p=0.9, repetition_penalty=1.1),
}

Times = Counter[str]  # milliseconds by operator


def profile(bundle: Path, length: int, steps: int) -> tuple[Times, Times]:
    """Of a prefill, and of the median step after it."""
    plain = session._session_options  # noqa: SLF001 (the one place where a session's options are made)
    with tempfile.TemporaryDirectory() as folder:

        def profiled(*arguments: Any) -> Any:
            options = plain(*arguments)
            options.enable_profiling = True
            options.profile_file_prefix = f"{folder}/profile"
            return options

        with mock.patch.object(session, "_session_options", profiled):
            graphs = tfmx.load(bundle)._open_graphs()  # noqa: SLF001 (what `generate` runs on)
        engine = open_engine(graphs, 1, length + WARM + steps)
        engine.prefill([[(i * 7919) % (graphs.manifest.vocab_size or 1) for i in range(length)]])
        for _ in range(WARM + steps):
            engine.decode([5])
        runs = read_runs(Path(graphs.prefill._session.end_profiling()))  # noqa: SLF001
    prefill, decode = runs[: -WARM - steps], runs[-steps:]
    names = {name for run in decode for name in run}
    return sum(prefill, Times()), Times(
        {name: statistics.median(run[name] for run in decode) for name in names}
    )


def read_runs(file: Path) -> list[Times]:
    """What each run of a session spent in its nodes, from the events that onnxruntime wrote."""
    events = json.loads(file.read_text())
    starts = sorted(event["ts"] for event in events if event["name"] == "SequentialExecutor::Execute")
    runs = [Times() for _ in starts]
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            runs[bisect(starts, event["ts"]) - 1][event["args"]["op_name"]] += event["dur"] / 1e3
    return runs


def python_share(bundle: Path, options: SamplingOptions, steps: int) -> tuple[float, float]:
    """Seconds of the median step, and those of it that are Python's."""
    inside: list[float] = []

    def timed(plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            begin = time.perf_counter()
            found = plain(*arguments, **more)
            inside.append(time.perf_counter() - begin)
            return found

        return run

    ways = {name: timed(getattr(session.Session, name)) for name in ("run_briefly", "run_values")}
    with mock.patch.multiple(session.Session, **ways):
        answer = tfmx.load(bundle).generate(
            [5] * 32, dataclasses.replace(options, ignore_eos=True), max_new_tokens=1 + WARM + steps
        )
        times = [time.perf_counter() for _ in answer]
    whole = [after - before for before, after in pairwise(times)]
    outside = [step - run for step, run in zip(whole, inside[-len(whole) :], strict=True)]
    return statistics.median(whole[WARM:]), statistics.median(outside[WARM:])


def as_row(label: str, times: Times) -> str:
    total = sum(times.values())
    shares = ", ".join(f"{name} {time / total:.0%}" for name, time in times.most_common(6))
    return f"| {label} | {total:.2f} | {shares} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--lengths", default="32,512,1024")
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    bundle = options.bundle or smollm2.bundle("int4", "--quant", "int4", "--quant-uniform", "--requantise")
    print("| run | ms in nodes | shares |\n|---|---|---|")
    for length in map(int, options.lengths.split(",")):
        prefill, step = profile(bundle, length, options.steps)
        print(as_row(f"prefill of {length}", prefill))
        print(as_row(f"a step at {length}", step), flush=True)
    print("\n| token chosen by | a step, ms | of it Python, ms | share |\n|---|---|---|---|")
    for name, choice in CHOICES.items():
        whole, python = python_share(bundle, choice, 256)
        print(f"| {name} | {1e3 * whole:.2f} | {1e3 * python:.2f} | {python / whole:.1%} |", flush=True)


if __name__ == "__main__":
    main()
