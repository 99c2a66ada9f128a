"""Runs mutants on as many fork servers as there are cores, and collects what became of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fuzz.heap import TUNABLES
from fuzz.outcomes import Outcome

SERVER = Path(__file__).with_name("fork_server.py")
_ALONE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def run_campaign(
    kind: str,
    seed: int,
    indexes: Sequence[int],
    *,
    report: Callable[[Outcome], None] = lambda _: None,
    workers: int | None = None,
    server: Sequence[str] = (str(SERVER),),
) -> list[Outcome]:
    """The outcomes in the order of their numbers; `report` hears of each as it comes. `server`: the program, and its first arguments."""
    numbers, lock = iter(indexes), threading.Lock()
    outcomes: list[Outcome] = []
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            for outcome in _serve([*server, kind, str(seed), str(place)], _shared(numbers, lock)):
                with lock:
                    outcomes.append(outcome)
                    report(outcome)
        except BaseException as error:  # noqa: BLE001 (told to whoever waits)
            failures.append(error)

    count = min(workers or len(os.sched_getaffinity(0)), max(len(indexes), 1))
    with tempfile.TemporaryDirectory(prefix="tfmx-fuzz-") as folder:
        place = Path(folder)
        threads = [threading.Thread(target=serve, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return sorted(outcomes, key=lambda outcome: outcome.index)


def _shared(numbers: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    while True:
        with lock:
            number = next(numbers, None)
        if number is None:
            return
        yield number


def _serve(arguments: Sequence[str], numbers: Iterator[int]) -> Iterator[Outcome]:
    command = [sys.executable, *arguments]
    environment = os.environ | _ALONE | {"GLIBC_TUNABLES": TUNABLES, "TOKENIZERS_PARALLELISM": "false"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        if not server.stdout.readline():
            raise RuntimeError("the fork server did not start; see its error above")
        for number in numbers:
            server.stdin.write(f"{number}\n")
            server.stdin.flush()
            line = server.stdout.readline()
            if not line:
                raise RuntimeError(f"the fork server ended at mutant {number}: {arguments}")
            yield Outcome(**json.loads(line))
        server.stdin.close()
