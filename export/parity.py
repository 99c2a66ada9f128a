"""The gate: the graphs must be as close to PyTorch in float64 as PyTorch itself is in the bundle's precision.

    e_onnx  = max |onnx - torch float64|
    e_torch = max |torch - torch float64|          pass if e_onnx <= 4 e_torch, in every case

No tolerance is chosen by hand: real exports sit at 0.5 to 2 times e_torch, faults far above 4. A case of few
numbers can by luck find PyTorch almost exact, so that its e_torch is at least the median of all cases, and
at least one rounding step of the largest value (some PyTorch sums are kept in double).
The same holds for what was written into the cache, with the root mean square for the maximum: there, one token
with huge activations (trained models have some) would make the maximum a matter of luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import TfmxError
from ..runtime.devices import import_onnxruntime
from ..tfm_model.state import StateTensor
from .cases import Case, Run, parity_cases
from .progress import Progress
from .reference import Array, CaseOutputs, Pasts, Reference, by_element, real
from .signature import Signature
from .stitch import GRAPHS_OF_KIND

FACTOR = 4.0
RULE = f"max|onnx - torch64| <= {FACTOR:g} * max|torch - torch64|"
CACHE_BYTES = 2**29  # what the longest case may take for its cache


class ParityError(TfmxError):
    """The graphs do not compute what PyTorch computes."""


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

    @property
    def worst(self) -> CaseParity:
        return max(self.cases, key=lambda case: np.inf if np.isnan(case.ratio) else case.ratio)

    @property
    def passed(self) -> bool:
        return all(case.passed for case in self.cases)

    def certificate(self) -> dict[str, object]:
        """What the manifest says; three digits, since the last ones differ from machine to machine."""
        return {
            "rule": RULE,
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
            raise ParityError(f"parity failed in {failed} of {len(self.cases)} cases, worst {self.worst}")


class Graphs:
    """The graphs of a folder, run on given states; `growth` says how they lay out theirs."""

    def __init__(self, folder: Path, growth: str, signature: Signature, precision: torch.dtype) -> None:
        self.growth, self.signature = growth, signature
        self.dtype = torch.zeros(0, dtype=precision).numpy().dtype  # of vectors, images and the state
        options = import_onnxruntime().SessionOptions()
        options.log_severity_level = 3
        self.sessions = {
            kind: _open(folder / f"{kind}.onnx", options) for kind in GRAPHS_OF_KIND[signature.kind]
        }

    def run(self, reference: Reference, pasts: Pasts, case: Case) -> CaseOutputs:
        result = CaseOutputs()
        moving = [state for state in reference.spec if state.growth != "fixed"]
        columns = case.runs[-1].attention_mask
        state = [pasts.state(i, case).contiguous().numpy() for i in range(len(moving))]
        if self.growth == "capacity":
            assert columns is not None
            state = [packed(v, case, columns.shape[1] + case.spare if case.spare else 0) for v in state]
        fixed: dict[str, Array] = {}
        for run in case.runs:
            pasts_by_name = {spec.past: values for spec, values in zip(moving, state, strict=True)}
            main, rest = self._call(run, pasts_by_name | fixed)
            if run.graph == "encode":
                known = [spec for spec in reference.spec if spec.growth == "fixed"]
                fixed = {spec.past: rest[spec.present] for spec in known}
                fixed["encoder_attention_mask"] = run.attention_mask  # type: ignore[assignment]
                extra = [by_element(rest[spec.present], run) for spec in known]
                names = self.signature.encoder_map_names
            else:
                state = [rest[spec.present] for spec in moving]
                extra = [self._written(v, spec, run) for v, spec in zip(state, moving, strict=True)]
                names = self.signature.map_names
            if self._is_source(run):
                extra.insert(0, real(main, run))
            else:
                result.main.append(main)
            result.states.append(extra + [by_element(rest[name], run) for name in names])
        return result

    def _call(self, run: Run, state: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """The main output, and all by name."""
        session = self.sessions[run.graph]
        elements = self.signature.inputs if run.graph == "encode" else self.signature.steps
        inputs = run.inputs if elements.kind == "tokens" else run.inputs.astype(self.dtype)
        given = {
            elements.name: inputs,
            "attention_mask": run.attention_mask,
            "position_ids": run.position_ids,
            "num_logits_to_keep": np.array(run.keep),
            **state,
        }
        wanted = {value.name for value in session.get_inputs()}
        if run.keep and not self.signature.outputs.only_last:
            wanted.add("num_logits_to_keep")  # has a default, so it is not among the inputs that must be fed
        names = [value.name for value in session.get_outputs()]
        try:
            outputs = session.run(None, {name: value for name, value in given.items() if name in wanted})
        except Exception as error:  # onnxruntime's errors have no class in common but this
            raise ParityError(
                f"onnxruntime cannot run the {run.graph} graph: {str(error).splitlines()[0]}"
            ) from error
        found = dict(zip(names, outputs, strict=True))
        main = found["last_hidden_state" if self._is_source(run) else self.signature.outputs.name]
        expected = self._main_shape(run)
        if main.shape != expected:
            raise ParityError(
                f"the {run.graph} graph gives a main output of shape {main.shape}, wanted {expected}"
            )
        return main, found

    def _is_source(self, run: Run) -> bool:
        return run.graph == "encode" and self.signature.kind == "encoder-decoder"

    def _main_shape(self, run: Run) -> tuple[int | None, ...]:
        answer, B = self.signature.outputs, len(run.inputs)
        T = self.signature.inputs.length if run.attention_mask is None else run.length
        if self._is_source(run):
            return B, T, self.signature.encoded_width
        if answer.pooled:
            return B, answer.size
        return B, 1 if answer.only_last else run.keep or T, answer.size

    def _written(self, present: Array, state: StateTensor, run: Run) -> Array:
        if "past_sequence_length" not in state.shape:
            return present
        is_real, T = run.is_real, run.length
        rows = np.moveaxis(present, state.shape.index("past_sequence_length"), 1)  # (B, S, ...)
        if self.growth == "append":
            return rows[:, rows.shape[1] - T :][is_real]
        assert run.attention_mask is not None
        n_past = run.attention_mask[:, :-T].sum(axis=1)
        return np.concatenate(
            [
                row[start : start + count]
                for row, start, count in zip(rows, n_past, is_real.sum(1), strict=True)
            ]
        )


def _open(path: Path, options: Any) -> Any:
    try:
        return import_onnxruntime().InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no class in common but this
        raise ParityError(f"onnxruntime cannot load {path.name}: {str(error).splitlines()[0]}") from error


def packed(values: Array, case: Case, capacity: int) -> Array:
    """Columns → slots: the real ones of each row first, garbage in the room behind them."""
    B, H, P, D = values.shape
    slots = np.full((B, H, max(capacity, P), D), 1e3, dtype=values.dtype)
    for row, mask in enumerate(case.past_mask):
        slots[row, :, : int(mask.sum())] = values[row][:, mask == 1]
    return slots


class Gate:
    """What PyTorch says about the cases, computed once; then any number of exports can be held against it."""

    def __init__(self, reference: Reference, progress: Progress) -> None:
        self.reference, self.progress = reference, progress
        self.cases = parity_cases(reference.signature, _longest(reference))
        steps = reference.steps(self.cases)
        progress.stage("verifying: PyTorch in float64", 2 * steps)
        self.pasts = Pasts(reference, progress.advance)
        self.exact = reference.run(self.cases, self.pasts, torch.float64, progress.advance)
        progress.stage(f"verifying: PyTorch in {str(reference.precision).removeprefix('torch.')}", steps)
        plain = reference.run(self.cases, self.pasts, reference.precision, progress.advance)
        self.budgets = _budgets(self.cases, plain, self.exact, reference.precision)
        if not np.isfinite(self.budgets).all():
            precision = str(reference.precision).removeprefix("torch.")
            raise ParityError(
                f"PyTorch itself gives values that are not finite in {precision}; export as fp32"
            )

    def check(self, folder: Path, growth: str) -> Parity:
        self.progress.stage("verifying: onnxruntime", len(self.cases))
        graphs = Graphs(folder, growth, self.reference.signature, self.reference.precision)
        results: list[CaseParity] = []
        golden: dict[str, Array] = {}
        for case, truth, budget in zip(self.cases, self.exact, self.budgets, strict=True):
            if case.columns_only and growth != "append":
                continue
            results.append(compare(case, graphs.run(self.reference, self.pasts, case), truth, budget))
            if case.is_golden:
                golden |= golden_arrays(self.reference.signature, case, truth, results[-1].budget)
            self.progress.advance()
        return Parity(tuple(results), golden)


def _budgets(
    cases: Sequence[Case], plain: Sequence[CaseOutputs], exact: Sequence[CaseOutputs], precision: torch.dtype
) -> list[tuple[float, float]]:
    """For the logits and for the state of each case."""
    step = torch.finfo(precision).eps
    logits, states = [], []
    for case, ours, truth in zip(cases, plain, exact, strict=True):
        true_logits, true_states = _real_rows(case, truth), _flat(truth.states)
        error = _largest(np.abs(_real_rows(case, ours) - true_logits))
        logits.append(max(error, step * _largest(np.abs(true_logits))))
        state_error = _mean_square(_flat(ours.states) - true_states)
        states.append(max(state_error, step * _mean_square(true_states)))
    return [
        (FACTOR * max(logit, float(np.median(logits))), FACTOR * max(state, float(np.median(states))))
        for logit, state in zip(logits, states, strict=True)
    ]


def _longest(reference: Reference) -> int:
    per_token = 0
    for state in reference.spec:
        if "past_sequence_length" in state.shape:
            per_token += 4 * int(np.prod([dim for dim in state.shape if isinstance(dim, int)]))
    return min(reference.signature.steps.length, CACHE_BYTES // max(per_token, 1))


def compare(case: Case, onnx: CaseOutputs, exact: CaseOutputs, budgets: tuple[float, float]) -> CaseParity:
    ours, truth = _real_rows(case, onnx), _real_rows(case, exact)
    error = np.abs(ours - truth)
    best_two = np.partition(truth, -2, axis=-1)[:, -2:] if truth.shape[1] > 1 else np.repeat(truth, 2, axis=1)
    return CaseParity(
        name=case.name,
        error=_largest(error),
        budget=budgets[0],
        state_error=_mean_square(_flat(onnx.states) - _flat(exact.states)),
        state_budget=budgets[1],
        mean_error=float(error.mean()),
        argmax_agreement=float((ours.argmax(-1) == truth.argmax(-1)).mean()),
        margin=float((best_two[:, 1] - best_two[:, 0]).min()),
    )


def _short(value: float) -> float:
    return float(f"{value:.3g}")


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


def golden_arrays(signature: Signature, case: Case, exact: CaseOutputs, budget: float) -> dict[str, Array]:
    """An input (padded left) and what follows, with the answers that float64 gives: see runtime/golden.py."""
    name = case.name.removeprefix("golden: ").replace(" ", "_")
    first, *rest = case.runs
    arrays: dict[str, Array | None] = {
        signature.inputs.name: _stored(first.inputs),
        "attention_mask": first.attention_mask,
        "budget": np.array(budget),
    }
    if signature.kind == "encoder":
        arrays["expected"] = exact.main[0].astype(np.float32)
    else:
        if signature.kind == "encoder-decoder":
            prefill, *rest = rest
            arrays["target_ids"] = prefill.inputs
        part = "decode_ids" if signature.steps.kind == "tokens" else "decode_features"
        arrays[part] = np.stack([_stored(run.inputs)[:, 0] for run in rest])
        arrays["expected"] = np.stack([main[:, -1].astype(np.float32) for main in exact.main])
    return {f"{name}.{part}": array for part, array in arrays.items() if array is not None}


def _stored(inputs: Array) -> Array:
    return inputs if inputs.dtype == np.int64 else inputs.astype(np.float32)
