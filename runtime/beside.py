"""Work that another thread does while this one goes on; for work that leaves Python's lock to others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tfmx-beside", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """What it gave, when it is done; what it raised is raised here."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 (raised again by whoever asks for the result)
            self._error = error
