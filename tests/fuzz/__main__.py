"""`python tests/fuzz bundles|checkpoints`: a campaign, or one mutant of it again, or that mutant kept as files."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its files are `fuzz.…`

from fuzz.bases import base_folder  # noqa: E402
from fuzz.campaign import run_campaign  # noqa: E402
from fuzz.outcomes import BAD, Outcome  # noqa: E402
from fuzz.report import finding, table  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("kind", choices=("bundles", "checkpoints"))
    parser.add_argument("--count", type=int, default=2000, help="mutants of a campaign")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutant", type=int, help="this one alone")
    parser.add_argument("--workers", type=int, help="processes; one a core if not given")
    parser.add_argument("--findings", type=Path, help="a file to which findings are added")
    given = parser.parse_args()
    base_folder()  # before several servers want it at once
    indexes = range(given.count) if given.mutant is None else [given.mutant]
    progress = Progress(given, len(indexes))
    try:
        run_campaign(given.kind, given.seed, indexes, report=progress.add, workers=given.workers)
    except KeyboardInterrupt:
        say("stopped; the table is of what was done")
    outcomes = progress.outcomes
    if given.mutant is not None and outcomes:
        [outcome] = outcomes
        print(f"{outcome.verdict}: {outcome.detail}\n{outcome.kind}, {outcome.base}: {outcome.what}")
    else:
        seconds = time.monotonic() - progress.started
        print(f"{len(outcomes):,} mutants of {given.kind}, seed {given.seed}, in {seconds:.0f} s\n")
        print(table(outcomes))
    return int(any(outcome.verdict in BAD for outcome in outcomes))


class Progress:
    """Says on stderr what was found, at once, and how far it is; findings also go to a file."""

    def __init__(self, given: argparse.Namespace, total: int) -> None:
        self.outcomes: list[Outcome] = []
        self.started = time.monotonic()
        self._given, self._total = given, total

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.is_bad:
            text = finding(self._given.kind, self._given.seed, outcome)
            say(text)
            if self._given.findings is not None:
                with self._given.findings.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")
        done = len(self.outcomes)
        if done % 500 == 0:
            say(f"{done} of {self._total}, {done / (time.monotonic() - self.started):.1f}/s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
