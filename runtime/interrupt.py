"""Runs native code so that Ctrl-C stops it at once.

Python handles a signal only between bytecodes of the main thread: while that thread is inside onnxruntime,
Ctrl-C waits for the end of the run. So the main thread hands the work to one worker thread and waits; when
it is interrupted it cancels the work, waits until the native code has really returned (its buffers are ours)
and lets the exception pass. Handing over costs about 23 µs. Other threads are never interrupted: they run
the work themselves.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], object], "queue.SimpleQueue[_Outcome]"]
_Outcome = tuple[object, BaseException | None]

# Windows does not wake a blocked main thread for Ctrl-C; elsewhere waiting needs no polling.
_POLL = 0.1 if sys.platform == "win32" else None

_jobs: queue.SimpleQueue[_Job] | None = None  # made with the worker, at the first call


def run_interruptible(work: Callable[[], T], cancel: Callable[[], None]) -> T:
    """`work()`; when the main thread is interrupted meanwhile, `cancel()` must make it return soon."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    jobs, replies = _worker(), queue.SimpleQueue[_Outcome]()
    try:
        jobs.put((work, replies))
        result, error = _wait(replies)
    except BaseException:  # KeyboardInterrupt, or whatever else a signal handler raises
        cancel()
        _drain(jobs)
        raise
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # it is what work() gave


def _drain(jobs: queue.SimpleQueue[_Job]) -> None:
    """Wait until the worker is idle, however often the user presses Ctrl-C meanwhile."""
    while True:
        try:
            replies = queue.SimpleQueue[_Outcome]()
            jobs.put((_nothing, replies))  # jobs run in order: when this one is done, so is the cancelled one
            _wait(replies)
        except KeyboardInterrupt:
            continue
        return


def _wait(replies: queue.SimpleQueue[_Outcome]) -> _Outcome:
    while True:
        try:
            return replies.get(timeout=_POLL)
        except queue.Empty:
            continue


def _worker() -> queue.SimpleQueue[_Job]:
    global _jobs  # noqa: PLW0603 (one worker a process: only one thread can be the main one)
    if _jobs is None:
        _jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(_jobs,), name="tfmx-run", daemon=True).start()
    return _jobs


def _serve(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        work, replies = jobs.get()
        try:
            outcome: _Outcome = (work(), None)
        except BaseException as error:  # noqa: BLE001 (it is raised again in the thread that asked)
            outcome = (None, error)
        replies.put(outcome)
        del work, replies, outcome  # an idle worker keeps no buffers alive


def _nothing() -> None:
    pass


def _forget_worker() -> None:
    global _jobs  # noqa: PLW0603
    _jobs = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_worker)  # threads do not survive a fork
