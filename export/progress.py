"""How long work tells what it is doing; the command line draws it, a library user may ignore it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def stage(self, title: str, total: int) -> None:
        """A new stage of `total` units begins (and the one before has ended)."""

    def advance(self, amount: int = 1) -> None: ...


class Silent:
    def stage(self, title: str, total: int) -> None:
        pass

    def advance(self, amount: int = 1) -> None:
        pass
