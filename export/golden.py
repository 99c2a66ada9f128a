"""golden.npz: what a bundle can be checked with where PyTorch is not. runtime/golden.py says what it holds, and replays it.

Graphs that round on the way (activations to 8 bits, or the cache) are off by as much as many faults would make them, and no
simulation of their rounding is nearer to them than exact numbers are: a difference of 1e-7 rounds some number the other way,
and after a few layers two runs are as far apart as either is from the truth. What stays the same is how large the error is.
So beside the largest difference, which is mostly the chance of one run, two mean squares are compared: of all outputs, less
what all have in common (softmax does not see it, and it is luck too), and of what each layer wrote into the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..runtime.golden import mean_square, spread
from ..tfm_model.state import StateTensor
from .cases import Case
from .reference import Array, CaseOutputs, Reference
from .signature import Signature

LARGEST = 4.0  # times the largest difference of a sample of PyTorch, in what a replay sees
# Times the largest mean square of three samples. On SmolLM2 (int8, and int4 with kept blocks) any of nine other runs, six of
# PyTorch nudged and two of kernels for AVX2 and AVX-512 among them, was off by at most 1.13 and 1.31 times that.
SPREAD, CACHE = 1.5, 2.0
LEAST_STEPS = 8  # rounding steps of the bundle's precision: layers that round nothing are off by some

Float64s = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def golden_arrays(signature: Signature, case: Case, exact: CaseOutputs, budget: float) -> dict[str, Array]:
    """An input (padded left) and what follows, with the answers that float64 gives."""
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
        arrays["expected"] = _answers(exact).astype(np.float32)
    return _named(case, {part: array for part, array in arrays.items() if array is not None})


class RoundedGolden:
    """What decoders that round on the way may be off by in golden cases: by PyTorch that rounds the same."""

    def __init__(self, reference: Reference) -> None:
        self._signature, self._step = reference.signature, torch.finfo(reference.precision).eps
        self._moving = [state for state in reference.spec if state.growth != "fixed"]
        self._seen: list[tuple[Case, CaseOutputs, list[CaseOutputs]]] = []

    def add(self, case: Case, exact: CaseOutputs, samples: Sequence[CaseOutputs]) -> None:
        if case.is_golden and self._signature.generates:
            self._seen.append((case, exact, list(samples)))

    def arrays(self, cache_scales: Sequence[Array] | None) -> dict[str, Array]:
        """In the place of the budget of `golden_arrays`. `cache_scales`: of each state, where the cache is of int8."""
        differences = [
            [_answers(sample) - _answers(exact) for sample in samples] for _, exact, samples in self._seen
        ]
        largest = [max(float(np.abs(each).max()) for each in of_case) for of_case in differences]
        spreads = [max(map(spread, of_case)) for of_case in differences]
        found: dict[str, Array] = {}
        for (case, exact, samples), most, usual in zip(self._seen, largest, spreads, strict=True):
            # a case of few numbers can be right by luck
            budgets = {
                "budget": np.array(LARGEST * max(most, float(np.median(largest)))),
                "spread": np.array(SPREAD * max(usual, float(np.median(spreads)))),
            }
            found |= _named(case, budgets | self._cache(case, exact, samples, cache_scales))
        return found

    def _cache(
        self,
        case: Case,
        exact: CaseOutputs,
        samples: Sequence[CaseOutputs],
        scales: Sequence[Array] | None,
    ) -> dict[str, Array]:
        """What every token wrote into the cache, (tokens of all rows, numbers), and how far each state may be off."""
        truth = list(self._by_token(case, exact, scales))
        if not truth:
            return {}
        errors = [
            [
                mean_square(ours - true)
                for ours, true in zip(self._by_token(case, sample, scales), truth, strict=True)
            ]
            for sample in samples
        ]
        least = [LEAST_STEPS * self._step * mean_square(true) for true in truth]
        return {
            "cache": np.concatenate(truth, axis=1).astype(np.float32),
            "cache_budget": np.maximum(CACHE * np.max(errors, axis=0), least),
        }

    def _by_token(
        self, case: Case, outputs: CaseOutputs, scales: Sequence[Array] | None
    ) -> Iterator[Float64s]:
        """Of each state that grows: row after row, token after token; as the cache holds it, in steps where it is int8."""
        rows = np.concatenate([np.nonzero(run.is_real)[0] for run in case.answers])
        order = np.argsort(rows, kind="stable")
        written = outputs.states[-len(case.answers) :]
        for index, spec in enumerate(self._moving):
            if not _grows(spec):
                continue
            values = np.concatenate([states[index] for states in written]).astype(
                np.float64
            )  # (tokens, H, D)
            if scales is not None:
                values /= scales[index].astype(np.float64)[:, :, 0]  # (1, H, 1, D)
            yield values[order].reshape(len(order), -1)


def _grows(state: StateTensor) -> bool:
    return "past_sequence_length" in state.shape


def _answers(outputs: CaseOutputs) -> Float64s:
    """The last position's, after the prefill and after each step."""
    return np.stack([main[:, -1].astype(np.float64) for main in outputs.main])


def _named(case: Case, parts: dict[str, Array]) -> dict[str, Array]:
    name = case.name.removeprefix("golden: ").replace(" ", "_")
    return {f"{name}.{part}": array for part, array in parts.items()}


def _stored(inputs: Array) -> Array:
    return inputs if inputs.dtype == np.int64 else inputs.astype(np.float32)
