"""Golden vectors and memory of the kinds that are no language model: right ones pass, a changed weight fails."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_kinds
from test_golden import pack
from tiny_kinds import (
    FEATURES,
    IMAGE,
    LENGTH,
    START,
    WIDTH,
    D,
    H,
    image_classes,
    kind_weights,
    pair_outputs,
    running_values,
    token_classes,
    vector_values,
)

from tfmx.runtime.bundle import Bundle, BundleError
from tfmx.runtime.devices import Device
from tfmx.runtime.golden import replay_golden
from tfmx.runtime.inputs import pad_left
from tfmx.runtime.memory import estimate_memory

CPU = Device("cpu", "test")
W = kind_weights()
RNG = np.random.default_rng(5)
IDS = [np.asarray(row) for row in ([5, 9, 17, 3], [7], [8, 8])]
VECTORS = [RNG.standard_normal((T, FEATURES)).astype(np.float32) for T in (4, 1, 2)]
BUDGET = {"budget": np.float64(5e-5)}


def token_case():
    ids, mask = pad_left(IDS, (), np.int64)
    expected = np.asarray([token_classes(W, row)[0] for row in IDS], np.float32)
    return {"input_ids": ids, "attention_mask": mask, "expected": expected, **BUDGET}


def vector_case():
    data, mask = pad_left(VECTORS, (FEATURES,), np.float32)
    expected, _ = pad_left([vector_values(W, row) for row in VECTORS], (2,), np.float32)
    expected[mask == 0] = np.nan  # pads are not compared
    return {"input_features": data, "attention_mask": mask, "expected": expected, **BUDGET}


def image_case():
    images = RNG.standard_normal((2, *IMAGE)).astype(np.float32)
    expected = np.asarray([image_classes(W, image)[0] for image in images], np.float32)
    return {"pixel_values": images, "expected": expected, **BUDGET}


def recurrent_case():
    data, mask = pad_left(VECTORS, (FEATURES,), np.float32)
    more = RNG.standard_normal((2, 3, FEATURES)).astype(np.float32)  # two steps
    expected = [
        [running_values(W, [*row, *more[:step, i]])[-1] for i, row in enumerate(VECTORS)] for step in range(3)
    ]
    arrays = {"input_features": data, "attention_mask": mask, "decode_features": more}
    return {**arrays, "expected": np.asarray(expected, np.float32), **BUDGET}


def pair_case():
    ids, mask = pad_left(IDS, (), np.int64)
    targets, more = np.asarray([[START, 3], [START, 4], [START, 5]]), np.asarray([[6, 7, 8], [9, 10, 11]])
    expected = [
        [pair_outputs(W, row, [*targets[i, 1:], *more[:step, i]])["logits"][-1] for i, row in enumerate(IDS)]
        for step in range(3)
    ]
    arrays = {"input_ids": ids, "attention_mask": mask, "target_ids": targets, "decode_ids": more}
    return {**arrays, "expected": np.asarray(expected, np.float32), **BUDGET}


KINDS = {
    "token_classifier": (token_case, 1, "classes"),
    "vector_regressor": (vector_case, 1, "values"),
    "image_classifier": (image_case, 1, "patch"),
    "recurrent_regressor": (recurrent_case, 3, "recur"),
    "encoder_decoder": (pair_case, 3, "cross.v"),
}


def bundle_of(folder, name, cases, weights=None):
    getattr(tiny_kinds, f"write_{name}")(folder, weights=weights, golden=pack(cases))
    return Bundle.open(folder)


@pytest.mark.parametrize("name", KINDS)
def test_a_right_bundle_passes(name, tmp_path):
    make, steps, _ = KINDS[name]
    (result,) = replay_golden(bundle_of(tmp_path / "b", name, {"case": make()}), CPU, threads=1)
    assert (result.name, result.steps) == ("case", steps)
    assert 0 < result.error < 5e-5
    assert result.passed


@pytest.mark.parametrize("name", KINDS)
def test_a_changed_weight_fails(name, tmp_path):
    make, _, matrix = KINDS[name]
    weights = kind_weights()
    weights[matrix][1, 0] += 0.01
    (result,) = replay_golden(bundle_of(tmp_path / "b", name, {"case": make()}, weights), CPU, threads=1)
    assert not result.passed


def test_one_wrong_row_of_a_batch_fails(tmp_path):
    case = vector_case()
    case["expected"][1, -1, 0] += 1e-3
    (result,) = replay_golden(bundle_of(tmp_path / "b", "vector_regressor", {"case": case}), CPU, threads=1)
    assert not result.passed
    case["expected"][1, -1, 0] = np.nan
    (result,) = replay_golden(bundle_of(tmp_path / "c", "vector_regressor", {"case": case}), CPU, threads=1)
    assert np.isnan(result.error)
    assert not result.passed


def test_an_expectation_of_another_length_is_an_error(tmp_path):
    case = vector_case()
    case["expected"] = np.concatenate((case["expected"], case["expected"]), axis=1)
    bundle = bundle_of(tmp_path / "b", "vector_regressor", {"case": case})
    with pytest.raises(BundleError, match=r"golden\.npz expects \(\d+, 2\) where the graphs give \(\d+, 2\)"):
        replay_golden(bundle, CPU, threads=1)


def test_a_target_of_no_tokens_is_an_error(tmp_path):
    case = pair_case()
    case["target_ids"] = case["target_ids"][:, :0]
    bundle = bundle_of(tmp_path / "b", "encoder_decoder", {"case": case})
    with pytest.raises(BundleError, match="the arrays of case 'case' do not fit together"):
        replay_golden(bundle, CPU, threads=1)


def without(case, part):
    return {name: array for name, array in case.items() if name != part}


@pytest.mark.parametrize(
    ("name", "case", "line"),
    [
        ("token_classifier", without(token_case(), "attention_mask"), r"case 'c' holds .*, expected"),
        (
            "token_classifier",
            {**token_case(), "decode_ids": np.zeros((1, 3))},
            r"case 'c' holds .*, expected",
        ),
        (
            "image_classifier",
            {**image_case(), "attention_mask": np.ones((2, 7))},
            r"case 'c' holds .*, expected",
        ),
        ("encoder_decoder", without(pair_case(), "target_ids"), r"case 'c' holds .*, expected"),
        (
            "token_classifier",
            {**token_case(), "expected": np.zeros((2, 4))},
            r"case 'c' do not fit together$",
        ),
        (
            "token_classifier",
            {**token_case(), "expected": np.zeros((3, 5, 4))},
            r"case 'c' do not fit together$",
        ),
        (
            "vector_regressor",
            {**vector_case(), "expected": np.zeros((3, 2))},
            r"case 'c' do not fit together$",
        ),
        ("vector_regressor", {**vector_case(), "expected": np.zeros((3, 3, 2))}, r"do not fit together$"),
        (
            "vector_regressor",
            {**vector_case(), "input_features": np.zeros((3, 4, 2))},
            r"case 'c' do not fit together$",
        ),
        (
            "image_classifier",
            {**image_case(), "pixel_values": np.zeros((2, 3, 8, 8))},
            r"do not fit together$",
        ),
        (
            "recurrent_regressor",
            {**recurrent_case(), "decode_features": np.zeros((2, 3))},
            r"do not fit together$",
        ),
        ("encoder_decoder", {**pair_case(), "target_ids": np.zeros((2, 2))}, r"do not fit together$"),
        (
            "vector_regressor",
            {**vector_case(), "attention_mask": np.asarray([[1, 1, 1, 0]] * 3)},
            r"case 'c' is not padded on the left$",
        ),
    ],
)
def test_a_case_that_cannot_be_right_is_an_error(name, case, line, tmp_path):
    with pytest.raises(BundleError, match=line) as caught:
        replay_golden(bundle_of(tmp_path / "b", name, {"c": case}), CPU)
    assert "\n" not in str(caught.value)


def test_memory_of_every_kind(tmp_path):
    def estimate(name):
        getattr(tiny_kinds, f"write_{name}")(tmp_path / name)
        return estimate_memory(Bundle.open(tmp_path / name))

    square = 4 * WIDTH * WIDTH
    encoder = estimate("token_classifier")
    assert encoder.packed == 4 * square + 4 * WIDTH * 4
    assert encoder.single_sequence == encoder.packed
    recurrent = estimate("recurrent_regressor")
    assert (recurrent.constant_state, recurrent.cache_per_token) == (4 * WIDTH, 0)
    assert recurrent.single_sequence == recurrent.packed + 4 * WIDTH
    graphs = Bundle.open(tmp_path / "recurrent_regressor")  # its steps have a session of their own
    assert recurrent.packed == sum(graphs.summary(role).packable_bytes for role in ("prefill", "decode")) > 0
    pair = estimate("encoder_decoder")
    assert pair.cache_per_token == 2 * 4 * H * D
    assert pair.fixed_state == 2 * 4 * H * D * LENGTH
    assert pair.packed == (4 + 2) * square + (4 + 2) * square + 4 * WIDTH * tiny_kinds.TARGETS
    assert pair.single_sequence == pair.packed + pair.fixed_state + pair.cache_at_max_context
