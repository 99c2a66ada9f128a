"""This process's memory as Linux maps it, and advice to the system about it. Elsewhere there is nothing to see."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DONTNEED = 4  # drop what is there; of a file it is read again when it is needed
COLLAPSE = 25  # move to huge pages, now

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)$")
_RESIDENT = re.compile(r"Rss: +(\d+) kB")


@dataclass(slots=True)
class Mapping:
    start: int
    end: int
    mode: str  # such as rw-p
    path: str  # empty: memory of its own
    resident: int = 0  # bytes

    @property
    def size(self) -> int:
        return self.end - self.start


def mappings() -> Iterator[Mapping]:
    """All of them, by address, without what is resident. OSError where there is no such list."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if head := _HEAD.match(line):
                yield _mapping(head)


def measured_mappings() -> Iterator[Mapping]:
    """The same, with what is resident: the system counts every page, some 30 ms for 200 MB."""
    mapping: Mapping | None = None
    with Path("/proc/self/smaps").open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if head := _HEAD.match(line):
                mapping = _mapping(head)
            elif mapping is not None and (resident := _RESIDENT.match(line)):
                mapping.resident = int(resident[1]) * 1024
                yield mapping


def advise(start: int, end: int, advice: int) -> bool:
    """Whether the system took it."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return end > start and bool(madvise(start, end - start, advice) == 0)


def _mapping(head: re.Match[str]) -> Mapping:
    return Mapping(int(head[1], 16), int(head[2], 16), head[3], head[4])
