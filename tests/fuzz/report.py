"""The table of a campaign, and the list of what went wrong with the command that shows it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fuzz.outcomes import BAD, OUTCOMES, Outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row a kind of mutant, a column an outcome; good outcomes that never came are left out."""
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        counts.setdefault(outcome.kind, Counter())[outcome.verdict] += 1
    total = sum(counts.values(), Counter())
    columns = [name for name in OUTCOMES if total[name] or name in BAD[:-1]]
    rows = [["mutants", *columns, "all"]]
    for kind, found in [*sorted(counts.items()), ("all", total)]:
        rows.append([kind, *(f"{found[name]:,}" for name in columns), f"{found.total():,}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_row(row, widths) for row in rows]
    rule = "|".join(["", "-" * (widths[0] + 2), *(f"{'-' * (width + 1)}:" for width in widths[1:]), ""])
    return "\n".join([lines[0], rule, *lines[1:]])


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = cells
    padded = [
        f"{first:<{widths[0]}}",
        *(f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)),
    ]
    return f"| {' | '.join(padded)} |"


def finding(kind: str, seed: int, outcome: Outcome) -> str:
    return (
        f"{outcome.verdict}: {outcome.detail}\n    {outcome.base}: {outcome.what}\n"
        f"    {repeat_command(kind, seed, outcome.index)}"
    )


def repeat_command(kind: str, seed: int, index: int) -> str:
    return f"python tests/fuzz {kind} --seed {seed} --mutant {index}"


def findings(kind: str, seed: int, outcomes: Iterable[Outcome]) -> str:
    return "\n".join(finding(kind, seed, outcome) for outcome in outcomes if outcome.is_bad)
