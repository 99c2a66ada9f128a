"""Measures tfmx beside the engines that one would use instead: one command, everything interleaved.

    python benchmarks/peers/run.py [--only NAME,...] [--shapes S,M,smollm2] [--rounds 5] [--json]

Each engine is installed into an environment of its own and given the same model, in its own format, at each precision
that it has; both are kept in ~/.cache/tfmx/peers. Then, round by round, every candidate is measured in a fresh process,
on token ids, batch 1, greedy, with as many threads as there are cores. A measurement is done again if the machine's
memory bandwidth moved by more than 20 % across it, or if others took more than 5 % of the cores.

Writes results.json, results.md and results.png into results/ beside this file, a folder for each kind of machine, or
into --out; shapes that were not measured this time stay as they are there. With --only nothing is written without --out.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chart import draw
from environments import Environments, PeerError
from machine import Canary, description, folder_name, physical_cores, watched
from models import CANDIDATES, SHAPES, Candidate, made, made_source, size_of
from report import MOVED, OTHERS, Run, as_markdown, summary

HERE = Path(__file__).parent
LIMIT = 900  # seconds a measurement may take


class WorkerError(RuntimeError):
    """A measurement gave no result."""


class Bench:
    def __init__(self, environments: Environments, threads: int, tries: int, lock: Path | None) -> None:
        self.environments = environments
        self.threads = threads
        self._tries = tries
        self._lock = lock
        self._canary = Canary(threads)

    def measure(self, candidate: Candidate, model: Path) -> Run:
        """One clean measurement, or after several tries the least disturbed one."""
        tries: list[Run] = []
        for _ in range(self._tries):
            with _held(self._lock):
                tries.append(self._try(candidate, model))
            if tries[-1]["moved"] <= MOVED and tries[-1]["others"] <= OTHERS:
                break
        best = min(tries, key=lambda run: max(run["moved"] / MOVED, run["others"] / OTHERS))
        return {**best, "discarded": len(tries) - 1}

    def _try(self, candidate: Candidate, model: Path) -> Run:
        _read_through(model)
        before = self._canary.bandwidth()
        with watched() as disturbance:
            result = self._worker(candidate, model)
        after = self._canary.bandwidth()
        moved = abs(after - before) / max(before, after)
        return {**result, "bandwidth": max(before, after), "moved": moved, "others": disturbance.others}

    def _worker(self, candidate: Candidate, model: Path) -> Run:
        python = str(self.environments.python(candidate.environment))
        command = [python, str(candidate.worker), str(model), "--threads", str(self.threads)]
        started = time.monotonic()
        done = subprocess.run(
            [*command, "--started", str(started)], check=False, capture_output=True, text=True, timeout=LIMIT
        )
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            raise WorkerError(f"{candidate.label}: {(done.stderr or 'nothing was printed').strip()[-2000:]}")
        result: Run = json.loads(lines[-1])
        return result


def _read_through(model: Path) -> None:
    """Everything is in the page cache when a process starts: what is measured is a warm start, for all."""
    for file in [model] if model.is_file() else sorted(model.rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                while stream.read(2**24):
                    pass


@contextlib.contextmanager
def _held(lock: Path | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare(candidates: list[Candidate], shape: str, environments: Environments) -> dict[str, Path]:
    """Each candidate's files; one that cannot be made is said and left out."""
    folder = made_source(environments, shape)
    models = {}
    for candidate in candidates:
        try:
            environments.python(candidate.environment)
            models[candidate.name] = made(candidate, environments, folder)
        except PeerError as error:
            print(f"{candidate.label} is left out on {shape}: {error}", file=sys.stderr)
    return models


def measure_shape(bench: Bench, shape: str, models: dict[str, Path], rounds: int) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {name: [] for name in models}
    failed: dict[str, str] = {}
    for turn in range(rounds):
        names = [name for name in models if name not in failed]
        shift = turn * len(names) // rounds
        for name in names[shift:] + names[:shift]:  # nobody is always first, or always after the same one
            try:
                run = bench.measure(CANDIDATES[name], models[name])
            except (WorkerError, subprocess.TimeoutExpired) as error:
                failed[name] = str(error)
                print(f"failed: {error}", file=sys.stderr)
                continue
            runs[name].append(run)
            steps = " / ".join(f"{value:.1f}" for key, value in run.items() if key.startswith("decode"))
            again = f", {run['discarded']:.0f} discarded" if run["discarded"] else ""
            print(
                f"{shape}, round {turn + 1} of {rounds}: {name}: decode {steps} tokens/s{again}",
                file=sys.stderr,
            )
    sizes = {name: size_of(path) for name, path in models.items()}
    parameters = size_of(bench.environments.cache / "models" / shape / "hf" / "model.safetensors") / 4
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": description(amx=bench.environments.amx),
        "threads": bench.threads,
        "rounds": rounds,
        "parameters": parameters,  # millions
        "failed": failed,
        "candidates": {
            name: summary(CANDIDATES[name], found, sizes[name]) for name, found in runs.items() if found
        },
    }


def chosen(names: str | None) -> list[Candidate]:
    """`llama-q4_0,tfmx` takes one candidate, and all whose names begin with tfmx."""
    if names is None:
        return list(CANDIDATES.values())
    found = []
    for name in names.split(","):
        some = [name] if name in CANDIDATES else [each for each in CANDIDATES if each.startswith(name)]
        if not some:
            sys.exit(f"there is no candidate {name!r}; there are {', '.join(CANDIDATES)}")
        found += some
    return [CANDIDATES[name] for name in dict.fromkeys(found)]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", help="names of candidates, or how they begin: tfmx,llama-q4_0")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print results.json instead of the tables")
    parser.add_argument("--out", type=Path, help="folder for results.json, results.md and results.png")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "tfmx" / "peers")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--tries", type=int, default=5, help="at a measurement that others disturb")
    parser.add_argument("--lock", type=Path, help="a file to lock during each measurement")
    parser.add_argument(
        "--no-amx",
        dest="amx",
        action="store_false",
        help="for virtual machines that announce it and then trap",
    )
    parser.add_argument("--prepare", action="store_true", help="install and convert, measure nothing")
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"there is no shape {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    if min(options.rounds, options.tries, options.threads) < 1:
        parser.error("--rounds, --tries and --threads must be at least 1")
    return options


def main() -> None:
    options = parsed()
    environments = Environments(options.cache, amx=options.amx)
    if not options.amx:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # OpenVINO and PyTorch: all but AMX
    candidates = chosen(options.only)
    prepared = {shape: prepare(candidates, shape, environments) for shape in options.shapes}
    if options.prepare:
        return
    out = options.out or (
        None if options.only else HERE / "results" / folder_name(description(amx=options.amx))
    )
    results: dict[str, Any] = {"shapes": {}, "versions": {}}
    if out is not None and (out / "results.json").exists():
        results = json.loads((out / "results.json").read_text())
    used = sorted({CANDIDATES[name].environment for models in prepared.values() for name in models})
    results["versions"].update({name: environments.versions(name) for name in used})
    bench = Bench(environments, options.threads, options.tries, options.lock)
    for shape, models in prepared.items():
        results["shapes"][shape] = measure_shape(bench, shape, models, options.rounds)
        if out is not None:  # after each: a run that is cut short leaves what it has
            _write(out, results)
    print(json.dumps(results, indent=1) if options.json else as_markdown(results))


def _write(out: Path, results: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.md").write_text(as_markdown(results), encoding="utf-8")
    draw(results, out / "results.png")


if __name__ == "__main__":
    main()
