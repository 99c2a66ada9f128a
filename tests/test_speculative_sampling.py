"""Sampling with speculation draws from the model's own distribution, and the test would see it if it did not."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from tfmx.runtime import generate, speculation
from tfmx.runtime.detokenizer import StopTexts
from tfmx.runtime.draft_length import DraftLength, RunCosts
from tfmx.runtime.drafters import PromptLookup
from tfmx.runtime.engine import HostLogits
from tfmx.runtime.sampling import Choice, Sampler, SamplingOptions
from tfmx.runtime.speculation import SpeculativeEngine

# A model of six tokens, each of which decides how likely the next are.
CHAIN = np.random.default_rng(5).standard_normal((6, 6)).astype(np.float32)
CHAIN[[0, 1, 2], [1, 2, 0]] += 2  # it likes the loop that its prompt has
DRAWN = SamplingOptions(
    temperature=1.2, top_k=5, top_p=0.93, min_p=0.04, repetition_penalty=1.2, presence_penalty=0.4
)
LOOP = [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Draft three tokens wherever there is a guess."""
    monkeypatch.setattr(
        DraftLength, "choose", lambda _self, trust, room: min(3, max(room, 0)) if trust else 0
    )


class ChainEngine:
    can_trim = True

    def __init__(self):
        self.tokens = []

    @property
    def lengths(self):
        return [len(self.tokens)]

    def prefill(self, rows):
        return HostLogits(self.score(rows[0])["logits"][-1:])

    def decode(self, tokens):
        return HostLogits(self.score(tokens)["logits"])

    def score(self, row, extras=()):
        self.tokens += row
        return {"logits": CHAIN[np.asarray(row)]}

    def trim(self, length):
        del self.tokens[length:]


def chain_answer(seed, options, count, wrap=lambda _engine, sampler: sampler):
    drafter = PromptLookup()
    drafter.read(LOOP)
    engine = SpeculativeEngine(ChainEngine(), drafter, RunCosts(), len(LOOP) + count)
    sampler = wrap(engine, Sampler(options, LOOP, seed))
    row = generate.Row(0, list(LOOP), sampler, count, frozenset(), None, StopTexts(()))
    steps = list(generate.run_rows(engine, [row], options, seed, started=0.0))
    return tuple(step.token_id for step in steps), steps[-1].statistics


def processed(last, answer):
    """The distribution after one token, by the definition of the options, written out."""
    logits = CHAIN[last].astype(np.float64).copy()
    for token in {*LOOP, *answer}:
        logits[token] = logits[token] / 1.2 if logits[token] > 0 else logits[token] * 1.2
    for token in set(answer):
        logits[token] -= 0.4
    chances = np.exp(logits / 1.2)
    order = np.argsort(-chances)[:5]  # top-k
    shares = chances[order] / chances[order].sum()
    kept = np.concatenate(([0.0], shares.cumsum()[:-1])) < 0.93  # top-p: until it is reached
    kept &= shares >= 0.04 * shares[0]  # min-p
    result = np.zeros(6)
    result[order[kept]] = shares[kept] / shares[kept].sum()
    return result


def expected_answers(count):
    found = {}
    for answer in itertools.product(range(6), repeat=count):
        chance, last = 1.0, LOOP[-1]
        for place, token in enumerate(answer):
            chance *= processed(last, answer[:place])[token]
            last = token
        if chance > 0:
            found[answer] = chance
    return found


def excess(counts, expected, total):
    """How many standard deviations Pearson's statistic is above what it should be. Rare answers count together."""
    rare = {answer for answer, chance in expected.items() if chance * total < 5}
    pairs = [(counts[a], chance * total) for a, chance in expected.items() if a not in rare]
    pairs.append((sum(counts[a] for a in rare), sum(expected[a] for a in rare) * total))
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in pairs if wanted)
    freedom = len(pairs) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


def measured_excess(total=2500, count=4, **more):
    answers = [chain_answer(seed, DRAWN, count, **more) for seed in range(total)]
    expected = expected_answers(count)
    assert sum(expected.values()) == pytest.approx(1)
    impossible = [answer for answer, _ in answers if answer not in expected]
    found = excess(Counter(answer for answer, _ in answers), expected, total)
    return np.inf if impossible else found, answers


def test_the_distribution_is_the_models():
    found, answers = measured_excess()
    assert found < 4
    drafted, accepted = (
        sum(getattr(statistics, name) for _, statistics in answers)
        for name in ("drafted_tokens", "accepted_tokens")
    )
    assert 0.1 * drafted < accepted < 0.9 * drafted


def test_a_guess_that_is_taken_when_it_is_likely_enough_is_noticed():
    """The planted fault: what is likely is accepted, instead of with its probability."""

    class Generous:
        def __init__(self, engine, sampler):
            self.engine, self.sampler = engine, sampler

        def __call__(self, logits):
            choice, check = self.sampler(logits), self.engine._check
            if check is None or check.accepted == len(check.draft):
                return choice
            guess = check.draft[check.accepted]
            chances = np.exp(logits - logits.max())
            return Choice(guess) if chances[guess] / chances.sum() > 0.25 else choice

    assert measured_excess(wrap=Generous)[0] > 20


def test_logits_after_another_token_are_noticed(monkeypatch):
    """The planted fault: the logits of the guess are used though another token was drawn."""

    def accepts(check, _token):
        check.accepted += 1
        return check.accepted <= len(check.draft)

    monkeypatch.setattr(speculation._Check, "accepts", accepts)
    assert measured_excess()[0] > 20
