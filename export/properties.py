"""Does the PyTorch module itself keep what the protocol promises? Asked in float64, before any graph is made.

The gate compares graphs with PyTorch run in the very same steps, so a module that is wrong in PyTorch is exported
faithfully and stays wrong: one whose steps do not see the past, or whose state takes in pads, agrees with its graphs in
every case. Here a sequence alone, in one go, is the truth, and every other way of feeding it (`property_cases.py`)
must give the same.

Two answers may differ by as much as float32 rounding moves the module, times 4: modules may hold tables or compute sums in
float32 whatever they are converted to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .. import TfmxError
from .cases import Array, Case, Run
from .parity import FACTOR
from .progress import Progress
from .property_cases import (
    BESIDE,
    CAUSAL,
    LENGTHS,
    PADDED,
    PADDED_STEPS,
    PLAIN,
    REPEATED,
    STEPS,
    STEPWISE,
    Arrangement,
    Feeder,
    Feeding,
)
from .reference import CaseOutputs
from .signature import Signature
from .whole_reference import WholeReference

LONG = len(LENGTHS)  # the index of the long sequence
# Multiplications that the long sequence may take: 1,024 elements of a small model, 74 of SmolLM2, seconds either way
_LONG_WORK = 10**10
_MOST_LONG = 1024
_SAME = 1e-9  # of the largest output: what the same computation may differ by


class PropertyError(TfmxError):
    """The PyTorch module breaks what the protocol promises."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Where a way of feeding differs most from the sequence alone."""

    arrangement: Arrangement
    place: str
    error: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.place}: off by {self.error:.2g}, rounding explains {self.allowed:.2g}"


def check_properties(reference: WholeReference, progress: Progress) -> None:
    """Raise PropertyError with the first property that fails, where, and how to mend the module."""
    found = broken_properties(reference, progress)
    if not found:
        return
    first, *others = found
    also = f", and so do {len(others)} other ways of feeding it" if others else ""
    raise PropertyError(
        f"the PyTorch module is not consistent: {first.arrangement.name} gives another answer than the sequence alone and in one go, "
        f"{first}{also}; {first.arrangement.mend}"
    )


def broken_properties(reference: WholeReference, progress: Progress) -> list[Finding]:
    """What differs most in each way of feeding that is not the sequence alone, in the order of `_arrangements`."""
    signature = reference.signature
    feeder = Feeder(signature, int(np.clip(_LONG_WORK // max(reference.size, 1), 64, _MOST_LONG)))
    arrangements = _arrangements(signature)
    lengths = dict.fromkeys(
        (index, arrangement.length) for arrangement in arrangements for index in arrangement.rows
    )
    alone = [
        feeder.feed(Arrangement(name="alone", rows=(index,), length=length, mend=""))
        for index, length in lengths
    ]
    other = [feeder.feed(arrangement) for arrangement in arrangements]
    cases, alone_cases = [feeding.case for feeding in (*alone, *other)], [feeding.case for feeding in alone]
    progress.stage("verifying: the module itself", reference.steps(cases) + reference.steps(alone_cases))
    exact = reference.run(cases, None, torch.float64, progress.advance)
    rough = reference.run(alone_cases, None, torch.float32, progress.advance)
    plain = reference.plain(alone_cases, torch.float64) or []
    _check_finite(alone_cases, exact)
    largest, rounding = _sizes(exact[: len(alone)], rough)
    truth = {
        key: next(_by_element(signature, feeding, outputs))[1]
        for key, feeding, outputs in zip(lengths, alone, exact, strict=False)
    }
    pairs = [
        *zip(other, exact[len(alone) :], strict=True),
        *((_plainly(feeding), CaseOutputs(main=[main])) for feeding, main in zip(alone, plain, strict=False)),
    ]
    findings = [
        _finding(
            signature,
            feeding,
            outputs,
            truth,
            _SAME * largest if feeding.arrangement is REPEATED else rounding,
        )
        for feeding, outputs in pairs
    ]
    return [finding for finding in findings if finding is not None]


def _check_finite(cases: Sequence[Case], exact: Sequence[CaseOutputs]) -> None:
    for case, outputs in zip(cases, exact, strict=False):
        if not all(np.isfinite(main).all() for main in outputs.main):
            raise PropertyError(
                f"the PyTorch module gives values that are not finite in float64, for a sequence of {case.runs[-1].inputs.shape[1]}; "
                "look for a division by zero, or a logarithm or root of what is negative"
            )


def _plainly(feeding: Feeding) -> Feeding:
    """The same sequence, given to the plain forward."""
    return replace(
        feeding, arrangement=replace(PLAIN, rows=feeding.arrangement.rows, length=feeding.arrangement.length)
    )


def _arrangements(signature: Signature) -> list[Arrangement]:
    """In the order in which they are told: what fails first explains most of what fails later."""
    if signature.steps.kind == "images":
        return [REPEATED, BESIDE]
    if signature.kind == "encoder":
        return [REPEATED, BESIDE, *(PADDED if signature.has_mask else ())]
    step = STEPWISE[0].mend
    further = (
        Arrangement(
            name="a long prefill in chunks, then steps", rows=(LONG,), chunks=(33,), steps=STEPS, mend=step
        ),
    )
    return [REPEATED, CAUSAL, BESIDE, *STEPWISE, *further, *PADDED, *PADDED_STEPS]


Answers = Mapping[int, tuple[str, Array]]  # by element of a row: which call gave it, and what


def _finding(
    signature: Signature,
    feeding: Feeding,
    outputs: CaseOutputs,
    truth: Mapping[tuple[int, int | None], Answers],
    allowed: float,
) -> Finding | None:
    arrangement = feeding.arrangement
    worst: Finding | None = None
    for row, answers in _by_element(signature, feeding, outputs):
        wanted = truth[feeding.sequences[row], arrangement.length]
        for element in sorted(answers.keys() & wanted.keys()):
            if arrangement.changed and element >= (max(wanted) + 1) // 2:
                continue
            call, values = answers[element]
            error = float(np.abs(values - wanted[element][1]).max(initial=0.0))
            if not error <= allowed and (worst is None or not error <= worst.error):  # NaN is the worst
                worst = Finding(arrangement, f"at element {element} of row {row} ({call})", error, allowed)
    return worst


def _by_element(
    signature: Signature, feeding: Feeding, outputs: CaseOutputs
) -> Iterator[tuple[int, Answers]]:
    """What each row's real elements got; one answer for a whole row counts as its last element's."""
    for row in range(len(feeding.sequences)):
        found: dict[int, tuple[str, Array]] = {}
        step = 0
        for number, (run, main) in enumerate(zip(feeding.case.answers, outputs.main, strict=True)):
            step += run.graph == "decode"
            call = f"step {step}" if run.graph == "decode" else f"{run.graph} {number + 1}"
            found |= {element: (call, values) for element, values in _real(signature, run, main[row], row)}
        yield row, found


def _real(signature: Signature, run: Run, main: Array, row: int) -> Iterator[tuple[int, Array]]:
    """`main`: of one row, (T, size) or (size,)."""
    if run.attention_mask is None:
        yield from enumerate(main.reshape(-1, main.shape[-1]))
        return
    columns = np.flatnonzero(run.is_real[row])
    seen = int(run.attention_mask[row, : -run.length].sum())
    if not len(columns):
        return
    if main.ndim == 1 or signature.outputs.only_last:
        yield seen + len(columns) - 1, main.reshape(-1)
    else:
        for place, column in enumerate(columns):
            yield seen + place, main[len(main) - run.length + column]  # a class token may stand before


def _sizes(exact: Sequence[CaseOutputs], rough: Sequence[CaseOutputs]) -> tuple[float, float]:
    """The largest number in the outputs of sequences alone, and what rounding to float32 may do to them."""
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for wide, narrow in zip(exact, rough, strict=True)
        for a, b in zip(wide.main, narrow.main, strict=True)
    ]
    largest = max(float(np.abs(a).max(initial=0.0)) for a, _ in pairs)
    error = float(np.max([np.abs(a - b).max(initial=0.0) for a, b in pairs]))  # NaN stays NaN
    return largest, FACTOR * max(error, float(np.finfo(np.float32).eps) * largest)
