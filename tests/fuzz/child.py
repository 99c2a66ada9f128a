"""What happens in the child: limits are set, a mutant is made, and tfmx gets its command lines, in this process.

Each step is written to a file as it comes, so that the parent knows what a killed child was doing. The command lines go
through `run_guarded`, as those of the program do; standard output and error are files, native code writes there too.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from unittest import mock

import numpy as np
from fuzz.heap import FILLS, fill_memory, sessions
from fuzz.outcomes import DIFFERS, RAN, judge

from tfmx.cli.boundary import run_guarded
from tfmx.cli.entry import group
from tfmx.runtime import golden

MEMORY = 3 << 30  # bytes of address space beyond what the parent has
CPU_SECONDS = 20
FILE_SIZE = 1 << 30  # bytes that may be written to one file


Given = tuple[str, str, list[bytes]]  # class, standard output, arrays that were compared


class Steps:
    """The file that the parent reads afterwards, a JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, **entry: object) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def limit_child() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error then, as on a full disk


class Streams:
    """Standard output and error as files, for Python and for native code."""

    def __init__(self, folder: Path) -> None:
        self._paths = {number: folder / f"stream{number}" for number in (1, 2)}
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        for number, path in self._paths.items():
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = self._open(1), self._open(2)

    @staticmethod
    def _open(number: int) -> TextIO:
        return io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8", write_through=True)

    def take(self) -> tuple[str, str]:
        """What was written since the last time."""
        sys.stdout.flush()
        sys.stderr.flush()
        found = tuple(path.read_bytes().decode("utf-8", "replace") for path in self._paths.values())
        for path in self._paths.values():
            os.truncate(path, 0)
        return found  # type: ignore[return-value]


def run_commands(commands: Sequence[tuple[str, ...]], place: Path, steps: Steps) -> None:
    """The last that ran graphs runs again in memory filled with something else, and must give the same."""
    streams, ran = Streams(place), None
    for command in commands:
        steps.write(command=command[0])
        found, given = _run(command, streams, again=False)
        steps.write(found=found)
        if found[0] == RAN and command[0] in {"run", "verify"}:
            ran = command, given
    if ran is not None:
        command, given = ran
        steps.write(command=f"{command[0]} again")
        found, given_again = _run(command, streams, again=True)
        if given != given_again:
            steps.write(found=(DIFFERS, f"{command[0]}: {_difference(given, given_again)}"))
        steps.write(found=found)


def _run(command: tuple[str, ...], streams: Streams, *, again: bool) -> tuple[tuple[str, str], Given]:
    """The class of a command line, its line, and what it gave."""
    fill_memory(FILLS[again])
    with recorded() as arrays, sessions(arena=not again):
        code = run_guarded(group, list(command))
    out, err = streams.take()
    found = judge(command[0], code, out, err)
    return found, (found[0], _without_times(out), arrays)


@contextmanager
def recorded() -> Iterator[list[bytes]]:
    """The outputs that `tfmx verify` compares, to the bit; of NaN there are many, and they count as one."""
    arrays: list[bytes] = []
    compare = golden._difference

    def keep(found: np.ndarray, expected: np.ndarray) -> float:
        arrays.append(np.where(np.isnan(found), np.float32("nan"), found).tobytes())
        return compare(found, expected)

    with mock.patch.object(golden, "_difference", keep):
        yield arrays


def _without_times(out: str) -> str:
    if not out.startswith("{"):
        return out
    content = json.loads(out)
    for chance in ("timings", "seed"):  # the seed is drawn anew, also where no token is
        content.pop(chance, None)
    return json.dumps(content)


def _difference(one: Given, other: Given) -> str:
    for part, again in zip(one, other, strict=True):
        if part == again:
            continue
        if isinstance(part, str):
            place = next((i for i, (a, b) in enumerate(zip(part, again, strict=False)) if a != b), 0)
            return f"{part[max(place - 20, 0) : place + 40]!r} and then {again[max(place - 20, 0) : place + 40]!r}"
        pairs = zip(part, again, strict=False)
        arrays = next(
            ((np.frombuffer(a, np.float32), np.frombuffer(b, np.float32)) for a, b in pairs if a != b), None
        )
        if arrays is not None and arrays[0].shape == arrays[1].shape:
            place = int((arrays[0] != arrays[1]).argmax())
            return f"number {place} of the output is {arrays[0][place]} and then {arrays[1][place]}"
    return "other outputs"
