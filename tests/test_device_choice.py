"""Tokens chosen by the bundle's graphs, with the CPU in the GPU's place, are those that the host would choose."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_bundle import VOCAB, write_bundle

import tfmx
from tfmx.runtime.bundle import Bundle
from tfmx.runtime.device_choice import Chooser, DeviceLogits, open_chooser
from tfmx.runtime.devices import Device
from tfmx.runtime.sampling import NoTokenError, Sampler, SamplingOptions

CPU = Device("cpu", "test")
# Those with top-k, top-p or min-p: there, the host goes through the tokens by likelihood too.
ORDERED = {
    "top-k": {"temperature": 0.9, "top_k": 20},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "min-p": {"temperature": 0.7, "min_p": 0.05},
    "all three": {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 1.0,
        "top_k": 300,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
    "bias": {"temperature": 1.0, "top_k": 300, "logit_bias": {3: 2.0, 9: -float("inf")}},
    "greedy with penalties": {"repetition_penalty": 1.5},
}


@pytest.fixture(scope="module")
def chooser(tmp_path_factory) -> Chooser:
    folder = tmp_path_factory.mktemp("choice") / "bundle"
    write_bundle(folder, "capacity", select=True)
    return open_chooser(Bundle.open(folder), CPU)


def on_device(rows: np.ndarray, chooser: Chooser) -> DeviceLogits:
    return DeviceLogits(rows.ctypes.data, rows.shape, lambda: rows, chooser)


@pytest.mark.parametrize("name", list(ORDERED))
def test_the_device_draws_what_the_host_draws(name: str, chooser: Chooser) -> None:
    options = SamplingOptions(**ORDERED[name])
    prompts = [[1, 2, 3], [7], [5, 5]]
    host = [Sampler(options, prompt, 11) for prompt in prompts]
    device = [Sampler(options, prompt, 11) for prompt in prompts]
    random, differ = np.random.default_rng(0), 0
    for _ in range(100):
        rows = random.normal(0, 3, (3, VOCAB)).astype(np.float32)
        drawn = on_device(rows, chooser).draw([sampler.next_draw() for sampler in device], options)
        assert drawn.finite.all()
        for sampler, twin, row, token, logit in zip(
            host, device, rows, drawn.tokens, drawn.logits, strict=True
        ):
            expected = sampler(row).token_id
            differ += expected != token
            twin.took(expected, float(logit))  # stay together after a difference
            if options.temperature == 0 and expected != token:
                pytest.fail("greedy differs")
    assert differ <= 2  # of 300: a float32 sum may fall on the other side of a border


def test_without_cuts_tokens_come_as_often_as_they_are_likely(chooser: Chooser) -> None:
    row = np.full(VOCAB, -np.inf, np.float32)
    row[[4, 100, 319]] = np.log([0.6, 0.3, 0.1])
    rows = np.repeat(row[None], 1000, axis=0)
    rows[rows == -np.inf] = -1e4  # finite, and as good as impossible
    options = SamplingOptions(temperature=1.0)
    sampler = Sampler(options, (), 5)
    drawn = on_device(rows, chooser).draw([sampler.next_draw() for _ in rows], options)
    counts = {token: int((drawn.tokens == token).sum()) for token in (4, 100, 319)}
    assert sum(counts.values()) == 1000
    assert abs(counts[4] - 600) < 60
    assert abs(counts[100] - 300) < 60


def test_logits_that_are_not_finite_are_noticed(chooser: Chooser) -> None:
    rows = np.zeros((2, VOCAB), np.float32)
    rows[1, 5] = np.nan
    options = SamplingOptions(temperature=1.0)
    draws = [Sampler(options, (), 1).next_draw() for _ in rows]
    assert on_device(rows, chooser).draw(draws, options).finite.tolist() == [True, False]


def test_a_bias_that_bans_everything_is_an_error(chooser: Chooser) -> None:
    options = SamplingOptions(temperature=1.0, logit_bias=dict.fromkeys(range(VOCAB), -float("inf")))
    sampler = Sampler(options, (), 1)
    drawn = on_device(np.zeros((1, VOCAB), np.float32), chooser).draw([sampler.next_draw()], options)
    with pytest.raises(NoTokenError):
        sampler.took(int(drawn.tokens[0]), float(drawn.logits[0]))


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_a_whole_generation_is_the_same(flavour: str, tmp_path) -> None:
    write_bundle(tmp_path / "b", flavour, select=True)
    options = SamplingOptions(temperature=0.9, top_k=30, repetition_penalty=1.2, seed=3, ignore_eos=True)
    prompts = [[5, 9, 17], [7], list(range(1, 30))]
    with tfmx.load(tmp_path / "b") as model:
        expected = model.generate_batch(prompts, options, max_new_tokens=20)
        graphs = model._open_graphs()
        graphs.chooser = open_chooser(model.bundle, CPU)
        found = model.generate_batch(prompts, options, max_new_tokens=20)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
