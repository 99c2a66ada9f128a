"""Golden vectors: replayed through both graphs, a fault in either is caught, and so is a damaged file."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import onnx
import pytest
from tiny_bundle import VOCAB, list_files, reference_logits, tiny_weights, write_bundle, write_manifest

from tfmx.runtime.bundle import Bundle, BundleError
from tfmx.runtime.devices import Device
from tfmx.runtime.golden import replay_golden
from tfmx.runtime.memory import estimate_memory

CPU = Device("cpu", "test")
WEIGHTS = tiny_weights()


def make_case(rows, decode_ids, budget=3e-5):
    T = max(map(len, rows))
    ids, mask = np.zeros((len(rows), T), np.int64), np.zeros((len(rows), T), np.int64)
    for i, row in enumerate(rows):
        ids[i, T - len(row) :], mask[i, T - len(row) :] = row, 1
    expected, paths = [], [list(row) for row in rows]
    for tokens in [None, *decode_ids]:
        if tokens is not None:
            for path, token in zip(paths, tokens, strict=True):
                path.append(token)
        expected.append([reference_logits(WEIGHTS, path)[-1] for path in paths])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decode_ids": np.asarray(decode_ids, np.int64).reshape(-1, len(rows)),
        "expected": np.asarray(expected, np.float32),
        "budget": np.float64(budget),
    }


CASES = {
    "single": make_case([[5, 9, 17]], [[3], [4]]),
    "ragged": make_case([[5, 9, 17, 3], [7]], [[3, 4], [5, 6], [8, 9]]),
    "prompt": make_case([[1]], []),
}


def pack(cases):
    file = io.BytesIO()
    np.savez(
        file, **{f"{name}.{part}": array for name, case in cases.items() for part, array in case.items()}
    )
    return file.getvalue()


def bundle_with(folder, data, flavour="capacity", weights=None):
    write_bundle(folder, flavour, weights=weights, extra_files={"golden.npz": data})
    return Bundle.open(folder)


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_a_right_bundle_passes_every_case(flavour, tmp_path):
    results = replay_golden(bundle_with(tmp_path / "b", pack(CASES), flavour), CPU, threads=1)
    assert [(result.name, result.steps) for result in results] == [
        ("prompt", 1),
        ("ragged", 4),
        ("single", 3),
    ]
    assert all(result.passed for result in results)
    assert all(0 < result.error < 3e-5 for result in results)


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_a_changed_weight_fails(flavour, tmp_path):
    weights = tiny_weights()
    weights["1.down"][3, 4] *= 1.1
    results = replay_golden(bundle_with(tmp_path / "b", pack(CASES), flavour, weights), CPU, threads=1)
    assert not all(result.passed for result in results)


def test_a_weight_that_is_no_number_fails(tmp_path):
    weights = tiny_weights()
    weights["norm"][0] = np.nan
    results = replay_golden(bundle_with(tmp_path / "b", pack(CASES), weights=weights), CPU, threads=1)
    assert all(np.isnan(result.error) for result in results)
    assert not any(result.passed for result in results)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_a_fault_in_either_graph_is_caught(flavour, role, tmp_path):
    """One activation swapped in one graph: normal runs may use only the other, the replay uses both."""
    folder = tmp_path / "b"
    manifest = write_bundle(folder, flavour, extra_files={"golden.npz": pack({"single": CASES["single"]})})
    model = onnx.load(folder / f"{role}.onnx", load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "Sigmoid").op_type = "Tanh"
    (folder / f"{role}.onnx").write_bytes(model.SerializeToString())
    write_manifest(folder, replace(manifest, files=list_files(folder)))
    (result,) = replay_golden(Bundle.open(folder), CPU, threads=1)
    assert not result.passed


def without(part):
    case = dict(CASES["single"])
    del case[part]
    return {"c": case}


def with_bytes(data, place, value):
    """Other bytes at a place of each entry of the zip file's list."""
    found = bytearray(data)
    at = found.find(b"PK\x01\x02")
    while at >= 0:
        found[at + place : at + place + len(value)] = value
        at = found.find(b"PK\x01\x02", at + 1)
    return bytes(found)


def changed(part, value):
    return {"c": {**CASES["single"], part: value}}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", r"golden\.npz cannot be read"),
        (b"PK\x03\x04 nonsense", r"golden\.npz cannot be read"),
        (pack(CASES)[:-300], r"golden\.npz cannot be read"),
        (
            pack({"c": {"input_ids": np.asarray([object()], object)}}),
            r"golden\.npz cannot be read",
        ),  # no pickles
        (
            with_bytes(pack(CASES), 6, b"\xe8"),
            r"golden\.npz cannot be read: zip file version",
        ),  # what it needs
        (with_bytes(pack(CASES), 8, b"\x01"), r"golden\.npz cannot be read: .* encrypted"),
        (with_bytes(pack(CASES), 10, b"\x63"), r"golden\.npz cannot be read: .* compression"),
        (with_bytes(pack(CASES), 10, b"\x08"), r"golden\.npz cannot be read: "),  # said to be deflated
        (pack(CASES).replace(b"'shape': (", b"'shape': ["), r"golden\.npz cannot be read: "),
        (pack({}), r"golden\.npz holds no case"),
        (pack(without("budget")), r"golden\.npz: case 'c' holds .*, expected"),
        (
            pack(changed("decode_ids", np.zeros((1, 1), np.int64))),
            r"the arrays of case 'c' do not fit together",
        ),
        (
            pack(changed("attention_mask", np.ones((1, 2), np.int64))),
            r"the arrays of case 'c' do not fit together",
        ),
        (
            pack(changed("expected", CASES["single"]["expected"][..., :-1])),
            r"the arrays of case 'c' do not fit together",
        ),
        (pack(changed("expected", np.float32(1))), r"the arrays of case 'c' do not fit together"),
        (pack(changed("budget", np.complex64(1))), r"case 'c' has budget of complex64, expected numbers"),
        (pack(changed("expected", CASES["single"]["expected"] * 1j)), r"has expected of complex"),
        (pack(changed("input_ids", np.asarray([["5", "9", "17"]]))), r"has input_ids of <U2"),
        (pack(changed("decode_ids", np.zeros((2, 1), "M8[s]"))), r"has decode_ids of datetime64"),
        (pack(changed("attention_mask", np.asarray([[1, 1, 0]]))), r"case 'c' is not padded on the left"),
        (pack(changed("attention_mask", np.asarray([[1, 0, 1]]))), r"case 'c' is not padded on the left"),
    ],
)
def test_a_file_that_cannot_be_right_is_an_error(data, line, tmp_path):
    with pytest.raises(BundleError, match=line) as caught:
        replay_golden(bundle_with(tmp_path / "b", data), CPU)
    assert "\n" not in str(caught.value)


def test_a_bundle_without_golden_vectors_says_so(tmp_path):
    write_bundle(tmp_path / "b", "append")
    with pytest.raises(BundleError, match=r"has no golden\.npz; export it again without --no-verify$"):
        replay_golden(Bundle.open(tmp_path / "b"), CPU)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_memory_estimate_counts_weights_and_cache(dtype, tmp_path):
    write_bundle(tmp_path / "b", "capacity", dtype=dtype)
    bundle = Bundle.open(tmp_path / "b")
    estimate = estimate_memory(bundle)
    size = 4 if dtype == "fp32" else 2
    assert estimate.weights == bundle.manifest.files["weights.bin"].size
    assert estimate.cache_per_token == 2 * 2 * 2 * 16 * size  # layers, key and value, heads, head size
    assert estimate.cache_at_max_context == estimate.cache_per_token * 96
    assert estimate.packed == (2 * (32 * 128 + 64 * 32 + 3 * 32 * 48) + 32 * VOCAB) * size
    assert estimate.single_sequence == estimate.packed + estimate.cache_at_max_context
