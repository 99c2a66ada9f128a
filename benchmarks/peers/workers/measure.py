"""What every worker measures, in the order it does: one process, one engine, one JSON line on stdout.

A worker is a small file that gives an engine this face and calls `main(open_engine)`:

    python WORKER.py MODEL --threads 2 --started SECONDS [--lengths 32,512,1024] [--steps 64]

The line has, in seconds, tokens a second and MB: load, first_token, start_memory, prefill_N, decode_N (the median step
after N tokens), peak_memory. A worker is run by the peer's own Python, so this file needs the standard library only. `--started` is CLOCK_MONOTONIC just
before the process was made: that clock is the machine's, so the time to the first token counts the interpreter's start,
the imports and the load.
"""

from __future__ import annotations

import abc
import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

SETTLE = 64  # steps of a first run that does not count: tfmx moves quantised weights to huge pages meanwhile
WARM = 32  # steps before what is measured, at each length
FIRST = 32  # tokens of the prompt whose answer's first token ends the start


class Engine(Protocol):
    """Batch 1, greedy. A run is: forget what came before, take the prompt whole, then one token at a time."""

    def run(self, prompt: Sequence[int], steps: int) -> list[float]:
        """Seconds of the prefill, until the first token is known, then of each of `steps` decode steps."""


class Stepwise(abc.ABC):
    """The face above for engines that are called once a token."""

    @abc.abstractmethod
    def start(self, prompt: Sequence[int]) -> int:
        """Forget, prefill; the first token."""

    @abc.abstractmethod
    def step(self, token: int) -> int:
        """The token after this one."""

    def run(self, prompt: Sequence[int], steps: int) -> list[float]:
        times = [time.perf_counter()]
        token = self.start(prompt)
        times.append(time.perf_counter())
        for _ in range(steps):
            token = self.step(token)
            times.append(time.perf_counter())
        return differences(times)


def differences(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def prompt_of(length: int, variation: int) -> list[int]:
    """Token ids that every vocabulary here has, none of them special.

    Each run of a process has its own: OpenVINO keeps the caches of prompts that it has seen.
    """
    return [((i + 1) * 7919 + variation * 104729) % 49000 + 100 for i in range(length)]


def peak_memory() -> float:
    """VmHWM in MB: the most that was ever resident, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmHWM; this needs Linux")


def main(open_engine: Callable[[str, int, int], Engine]) -> None:
    """`open_engine(model, threads, capacity)`: capacity is the most tokens that a run has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--started", type=float, required=True)
    parser.add_argument("--lengths", default="32,512,1024")
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    most = max(max(lengths) + max(options.steps, WARM), FIRST + SETTLE) + 1
    engine = open_engine(options.model, options.threads, most)
    result = {"load": time.monotonic() - options.started}
    engine.run(prompt_of(FIRST, 0), 0)
    result["first_token"] = time.monotonic() - options.started
    result["start_memory"] = peak_memory()
    engine.run(prompt_of(FIRST, 1), SETTLE)
    for length in lengths:
        engine.run(prompt_of(length, 2 * length), WARM)  # buffers are made
        first, *rest = engine.run(prompt_of(length, 2 * length + 1), options.steps)
        result[f"prefill_{length}"] = length / first
        result[f"decode_{length}"] = 1 / statistics.median(rest)
    result["peak_memory"] = peak_memory()
    print(json.dumps(result))
