"""Replays the golden vectors that export stored in the bundle: a check without torch, on the device itself.

golden.npz holds, for each case `k`, what the bundle's kind asks for:

    k.input_ids | k.input_features | k.pixel_values   (B, T), (B, T, F), (B, C, H, W), padded on the left
    k.attention_mask     (B, T); not for images, nor where the encode graph takes none
    k.target_ids         (B, n): what the decoder of an encoder-decoder reads first
    k.decode_ids         (steps, B), k.decode_features (steps, B, F): then, one by one; not for encoders
    k.expected           (1 + steps, B, size): the last position's, after the prefill and after each decode step;
                         of an encoder its main output, whose pads are not compared
    k.budget             the largest difference allowed

and, where graphs round on the way, which leaves room for many a fault in the largest difference of any one number:

    k.spread             the largest root mean square allowed of the difference less its mean over the outputs
    k.cache              (tokens of all rows, numbers): what each token wrote into the states that grow, side by side in the
                         manifest's order, row after row; of an int8 cache in its steps, unrounded
    k.cache_budget       (states that grow,): the largest root mean square allowed of each one's difference
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .append_engine import AppendEngine
from .apply import apply_encoder, without_pads
from .bundle import Bundle, BundleError
from .capacity_engine import CapacityEngine
from .devices import Device
from .encoder import encode
from .engine import Graphs, open_engine
from .manifest import Manifest
from .manifest_parts import StateInfo
from .session import NUMPY_DTYPES

GOLDEN = "golden.npz"

_Case = Mapping[str, npt.NDArray[Any]]
_Floats = npt.NDArray[np.float64]
_Engine = AppendEngine | CapacityEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    name: str
    steps: int  # the prefill and the decode steps; 1 for an encoder
    error: float  # the largest difference of an output; NaN where something was no number
    budget: float

    @property
    def passed(self) -> bool:
        return self.error <= self.budget  # False for NaN


def replay_golden(bundle: Bundle, device: Device, *, threads: int | None = None) -> list[CaseResult]:
    """Run every case through every graph, each in its own session."""
    data = bundle.read(GOLDEN)
    if data is None:
        raise BundleError(f"{bundle.path} has no {GOLDEN}; export it again without --no-verify")
    cases = _read_cases(data, bundle.manifest)
    graphs = Graphs(bundle, device, threads=threads, lean=False)
    return [result for name, case in sorted(cases.items()) for result in _replay(name, case, graphs)]


def _replay(name: str, case: _Case, graphs: Graphs) -> list[CaseResult]:
    """The case by its largest difference, then by what else it may be looked at."""
    differences, engine = (_replay_encoder if graphs.manifest.kind == "encoder" else _replay_decoder)(
        case, graphs
    )
    steps = 1 if engine is None else len(differences)
    largest = np.max([np.abs(difference).max() for difference in differences])  # np.max keeps NaN
    found = {name: (float(largest), float(case["budget"]))}
    if "spread" in case:
        found[f"{name}: mean square"] = (spread(np.stack(differences)), float(case["spread"]))
    if "cache" in case:
        assert engine is not None
        state, error, budget = _cache_error(case, engine.held(), graphs.manifest)
        found[f"{name}: {state}"] = (error, budget)
    return [
        CaseResult(name=label, steps=steps, error=error, budget=budget)
        for label, (error, budget) in found.items()
    ]


def _replay_encoder(case: _Case, graphs: Graphs) -> tuple[list[_Floats], None]:
    expected, mask = case["expected"], _mask(case)
    found = apply_encoder(graphs, _rows(case, graphs.manifest))
    return [
        _difference(outputs[graphs.manifest.outputs.name], without_pads(expected, mask, row))
        for row, outputs in enumerate(found)
    ], None


def _replay_decoder(case: _Case, graphs: Graphs) -> tuple[list[_Floats], _Engine]:
    """The differences after the prefill and after each step, and what has run them."""
    manifest, rows, expected = graphs.manifest, _rows(case, graphs.manifest), case["expected"]
    encoded = None
    if manifest.kind == "encoder-decoder":
        encoded = encode(graphs, rows, manifest.fixed_outputs)
        rows = list(case["target_ids"])
    engine = open_engine(graphs, len(rows), max(map(len, rows)) + len(expected), encoded)
    assert isinstance(engine, _Engine)  # which can be asked what it holds
    differences = [_difference(engine.prefill(rows).numpy(), expected[0])]
    for new, wanted in zip(case[_decode_name(manifest)], expected[1:], strict=True):
        differences.append(_difference(engine.decode(new).numpy(), wanted))
    return differences, engine


def _cache_error(
    case: _Case, held: Sequence[npt.NDArray[Any]], manifest: Manifest
) -> tuple[str, float, float]:
    """Of the state that is worst: its name, its error, and what is allowed."""
    names = [state.present for state in _growing(manifest)]
    ends = np.cumsum([values.shape[1] for values in held])
    expected = np.split(case["cache"].astype(np.float64), ends[:-1], axis=1)
    errors = [mean_square(_difference(ours, wanted)) for ours, wanted in zip(held, expected, strict=True)]
    shares = [error / budget for error, budget in zip(errors, case["cache_budget"], strict=True)]
    worst = int(np.argmax(shares))  # NaN is the largest
    return names[worst], errors[worst], float(case["cache_budget"][worst])


def mean_square(values: npt.NDArray[Any]) -> float:
    """Its root."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def spread(difference: npt.NDArray[Any]) -> float:
    """The mean square of what outputs (..., size) differ in, less what all of a row have in common."""
    return mean_square(difference - difference.mean(axis=-1, keepdims=True))


def _growing(manifest: Manifest) -> list[StateInfo]:
    return [state for state in manifest.state if state.growth in {"append", "capacity"}]


def _rows(case: _Case, manifest: Manifest) -> list[npt.NDArray[Any]]:
    """The inputs without pads, as the graph takes them."""
    role = "prefill" if manifest.kind == "decoder" else "encode"
    info = manifest.graphs[role].input(manifest.inputs.name)
    assert info is not None
    data = case[manifest.inputs.name].astype(NUMPY_DTYPES[info.dtype])
    if not manifest.sees_pads:
        return list(data)
    return [row[real] for row, real in zip(data, _mask(case).astype(bool), strict=True)]


def _mask(case: _Case) -> npt.NDArray[np.int64]:
    """(B, T); (B, 0) where there is none."""
    mask = case.get("attention_mask", np.zeros((len(case["expected"]), 0)))
    return mask.astype(np.int64)


def _decode_name(manifest: Manifest) -> str:
    return "decode_features" if manifest.main_input("prefill") == "input_features" else "decode_ids"


def _difference(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> _Floats:
    if found.shape != expected.shape:
        raise BundleError(f"{GOLDEN} expects {expected.shape} where the graphs give {found.shape}")
    difference: _Floats = np.subtract(found, expected, dtype=np.float64)
    return difference


def _read_cases(data: bytes, manifest: Manifest) -> dict[str, dict[str, npt.NDArray[Any]]]:
    cases: dict[str, dict[str, npt.NDArray[Any]]] = {}
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            for key in arrays.files:
                name, _, part = key.rpartition(".")
                cases.setdefault(name, {})[part] = arrays[key]
    except MemoryError:
        raise
    except Exception as error:  # a damaged zip file or array fails in ten ways, each of a type of its own
        raise BundleError(f"{GOLDEN} cannot be read: {error}") from error
    for name, case in cases.items():
        _check_case(name, case, manifest)
    if not cases:
        raise BundleError(f"{GOLDEN} holds no case")
    return cases


def _check_case(name: str, case: _Case, manifest: Manifest) -> None:
    parts = {manifest.inputs.name, "expected", "budget"}
    parts |= {"attention_mask"} if manifest.sees_pads else set()
    parts |= {_decode_name(manifest)} if manifest.kind != "encoder" else set()
    parts |= {"target_ids"} if manifest.kind == "encoder-decoder" else set()
    if "spread" in case and manifest.generates:  # graphs that round on the way
        parts |= {"spread"} | ({"cache", "cache_budget"} if _growing(manifest) else set())
    if set(case) != parts:
        raise BundleError(f"{GOLDEN}: case {name!r} holds {sorted(case)}, expected {sorted(parts)}")
    for part, array in case.items():
        if array.dtype.kind not in "biuf":
            raise BundleError(f"{GOLDEN}: case {name!r} has {part} of {array.dtype}, expected numbers")
    if not _shapes_fit(case, manifest):
        raise BundleError(f"{GOLDEN}: the arrays of case {name!r} do not fit together")
    if "attention_mask" in parts:
        mask = case["attention_mask"]
        if not mask[:, -1:].all() or (np.diff(mask.astype(int), axis=1) < 0).any():
            raise BundleError(f"{GOLDEN}: case {name!r} is not padded on the left")


def _shapes_fit(case: _Case, manifest: Manifest) -> bool:
    data, expected, outputs = case[manifest.inputs.name], case["expected"], manifest.outputs
    lead = 1 if manifest.inputs.kind == "images" else 2
    if not data.size or data.ndim < lead or data.shape[lead:] != manifest.inputs.shape:
        return False
    if case["budget"].shape != () or not expected.ndim or expected.shape[-1] != outputs.size:
        return False
    if "attention_mask" in case and case["attention_mask"].shape != data.shape[:2]:
        return False
    if not _more_fits(case, manifest):
        return False
    B, n = len(data), len(expected)
    if manifest.kind == "encoder":  # a class token may stand before the input
        T = 0 if lead == 1 else data.shape[1]
        shape = (B, outputs.size) if outputs.pooled else (B, *expected.shape[1:2], outputs.size)
        return expected.shape == shape and (outputs.pooled or expected.shape[1] >= T)
    target = case.get("target_ids", np.zeros((B, 1)))
    if target.ndim != 2 or len(target) != B or not target.size:
        return False
    tail = manifest.inputs.shape if manifest.kind == "decoder" else ()
    return expected.shape == (n, B, outputs.size) and case[_decode_name(manifest)].shape == (n - 1, B, *tail)


def _more_fits(case: _Case, manifest: Manifest) -> bool:
    """What is compared where graphs round on the way."""
    parts = [case[part] for part in ("spread", "cache", "cache_budget") if part in case]
    if not all(np.issubdtype(part.dtype, np.floating) for part in parts):
        return False
    if case.get("spread", case["budget"]).shape != ():
        return False
    if "cache" not in case:
        return True
    states = _growing(manifest)
    numbers = sum(math.prod(dim for dim in state.shape if isinstance(dim, int)) for state in states)
    first = case["target_ids"].size if "target_ids" in case else int(_mask(case).sum())
    tokens = first + len(case["expected"][1:]) * len(case[manifest.inputs.name])
    budgets = case["cache_budget"]
    return (
        case["cache"].shape == (tokens, numbers)
        and budgets.shape == (len(states),)
        and bool((budgets > 0).all())
    )
