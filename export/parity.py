"""The gate: the graphs must be as close to PyTorch in float64 as PyTorch itself is in the bundle's precision.

    e_onnx  = max |onnx - torch float64|
    e_torch = max |torch - torch float64|          pass if e_onnx <= 4 e_torch, in every case

No tolerance is chosen by hand: real exports sit at 0.5 to 2 times e_torch, faults far above 4. A case of few
numbers can by luck find PyTorch almost exact, so that its e_torch is at least the median of all cases, and
at least one rounding step of the largest value (some PyTorch sums are kept in double).
PyTorch is run more than once: where a model is ill-conditioned, one run can be right by luck. Decoders that are run layer
by layer have two more, with what reaches each layer nudged by up to a rounding step; so have small models that are run whole,
with every weight nudged by up to half of one.
Graphs that round activations to 8 bits are held against PyTorch rounding the same, in most rows of a case: at some tokens of a
trained model such an error grows to a hundred times the others', or does not, as it happens. (All rows count in their exact twins.)
The same holds for what was written into the cache, with the root mean square for the maximum: there, one token
with huge activations (trained models have some) would make the maximum a matter of luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..runtime.devices import import_onnxruntime
from .arithmetic import EXACT, Arithmetic
from .cases import Case, parity_cases
from .golden import RoundedGolden, golden_arrays
from .graph_runs import Graphs
from .parity_error import ParityError
from .progress import Progress
from .reference import Array, CaseOutputs, Pasts, Reference, Way
from .stitch import GraphKind

FACTOR = 4.0
RULE = f"max|onnx - torch64| <= {FACTOR:g} * max|torch - torch64|"
ROUNDED_ROWS = 0.75  # of a case with rounded activations: so many are compared, those that are least off
ROUNDING_RULE = f"{RULE}, torch rounding the same, in {ROUNDED_ROWS:.0%} of the rows"
CACHE_BYTES = 2**29  # what the longest case may take for its cache


@dataclass(frozen=True, slots=True)
class CaseParity:
    name: str
    error: float  # of the main output
    budget: float
    state_error: float  # of what was written into the cache (root mean square)
    state_budget: float
    mean_error: float
    argmax_agreement: float
    margin: float  # smallest distance between the two best numbers of a row

    @property
    def ratio(self) -> float:
        """How many times PyTorch's own error; NaN where a value is not finite."""
        pairs = ((self.error, self.budget), (self.state_error, self.state_budget))
        shares = [error / budget if budget else (np.inf if error else 0.0) for error, budget in pairs]
        return FACTOR * float(np.max(shares))

    @property
    def passed(self) -> bool:
        return self.error <= self.budget and self.state_error <= self.state_budget

    def __str__(self) -> str:
        return (
            f"'{self.name}': output off by {self.error:.2g} (budget {self.budget:.2g}, mean {self.mean_error:.2g}), "
            f"state by {self.state_error:.2g} (budget {self.state_budget:.2g}), "
            f"argmax agrees on {self.argmax_agreement:.0%}, smallest top-2 margin {self.margin:.2g}"
        )


@dataclass(frozen=True, slots=True)
class Parity:
    cases: tuple[CaseParity, ...]
    golden: dict[str, Array]  # what golden.npz holds
    rounding: Parity | None = None  # of the graphs as they are, if they round on the way; `cases` are without

    def with_rounding(self, rounding: Parity) -> Parity:
        return replace(self, golden=rounding.golden, rounding=rounding)

    @property
    def worst(self) -> CaseParity:
        return max(self.cases, key=lambda case: np.inf if np.isnan(case.ratio) else case.ratio)

    @property
    def passed(self) -> bool:
        return all(case.passed for case in self.cases) and (self.rounding is None or self.rounding.passed)

    def certificate(self, rule: str = RULE) -> dict[str, object]:
        """What the manifest says; three digits, since the last ones differ from machine to machine."""
        rounding = {} if self.rounding is None else {"rounding": self.rounding.certificate(ROUNDING_RULE)}
        return rounding | {
            "rule": rule,
            "reference": f"torch {torch.__version__.split('+')[0]} float64",
            "runtime": f"onnxruntime {import_onnxruntime().__version__}",
            "passed": self.passed,
            "worst_ratio": _short(self.worst.ratio),
            "cases": [
                {
                    "name": case.name,
                    "error": _short(case.error),
                    "budget": _short(case.budget),
                    "ratio": _short(case.ratio),
                    "argmax_agreement": _short(case.argmax_agreement),
                }
                for case in self.cases
            ],
        }

    def require(self) -> None:
        failed = sum(not case.passed for case in self.cases)
        if failed:
            raise ParityError(
                f"parity failed in {failed} of {len(self.cases)} cases, worst {self.worst}; "
                "nothing was written. Please report it; --no-verify writes the bundle all the same"
            )
        if self.rounding is not None:
            self.rounding.require()


class Gate:
    """What PyTorch says about the cases, computed once; then any number of exports can be held against it."""

    def __init__(self, reference: Reference, progress: Progress, arithmetic: Arithmetic = EXACT) -> None:
        """`arithmetic`: what `check_rounding` will hold graphs against."""
        self.reference, self.progress = reference, progress
        is_recurrent = any(state.growth == "constant" for state in reference.spec)
        self.cases = parity_cases(reference.signature, _longest(reference), is_recurrent=is_recurrent)
        plain = [Way(reference.precision, sample) for sample in range(reference.samples)]
        rounded = [replace(way, arithmetic=arithmetic) for way in plain] if arithmetic != EXACT else []
        ways = [Way(torch.float64), *plain, *rounded]
        progress.stage("verifying: PyTorch", reference.steps(self.cases) * (1 + len(ways)))
        self.pasts = Pasts(reference, progress.advance)
        self.exact: list[CaseOutputs] = []
        self._plain, self._rounded = Errors(reference.precision), Errors(reference.precision, ROUNDED_ROWS)
        self._rounded_rows = Errors(reference.precision)  # all of them
        self._golden = RoundedGolden(reference)
        found = reference.run_ways(self.cases, self.pasts, ways, progress.advance)
        for case, (exact, *samples) in zip(self.cases, found, strict=True):
            self.exact.append(exact)
            self._plain.add(case, samples[: len(plain)], exact)
            if rounded:
                self._rounded.add(case, samples[len(plain) :], exact)
                self._rounded_rows.add(case, samples[len(plain) :], exact)
                self._golden.add(case, exact, samples[len(plain) :])
        self.budgets = self._plain.budgets()
        if not np.isfinite(self.budgets).all():
            precision = str(reference.precision).removeprefix("torch.")
            raise ParityError(
                f"PyTorch itself gives values that are not finite in {precision}; export as fp32"
            )

    def check(self, folder: Path, growth: str, models: Mapping[GraphKind, bytes] | None = None) -> Parity:
        """`models`: graphs over the folder's weights, instead of those that lie in it."""
        graphs = Graphs(folder, growth, self.reference.signature, self.reference.precision, models)
        return self._compare(graphs, self.budgets, "verifying: onnxruntime")

    def check_rounding(self, folder: Path, growth: str, cache_scales: Sequence[Array] | None) -> Parity:
        """Graphs that round on the way may be as far off as PyTorch is when it rounds the same."""
        reference = self.reference
        graphs = Graphs(folder, growth, reference.signature, reference.precision, cache_scales=cache_scales)
        stage = "verifying: onnxruntime, rounding"
        parity = self._compare(
            graphs, self._rounded.budgets(), stage, ROUNDED_ROWS, self._rounded_rows.budgets()
        )
        return replace(parity, golden=parity.golden | self._golden.arrays(cache_scales))

    def _compare(
        self,
        graphs: Graphs,
        budgets: Sequence[tuple[float, float]],
        stage: str,
        rows: float = 1.0,
        golden_budgets: Sequence[tuple[float, float]] | None = None,
    ) -> Parity:
        """`golden_budgets`: of all rows, which a replay looks at."""
        self.progress.stage(stage, len(self.cases))
        growth = graphs.growth
        results: list[CaseParity] = []
        golden: dict[str, Array] = {}
        for case, truth, budget, (golden_budget, _) in zip(
            self.cases, self.exact, budgets, golden_budgets or budgets, strict=True
        ):
            if case.columns_only and growth != "append":
                continue
            results.append(compare(case, graphs.run(self.reference, self.pasts, case), truth, budget, rows))
            if case.is_golden:
                golden |= golden_arrays(self.reference.signature, case, truth, golden_budget)
            self.progress.advance()
        return Parity(tuple(results), golden)


class Errors:
    """How far PyTorch itself is off: at most, of its samples, for the main output and for the state of each case."""

    def __init__(self, precision: torch.dtype, rows: float = 1.0) -> None:
        """`rows`: in how many of a case's."""
        self._step, self._rows = torch.finfo(precision).eps, rows
        self._mains: list[float] = []
        self._states: list[float] = []

    def add(self, case: Case, samples: Sequence[CaseOutputs], exact: CaseOutputs) -> None:
        true_main, true_states = _real_rows(case, exact), _flat(exact.states)
        errors = [_error(_real_rows(case, ours) - true_main, self._rows) for ours in samples]
        self._mains.append(max(*errors, self._step * _largest(np.abs(true_main))))
        state_errors = [_mean_square(_flat(ours.states) - true_states) for ours in samples]
        self._states.append(max(*state_errors, self._step * _mean_square(true_states)))

    def budgets(self) -> list[tuple[float, float]]:
        mains, states = self._mains, self._states
        return [
            (FACTOR * max(main, float(np.median(mains))), FACTOR * max(state, float(np.median(states))))
            for main, state in zip(mains, states, strict=True)
        ]


def _longest(reference: Reference) -> int:
    per_token = 0
    for state in reference.spec:
        if "past_sequence_length" in state.shape:
            per_token += 4 * int(np.prod([dim for dim in state.shape if isinstance(dim, int)]))
    return min(reference.signature.steps.length, CACHE_BYTES // max(per_token, 1))


def compare(
    case: Case, onnx: CaseOutputs, exact: CaseOutputs, budgets: tuple[float, float], rows: float = 1.0
) -> CaseParity:
    ours, truth = _real_rows(case, onnx), _real_rows(case, exact)
    difference = ours - truth
    best_two = np.partition(truth, -2, axis=-1)[:, -2:] if truth.shape[1] > 1 else np.repeat(truth, 2, axis=1)
    return CaseParity(
        name=case.name,
        error=_error(difference, rows),
        budget=budgets[0],
        state_error=_mean_square(_flat(onnx.states) - _flat(exact.states)),
        state_budget=budgets[1],
        mean_error=float(np.abs(difference).mean()),
        argmax_agreement=float((ours.argmax(-1) == truth.argmax(-1)).mean()),
        margin=float((best_two[:, 1] - best_two[:, 0]).min()),
    )


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _error(difference: Array, rows: float) -> float:
    """The largest of so many rows; of all, if any is not finite."""
    if difference.size == 0:
        return 0.0
    by_row = np.abs(difference).max(axis=-1)
    share = rows if np.isfinite(by_row).all() else 1.0
    return float(np.quantile(by_row, share, method="higher"))


def _largest(values: Array) -> float:
    return float(values.max(initial=0.0))  # NaN stays NaN, and fails every comparison


def _mean_square(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _real_rows(case: Case, outputs: CaseOutputs) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """(rows, size) of the main outputs that belong to real elements and were asked for."""
    rows = []
    for run, main in zip(case.answers, outputs.main, strict=True):
        wide = main.astype(np.float64)
        one_each = main.ndim == 3 and (run.length == 1 or main.shape[1] > 1)  # not one for the whole row
        if run.attention_mask is not None and one_each:
            keep = run.keep or run.length
            wide = wide[:, -keep:][run.is_real[:, -keep:]]
        rows.append(wide.reshape(-1, wide.shape[-1]))
    return np.concatenate(rows)


def _flat(states: Sequence[Sequence[Array]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.concatenate(
        [np.zeros(0), *(values.astype(np.float64).ravel() for run in states for values in run)]
    )
