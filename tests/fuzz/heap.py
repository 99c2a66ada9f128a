"""Fills fresh memory, and runs onnxruntime so that each tensor is fresh: what nobody wrote then shows in the output.

glibc fills every block that it hands out (M_PERTURB). onnxruntime's arena would hand a tensor the remains of another, alike in
both runs; without it each tensor is a block of its own. Small blocks that glibc keeps for each thread are not filled, so the
process is started with none (`TUNABLES`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from tfmx.runtime.devices import Device

_M_PERTURB = -6
FILLS = (0x5A, 0xA5)  # glibc writes the complement: as float32 -3e-16 and 1.5e16, as float16 -0.02 and 203
TUNABLES = "glibc.malloc.tcache_count=0"


def fill_memory(value: int) -> None:
    ctypes.CDLL(None).mallopt(_M_PERTURB, value)


@contextmanager
def sessions(*, arena: bool) -> Iterator[None]:
    """Sessions of one thread, with onnxruntime's arena or without."""
    from tfmx.runtime import session

    make_options, run_options = session._session_options, session.Session._run_options

    def options(ort: Any, folder: Path, device: Device, _threads: int | None) -> Any:
        made = make_options(ort, folder, device, 1)
        made.enable_cpu_mem_arena = arena
        return made

    def unshrunk(self: Any, *, shrink: bool) -> Any:  # an arena that is not there cannot be shrunk
        return run_options(self, shrink=shrink and arena)

    with (
        mock.patch.object(session, "_session_options", options),
        mock.patch.object(session.Session, "_run_options", unshrunk),
    ):
        yield
