"""Guesses from the text itself, and how many of them are worth a run: from costs and hits, on a clock of our own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tfmx.runtime import speculation
from tfmx.runtime.draft_length import HitRates, RunCosts
from tfmx.runtime.drafters import PromptLookup
from tfmx.runtime.engine import HostLogits
from tfmx.runtime.speculation import SpeculativeEngine

# --- guesses from the text -------------------------------------------------------------------------------


def looked_up(text, count=4):
    drafter = PromptLookup()
    drafter.read(text)
    return drafter.trust(), drafter.draft(count) if drafter.trust() else []


def test_prompt_lookup_guesses_what_came_after_the_longest_match():
    assert looked_up([1, 2, 3, 4, 5, 9, 1, 2, 3]) == (3, [4, 5, 9, 1])
    assert looked_up([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]) == (3, [3, 8, 1, 2])  # the longest,
    assert looked_up([6, 1, 2, 3, 7, 1, 2, 4, 8, 1, 2]) == (2, [4, 8, 1, 2])  # or else the latest
    assert looked_up([1, 2, 3, 4]) == (0, [])
    assert looked_up([1]) == looked_up([]) == (0, [])
    assert looked_up([3, 3, 3]) == (2, [3, 3, 3, 3])  # a loop goes on
    assert looked_up([1, 2, 5, 1, 2, 5, 1, 2], 7) == (5, [5, 1, 2, 5, 1, 2, 5])


def test_prompt_lookup_learns_as_the_text_grows():
    drafter = PromptLookup()
    for token in [1, 2, 3, 9, 1]:
        drafter.read([token])
        assert drafter.trust() == 0
    drafter.read([2])
    assert (drafter.trust(), drafter.draft(2)) == (2, [3, 9])


# --- how long a draft is ---------------------------------------------------------------------------------

# What runs cost, in steps: SmolLM2 on 2 cores in fp32, int4 at accuracy level 4 and at level 1.
PROFILES = {
    "fp32": {1: 1.0, 2: 1.14, 5: 1.36, 9: 1.74, 17: 2.21, 32: 3.4},
    "int4": {1: 1.0, 2: 1.66, 5: 2.61, 9: 3.84, 17: 6.29, 32: 11.0},
    "jump": {1: 1.0, 2: 1.95, 5: 2.24, 9: 2.62, 17: 3.3, 32: 4.4},
}


class TimedEngine:
    """Computes nothing; runs take the time that a profile says, give or take a little."""

    can_trim = True

    def __init__(self, profile, clock):
        self.lengths = [0]
        self.profile, self.clock, self.rng = profile, clock, np.random.default_rng(0)

    def prefill(self, rows):
        return HostLogits(self.score(rows[0])["logits"][-1:])

    def decode(self, tokens):
        return HostLogits(self.score(tokens)["logits"])

    def score(self, row, extras=()):
        steps = np.interp(len(row), list(self.profile), list(self.profile.values()))
        self.clock.now += 0.01 * float(steps) * (1 + abs(self.rng.normal(0, 0.05)))
        self.lengths = [self.lengths[0] + len(row)]
        return {"logits": np.zeros((len(row), 1), np.float32)}

    def trim(self, length):
        self.lengths = [length]


def speed(monkeypatch, profile, prompt, answer):
    """Of an answer with speculation, relative to plain decoding."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(speculation, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    drafter = PromptLookup()
    drafter.read(prompt)
    engine = SpeculativeEngine(TimedEngine(profile, clock), drafter, RunCosts(), len(prompt) + len(answer))
    engine.prefill([prompt])
    begun = clock.now
    for token in answer[:-1]:
        engine.decode([token])
    taken = clock.now - begun
    plain = TimedEngine(profile, clock)
    begun = clock.now
    for token in answer[:-1]:
        plain.decode([token])
    return (clock.now - begun) / taken, engine


@pytest.mark.parametrize("profile", PROFILES)
def test_an_answer_that_repeats_its_prompt_is_faster(monkeypatch, profile):
    prompt = np.random.default_rng(0).integers(0, 5000, 200).tolist()
    found, engine = speed(monkeypatch, PROFILES[profile], prompt, prompt)
    assert found > {"fp32": 4, "int4": 1.9, "jump": 3}[profile]
    assert engine.accepted > 0.9 * engine.drafted


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [3, 8, 20, 5000])
def test_no_text_is_slower_than_it_may_be(monkeypatch, profile, seed, size):
    """Random texts of few different tokens are full of matches that mean nothing."""
    rng = np.random.default_rng(seed)
    found, _ = speed(
        monkeypatch,
        PROFILES[profile],
        rng.integers(0, size, 60).tolist(),
        rng.integers(0, size, 150).tolist(),
    )
    assert found > 0.95


def test_a_draft_that_pays_no_more_is_given_up_and_taken_up_again(monkeypatch):
    rng = np.random.default_rng(0)
    copied, free = rng.integers(0, 9000, 150).tolist(), rng.integers(0, 4, 150).tolist()
    found, engine = speed(monkeypatch, PROFILES["int4"], copied, [*copied[:70], *free, *copied[70:]])
    assert found > 1.2
    assert engine.accepted > 110


def test_costs_lie_on_lines_between_what_was_seen():
    costs = RunCosts()
    assert costs.step is None
    costs.saw(1, 1.0)
    assert list(costs.checks(9))[3] == 3.0  # half a step for each more, at worst
    costs.read_prompt(101, 11.0)
    assert list(costs.checks(9))[3] == pytest.approx(1.4)  # a tenth, as in the prompt
    costs.read_prompt(12, 400.0)
    assert list(costs.checks(4)) == pytest.approx([1.5, 2.0, 2.5, 3.0])  # which was disturbed
    costs.saw(5, 2.0)
    assert list(costs.checks(4)) == pytest.approx([1.25, 1.5, 1.75, 2.0])
    costs.saw(5, 100.0)
    assert list(costs.checks(9))[3] == pytest.approx(2.5)  # so was this: it counts as twice as long
    costs.doubt()
    assert 2.4 < list(costs.checks(9))[3] < 2.5
    costs.saw(2, 1.5)
    assert list(costs.checks(9))[3] == pytest.approx(2.5)
    costs.saw(5, 0.1)
    assert list(costs.checks(9))[3] >= 1.0


def test_hit_rates_follow_what_is_seen():
    rates = HitRates()
    assert rates.of(2) < rates.of(4) < rates.of(16) == rates.of(99)
    for _ in range(40):
        rates.saw(4, hit=True)
        rates.saw(16, hit=False)
    assert rates.of(4) > 0.95
    assert rates.of(16) < 0.1
