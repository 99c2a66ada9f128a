"""What the machine can do at best: reading memory, and float32 matrix products; the limits of decode and prefill.

Both are the best of several short tries, with as many threads as a run has: noise only ever takes away. OpenBLAS
(numpy's) reads its thread count when it is loaded, so `python -m tfmx.runtime.bench_worker machine` measures, in a
process whose environment says it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_BUFFER = 256 << 20  # bytes: several times the last cache of any CPU that this is likely to meet
_SIDE = 1536  # of the square matrices: 9 MB each, 7 GFLOP a product
_TRIES = 16  # a second in all: other work comes and goes
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    read_bytes_per_second: float  # of memory
    flops_per_second: float  # in float32 matrix products


def measure_limits(threads: int) -> Limits:
    return Limits(read_bytes_per_second=read_bandwidth(threads), flops_per_second=product_peak())


def read_bandwidth(threads: int, size: int = _BUFFER) -> float:
    """Bytes a second when each thread reads its own part of a buffer."""
    parts = np.array_split(
        np.ones(size // 4, np.int32), threads
    )  # a maximum of integers is vectorised everywhere
    with ThreadPoolExecutor(threads) as pool:  # numpy lets go of the interpreter lock meanwhile
        return size / _shortest(lambda: list(pool.map(np.max, parts)))


def product_peak(side: int = _SIDE) -> float:
    """Floating-point operations a second of numpy's BLAS, with the threads that its environment gives it."""
    a = np.full((side, side), 0.5, np.float32)
    out = np.empty_like(a)
    return 2 * side**3 / _shortest(lambda: np.matmul(a, a, out=out))


def _shortest(work: Callable[[], object]) -> float:
    """Seconds, of the fastest of some tries; the first is for the threads to start."""
    found = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def total_memory() -> int | None:
    """Bytes; None: the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def physical_cores() -> int:
    """Of those that this process may use; what onnxruntime takes by default."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    try:
        names = ("physical_package_id", "core_id")
        cores = {tuple(Path(_TOPOLOGY.format(cpu, name)).read_text() for name in names) for cpu in usable}
    except OSError:  # not Linux, or a container that hides it
        cores = set()
    return len(cores) or len(usable) or os.cpu_count() or 1


def peak_memory() -> int | None:
    """Bytes that this process has had in memory at most; None where the system does not say.

    Not `ru_maxrss`: on Linux a program inherits that from whoever started it.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) * 1024 if found else None
