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
_SIZE = re.compile(r"(Rss|Anonymous): +(\d+) kB")


@dataclass(slots=True)
class Mapping:
    start: int
    end: int
    mode: str  # such as rw-p
    path: str  # empty: memory of its own
    resident: int = 0  # bytes
    anonymous: int = 0  # of these, written by this process

    def advise(self, advice: int, *, start: int | None = None, end: int | None = None) -> bool:
        """Whether the system took it."""
        start, end = self.start if start is None else start, self.end if end is None else end
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return end > start and bool(madvise(start, end - start, advice) == 0)


def mappings() -> Iterator[Mapping]:
    """All of them, by address. OSError where there is no such list."""
    mapping: Mapping | None = None
    with Path("/proc/self/smaps").open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if head := _HEAD.match(line):
                if mapping is not None:
                    yield mapping
                mapping = Mapping(int(head[1], 16), int(head[2], 16), head[3], head[4])
            elif mapping is not None and (size := _SIZE.match(line)):
                count = int(size[2]) * 1024
                if size[1] == "Rss":
                    mapping.resident = count
                else:
                    mapping.anonymous = count
    if mapping is not None:
        yield mapping
