"""The machine that is measured on: what it is, how fast it reads memory now, and who else is using it."""

from __future__ import annotations

import os
import platform
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

READ = 192 * 2**20  # bytes a thread: far more than a cache, a few hundredths of a second
REPEATS = 5
TICK = os.sysconf("SC_CLK_TCK")


def physical_cores() -> int:
    """Hyper-threads of a core do not help what memory bounds."""
    cores = set()
    for processor in Path("/proc/cpuinfo").read_text().split("\n\n"):
        place = re.findall(r"^(physical id|core id)\s*: (\d+)", processor, re.MULTILINE)
        if place:
            cores.add(tuple(place))
    return len(cores) or os.cpu_count() or 1


def description(*, amx: bool = True) -> dict[str, str]:
    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flags = set(Path("/proc/cpuinfo").read_text().split())
    known = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", *(["amx_int8"] if amx else []))
    vectors = [flag for flag in known if flag in flags]
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "vectors": ", ".join(vectors),
        "cores": str(physical_cores()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
    }


def folder_name(machine: dict[str, str]) -> str:
    """What the results of this kind of machine lie under: its processor, and the best of its vector instructions."""
    cpu = re.sub(r"\([RTM]+\)|\b(processor|cpu|core)\b|@.*", " ", machine["cpu"], flags=re.IGNORECASE)
    best = machine["vectors"].split(", ")[-1]
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu} {best}".lower()).strip("-")


class Canary:
    """How fast so many threads read memory together, GB/s: the limit of a decode step, and a sign of disturbance."""

    def __init__(self, threads: int) -> None:
        # not zeros: those would all be one page
        self._arrays = [np.full(READ // 4, 1.0, np.float32) for _ in range(threads)]

    def bandwidth(self) -> float:
        return max(self._read_once() for _ in range(REPEATS))

    def _read_once(self) -> float:
        threads = [threading.Thread(target=array.max) for array in self._arrays]  # numpy lets go of the lock
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return READ * len(threads) / (time.perf_counter() - begin) / 1e9


@dataclass(slots=True)
class Disturbance:
    others: float = 0.0  # share of all cores that other processes, or other machines on this one, took


@contextmanager
def watched() -> Iterator[Disturbance]:
    """What others took of the cores while the body ran; children that have ended in it are ours."""
    found = Disturbance()
    begin, busy, own = time.monotonic(), _busy(), _own()
    yield found
    available = (time.monotonic() - begin) * (os.cpu_count() or 1)
    found.others = max(0.0, (_busy() - busy) - (_own() - own)) / available


def _busy() -> float:
    """Seconds that all cores were not idle since the start of the machine; time stolen by a hypervisor counts."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(field) for field in Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICK


def _own() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
