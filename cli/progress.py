"""What long work is doing, on stderr: bars at a terminal, elsewhere (a pipe, a log) a plain line for each stage."""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .console import say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_MOMENT = 0.5  # seconds; what is done sooner draws nothing


class Bars:
    """The exporter's `Progress` (export/progress.py), drawn. They vanish at the end: the result says the rest."""

    def __init__(self, *, lines: bool = False, quiet: bool = False) -> None:
        """`lines`: where stderr is no terminal, tell each stage when it begins; for what takes minutes."""
        self._quiet, self._lines = quiet, lines and not _at_terminal()
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        if _at_terminal() and not self._quiet:
            self._bars = _make_bars()
            self._timer = threading.Timer(_MOMENT, self._bars.start)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None and self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # or the bars could start after they were stopped
            self._finish()
            self._bars.stop()

    def stage(self, title: str, total: int) -> None:
        if self._lines and not self._quiet:
            say(title)
        if self._bars is not None:
            self._finish()
            # One unit has no parts to count: the bar swings to and fro until it is done.
            self._task = self._bars.add_task(title, total=total if total > 1 else None)

    def advance(self, amount: int = 1) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, amount)

    def _finish(self) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, total=1, completed=1)
            self._task = None


def _at_terminal() -> bool:
    """One that can move its cursor, which bars need (TERM=dumb is an editor's, or a log's)."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _make_bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # it is the result, and may be a pipe
    )
