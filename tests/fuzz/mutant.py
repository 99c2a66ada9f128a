"""A mutant that was written to disk: what it is, and what tfmx is asked to do with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    kind: str  # a row of the report's table
    base: str  # what it was made from
    what: str  # what was changed, for people
    commands: tuple[tuple[str, ...], ...]  # command lines of tfmx
