"""Replays the golden vectors that export stored in the bundle: a check without torch, on the device itself.

golden.npz holds, for each case `k`: `k.input_ids` and `k.attention_mask` (B, T), left-padded; `k.decode_ids`
(n-1, B); `k.expected` (n, B, V), the last position's logits after the prefill and after each decode step;
`k.budget`, the largest difference allowed.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .bundle import Bundle, BundleError
from .devices import Device
from .engine import Graphs, open_engine

GOLDEN = "golden.npz"
_ARRAYS = ("input_ids", "attention_mask", "decode_ids", "expected", "budget")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    name: str
    steps: int  # the prefill and the decode steps
    error: float  # the largest difference of a logit; NaN where something was no number
    budget: float

    @property
    def passed(self) -> bool:
        return self.error <= self.budget  # False for NaN


def replay_golden(bundle: Bundle, device: Device, *, threads: int | None = None) -> list[CaseResult]:
    """Run every case through the prefill and the decode graph, each in its own session."""
    data = bundle.read(GOLDEN)
    if data is None:
        raise BundleError(f"{bundle.path} has no {GOLDEN}; export it again without --no-verify")
    cases = _read_cases(data, bundle.manifest.vocab_size)
    graphs = Graphs(bundle, device, threads=threads, lean=False)
    return [_replay(name, case, graphs) for name, case in sorted(cases.items())]


def _replay(name: str, case: Mapping[str, npt.NDArray[Any]], graphs: Graphs) -> CaseResult:
    ids, mask, expected = case["input_ids"], case["attention_mask"].astype(bool), case["expected"]
    rows = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
    engine = open_engine(graphs, len(rows), int(mask.sum(axis=1).max()) + len(expected))
    errors = [_difference(engine.prefill(rows).numpy(), expected[0])]
    for tokens, wanted in zip(case["decode_ids"], expected[1:], strict=True):
        errors.append(_difference(engine.decode(tokens).numpy(), wanted))
    worst = float("nan") if any(np.isnan(errors)) else max(errors)
    return CaseResult(name=name, steps=len(expected), error=worst, budget=float(case["budget"]))


def _difference(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    return float(np.abs(found.astype(np.float64) - expected).max())  # max keeps NaN


def _read_cases(data: bytes, vocab_size: int) -> dict[str, dict[str, npt.NDArray[Any]]]:
    cases: dict[str, dict[str, npt.NDArray[Any]]] = {}
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            for key in arrays.files:
                name, _, part = key.rpartition(".")
                cases.setdefault(name, {})[part] = arrays[key]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise BundleError(f"{GOLDEN} cannot be read: {error}") from error
    for name, case in cases.items():
        _check_case(name, case, vocab_size)
    if not cases:
        raise BundleError(f"{GOLDEN} holds no case")
    return cases


def _check_case(name: str, case: Mapping[str, npt.NDArray[Any]], vocab_size: int) -> None:
    if set(case) != set(_ARRAYS):
        raise BundleError(f"{GOLDEN}: case {name!r} holds {sorted(case)}, expected {sorted(_ARRAYS)}")
    ids, mask, expected, decode_ids = (
        case[part] for part in ("input_ids", "attention_mask", "expected", "decode_ids")
    )
    B, n = len(ids), len(expected) if expected.ndim else 0
    shapes_fit = ids.ndim == 2 and ids.size and mask.shape == ids.shape and case["budget"].shape == ()
    if not shapes_fit or n < 1 or expected.shape != (n, B, vocab_size) or decode_ids.shape != (n - 1, B):
        raise BundleError(f"{GOLDEN}: the arrays of case {name!r} do not fit together")
    if not mask[:, -1:].all() or (np.diff(mask.astype(int), axis=1) < 0).any():
        raise BundleError(f"{GOLDEN}: case {name!r} is not padded on the left")
