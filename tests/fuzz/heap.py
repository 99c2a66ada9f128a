"""Fills fresh memory, and runs onnxruntime so that each tensor is fresh: what nobody wrote then shows in the output.

glibc fills every block that it hands out (M_PERTURB). onnxruntime's arena would hand a tensor the remains of another, alike in
both runs; without it each tensor is a block of its own. Small blocks that glibc keeps for each thread are not filled, so the
process is started with none (`TUNABLES`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_M_PERTURB = -6
FILLS = (0x5A, 0xA5)  # glibc writes the complement: as float32 -3e-16 and 1.5e16, as float16 -0.02 and 203
TUNABLES = "glibc.malloc.tcache_count=0"


def fill_memory(value: int) -> None:
    ctypes.CDLL(None).mallopt(_M_PERTURB, value)


@contextmanager
def without_arena() -> Iterator[None]:
    from tfmx.runtime import session

    make = session._session_options

    def changed(*arguments: Any) -> Any:
        options = make(*arguments)
        options.enable_cpu_mem_arena = False
        return options

    def unshrunk(self: Any, *, shrink: bool) -> Any:  # there is no arena that could be
        return give_options(self, shrink=False)

    give_options = session.Session._run_options
    with (
        mock.patch.object(session, "_session_options", changed),
        mock.patch.object(session.Session, "_run_options", unshrunk),
    ):
        yield
