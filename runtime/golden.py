"""Replays the golden vectors that export stored in the bundle: a check without torch, on the device itself.

golden.npz holds, for each case `k`, what the bundle's kind asks for:

    k.input_ids | k.input_features | k.pixel_values   (B, T), (B, T, F), (B, C, H, W), padded on the left
    k.attention_mask     (B, T); not for images
    k.target_ids         (B, n): what the decoder of an encoder-decoder reads first
    k.decode_ids         (steps, B), k.decode_features (steps, B, F): then, one by one; not for encoders
    k.expected           (1 + steps, B, size): the last position's, after the prefill and after each decode step;
                         of an encoder its main output, whose pads are not compared
    k.budget             the largest difference allowed
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .apply import apply_encoder, without_pads
from .bundle import Bundle, BundleError
from .devices import Device
from .encoder import encode
from .engine import Graphs, open_engine
from .manifest import Manifest
from .session import NUMPY_DTYPES

GOLDEN = "golden.npz"

_Case = Mapping[str, npt.NDArray[Any]]


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
    return [_replay(name, case, graphs) for name, case in sorted(cases.items())]


def _replay(name: str, case: _Case, graphs: Graphs) -> CaseResult:
    replay = _replay_encoder if graphs.manifest.kind == "encoder" else _replay_decoder
    errors = replay(case, graphs)
    worst = float("nan") if any(np.isnan(errors)) else max(errors)
    steps = 1 if graphs.manifest.kind == "encoder" else len(errors)
    return CaseResult(name=name, steps=steps, error=worst, budget=float(case["budget"]))


def _replay_encoder(case: _Case, graphs: Graphs) -> list[float]:
    expected, mask = case["expected"], _mask(case)
    found = apply_encoder(graphs, _rows(case, graphs.manifest))
    return [
        _difference(outputs[graphs.manifest.outputs.name], without_pads(expected, mask, row))
        for row, outputs in enumerate(found)
    ]


def _replay_decoder(case: _Case, graphs: Graphs) -> list[float]:
    manifest, rows, expected = graphs.manifest, _rows(case, graphs.manifest), case["expected"]
    encoded = None
    if manifest.kind == "encoder-decoder":
        encoded = encode(graphs, rows, manifest.fixed_outputs)
        rows = list(case["target_ids"])
    engine = open_engine(graphs, len(rows), max(map(len, rows)) + len(expected), encoded)
    errors = [_difference(engine.prefill(rows).numpy(), expected[0])]
    for new, wanted in zip(case[_decode_name(manifest)], expected[1:], strict=True):
        errors.append(_difference(engine.decode(new).numpy(), wanted))
    return errors


def _rows(case: _Case, manifest: Manifest) -> list[npt.NDArray[Any]]:
    """The inputs without pads, as the graph takes them."""
    role = "prefill" if manifest.kind == "decoder" else "encode"
    info = manifest.graphs[role].input(manifest.inputs.name)
    assert info is not None
    data = case[manifest.inputs.name].astype(NUMPY_DTYPES[info.dtype])
    if manifest.inputs.kind == "images":
        return list(data)
    return [row[real] for row, real in zip(data, _mask(case).astype(bool), strict=True)]


def _mask(case: _Case) -> npt.NDArray[np.int64]:
    """(B, T); of images (B, 0)."""
    mask = case.get("attention_mask", np.zeros((len(case["expected"]), 0)))
    return mask.astype(np.int64)


def _decode_name(manifest: Manifest) -> str:
    return "decode_features" if manifest.main_input("prefill") == "input_features" else "decode_ids"


def _difference(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    if found.shape != expected.shape:
        raise BundleError(f"{GOLDEN} expects {expected.shape} where the graphs give {found.shape}")
    return float(np.abs(found.astype(np.float64) - expected).max())  # max keeps NaN


def _read_cases(data: bytes, manifest: Manifest) -> dict[str, dict[str, npt.NDArray[Any]]]:
    cases: dict[str, dict[str, npt.NDArray[Any]]] = {}
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            for key in arrays.files:
                name, _, part = key.rpartition(".")
                cases.setdefault(name, {})[part] = arrays[key]
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # a damaged zip file or array fails in ten ways, and each has a type of its own
        raise BundleError(f"{GOLDEN} cannot be read: {error}") from error
    for name, case in cases.items():
        _check_case(name, case, manifest)
    if not cases:
        raise BundleError(f"{GOLDEN} holds no case")
    return cases


def _check_case(name: str, case: _Case, manifest: Manifest) -> None:
    parts = {manifest.inputs.name, "expected", "budget"}
    parts |= {"attention_mask"} if manifest.inputs.kind != "images" else set()
    parts |= {_decode_name(manifest)} if manifest.kind != "encoder" else set()
    parts |= {"target_ids"} if manifest.kind == "encoder-decoder" else set()
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
