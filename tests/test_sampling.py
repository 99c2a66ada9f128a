"""Sampling: each option does what it says, in the documented order, reproducibly and fast."""

from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
import pytest

from tfmx import InputError
from tfmx.runtime import sampling
from tfmx.runtime.sampling import (
    NoTokenError,
    Sampler,
    SamplingError,
    SamplingOptions,
    _possible,
    fresh_seed,
)

LOGITS = np.log(np.asarray([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], np.float32))


def draws(options, logits=LOGITS, count=2000, seed=7, prompt=()):
    """Shares of each token over many rows' first draw."""
    rng = np.random.default_rng(seed)
    counts = Counter(
        Sampler(options, prompt, int(rng.integers(2**40)))(logits).token_id for _ in range(count)
    )
    return {token: number / count for token, number in counts.items()}


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals():
    choose = Sampler(SamplingOptions(), (), 0)
    assert choose(np.asarray([1, 5, 5, 2], np.float32)).token_id == 1
    assert choose(LOGITS).token_id == 0


def test_temperature_one_draws_the_models_own_distribution():
    shares = draws(SamplingOptions(temperature=1.0))
    for token, probability in enumerate(np.exp(LOGITS)):
        assert shares.get(token, 0) == pytest.approx(probability, abs=0.04)


def test_temperature_sharpens_and_flattens():
    assert draws(SamplingOptions(temperature=0.5))[0] == pytest.approx(0.16 / 0.2842, abs=0.04)
    assert draws(SamplingOptions(temperature=100.0))[5] == pytest.approx(1 / 6, abs=0.04)
    assert draws(SamplingOptions(temperature=1e-30), count=50) == {0: 1.0}


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_nothing_that_is_allowed_overflows_float32(temperature, more):
    """Each at its limit, all of them together, on logits that no model has; warnings are errors here."""
    if not temperature and more:
        pytest.skip("without a temperature nothing is drawn, and these are refused")
    logits = np.asarray([9e7, -9e7, 9e7, -9e7, 0.0, 1.0], np.float32)
    for sign in (1, -1):
        for repetition in (1e-30, 1e30):
            options = SamplingOptions(
                temperature=temperature,
                repetition_penalty=repetition,
                presence_penalty=sign * 1e30,
                frequency_penalty=sign * 1e30,
                logit_bias={0: sign * 1e30, 1: -sign * 1e30, 4: 1e30, 5: -math.inf},
                **more,
            )
            sampler = Sampler(options, (0, 1, 2), 3)
            sampler._penalise.seen |= {2: 10**8, 3: 10**8}
            assert sampler(logits).token_id != 5
            assert np.isfinite(sampler._penalise(logits)[:5]).all()
            draw = sampler.next_draw()
            assert np.isfinite(draw.minus[draw.ids != 5]).all()
            assert np.isfinite(draw.penalty).all()


def test_top_k_keeps_the_k_most_likely():
    shares = draws(SamplingOptions(temperature=1.0, top_k=2))
    assert shares.keys() == {0, 1}
    assert shares[0] == pytest.approx(4 / 7, abs=0.04)
    assert draws(SamplingOptions(temperature=1.0, top_k=100)).keys() >= {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, 1), (0.41, 2), (0.71, 3), (0.999, 6)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept):
    assert draws(SamplingOptions(temperature=1.0, top_p=top_p)).keys() <= set(range(kept))
    assert len(draws(SamplingOptions(temperature=3.0, top_p=1e-9), count=50)) == 1


def test_min_p_is_relative_to_the_most_likely():
    assert draws(SamplingOptions(temperature=1.0, min_p=0.3)).keys() == {0, 1, 2}
    assert draws(SamplingOptions(temperature=1.0, min_p=1.0), count=50).keys() == {0}


def test_top_p_counts_after_top_k():
    """Of the best two, 0.57 and 0.43, the first alone reaches 0.5; of all it would not."""
    assert draws(SamplingOptions(temperature=1.0, top_k=2, top_p=0.5)).keys() == {0}
    assert draws(SamplingOptions(temperature=1.0, top_k=2, top_p=0.6)).keys() == {0, 1}
    assert draws(SamplingOptions(temperature=1.0, top_p=0.5)).keys() == {0, 1}


def test_a_flat_vocabulary_needs_more_than_the_first_candidates():
    flat = np.zeros(5000, np.float32)
    shares = draws(SamplingOptions(temperature=1.0, top_p=0.5), flat, count=1500)
    assert max(shares) < 2500
    assert len(shares) > 700
    assert max(draws(SamplingOptions(temperature=1.0, min_p=0.5), flat, count=1500)) > 4000


@pytest.mark.parametrize("size", [6, 64, 100, 321, 5000, 20011])
@pytest.mark.parametrize("count", [1, 3, 40, 256, 2048])
def test_the_largest_are_found_with_ties_and_at_the_ends(size, count):
    count = min(count, size)
    row = np.random.default_rng(size + count).normal(size=size).astype(np.float32)
    row = np.round(2 * row) / 2  # many equals
    row[size // 3 :: 7] = -np.inf
    row[-1] = row.max()  # behind the last whole block
    wanted = np.lexsort((np.arange(size), -row))[:count]
    assert sampling._largest(row, count).tolist() == wanted.tolist()
    assert sampling._largest(np.zeros_like(row), count).tolist() == list(range(count))


def test_a_draw_from_a_whole_vocabulary_stays_among_what_has_weight():
    """Sums of blocks are float32: at the very end of a block nothing else may be picked."""
    weights = np.zeros(2048, np.float32)
    weights[[3, 600, 1500]] = 0.1, 0.3, 0.6
    places = [sampling._place_in_blocks(weights, uniform) for uniform in np.linspace(0, 1, 4001)[:-1]]
    assert sorted(set(places)) == [3, 600, 1500]
    assert [round(places.count(place) / 4000, 2) for place in (3, 600, 1500)] == [0.1, 0.3, 0.6]
    rng = np.random.default_rng(0)
    drawn = rng.random(49152, np.float32)
    edges = np.add.reduceat(drawn, np.arange(0, 49152, 512)).cumsum(dtype=np.float64)
    for edge in (
        edges[:-1] / edges[-1]
    ):  # just below an edge is a block's end, just above it the next one's beginning
        below, above = (
            sampling._place_in_blocks(drawn, float(np.nextafter(edge, towards))) for towards in (0, 1)
        )
        assert below // 512 <= above // 512 <= below // 512 + 1


def test_the_repetition_penalty_counts_prompt_and_answer():
    logits = np.asarray([2.0, 1.9, -1.0, -1.05], np.float32)
    choose = Sampler(SamplingOptions(repetition_penalty=2.0), [0], 0)
    assert [choose(logits).token_id for _ in range(3)] == [1, 0, 0]  # 2/2 beats 1.9/2
    negative = np.asarray([-1.0, -1.9], np.float32)
    assert Sampler(SamplingOptions(repetition_penalty=2.0), [0], 0)(negative).token_id == 1  # -1*2 < -1.9


def test_presence_and_frequency_count_the_answer_only():
    logits = np.asarray([2.0, 1.4, 0.0], np.float32)
    choose = Sampler(SamplingOptions(presence_penalty=0.7), [0, 0, 0], 0)
    assert [choose(logits).token_id for _ in range(3)] == [
        0,
        1,
        0,
    ]  # 1.3 < 1.4; then 1.3 > 0.7, and only once
    both = SamplingOptions(presence_penalty=5.0, repetition_penalty=1.0001)
    assert Sampler(both, [0], 0)(logits).token_id == 0  # the prompt's tokens count for repetition alone
    choose = Sampler(SamplingOptions(frequency_penalty=0.35), (), 0)
    assert [choose(logits).token_id for _ in range(4)] == [0, 0, 1, 0]  # 2, 1.65, (1.3 < 1.4), 1.3 > 1.05


def test_logit_bias_lifts_lowers_and_bans():
    assert Sampler(SamplingOptions(logit_bias={5: 10.0}), (), 0)(LOGITS).token_id == 5
    ban = SamplingOptions(temperature=1.0, logit_bias={0: -math.inf, 1: -math.inf})
    assert draws(ban).keys() == {2, 3, 4, 5}
    before = LOGITS.copy()
    Sampler(ban, (), 0)(LOGITS)
    assert np.array_equal(before, LOGITS)


@pytest.mark.parametrize(
    "more", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "top_p": 0.5}]
)
def test_banning_every_token_is_an_error(more):
    options = SamplingOptions(logit_bias=dict.fromkeys(range(6), -math.inf), **more)
    with pytest.raises(NoTokenError, match=r"^logit_bias bans every token$"):
        Sampler(options, (), 0)(LOGITS)


def test_rounding_never_picks_a_banned_token(monkeypatch):
    """The draw just below 1 lands behind the last possible token."""
    row = np.full(2000, -np.inf, np.float32)
    row[[3, 700]] = 0

    class Last:
        def __init__(self, _bits):
            pass

        def random(self):
            return np.nextafter(1.0, 0.0)

    monkeypatch.setattr(np.random, "Generator", Last)
    for options in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.1}):
        bias = dict.fromkeys((i for i in range(2000) if i not in {3, 700}), -math.inf)
        sampler = Sampler(SamplingOptions(temperature=1.0, logit_bias=bias, **options), (), 0)
        assert sampler(np.zeros(2000, np.float32)).token_id == 700
    weights = np.asarray([0.0, 0.5, 0.0, 0.0])
    assert [_possible(weights, place) for place in (0, 1, 2, 9)] == [1, 1, 1, 1]


def test_a_seed_gives_the_same_tokens_again_and_others_give_others():
    def tokens(seed):
        choose = Sampler(SamplingOptions(temperature=1.0), (), seed)
        return [choose(LOGITS).token_id for _ in range(40)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(2**53 - 1) == tokens(2**53 - 1)
    assert len({fresh_seed() for _ in range(100)}) == 100


def test_a_seed_gives_the_tokens_that_it_gave_when_this_was_written():
    choose = Sampler(SamplingOptions(temperature=1.0), (), 1234)
    # PCG64(1234) draws .977 .380 .923 .262 .319 .118 .242 .319 .964 .264 .441 .610
    assert [choose(LOGITS).token_id for _ in range(12)] == [4, 0, 3, 0, 0, 0, 0, 0, 4, 0, 1, 1]


def test_logprobs_are_the_models_own_before_every_option():
    options = SamplingOptions(temperature=2.0, logit_bias={5: 50.0}, repetition_penalty=3.0, logprobs=2)
    choice = Sampler(options, [0, 1], 3)(LOGITS + 7)
    assert choice.token_id == 5
    assert choice.logprob == pytest.approx(math.log(0.01), abs=1e-5)
    assert [token for token, _ in choice.top_logprobs] == [0, 1]
    assert choice.top_logprobs[0][1] == pytest.approx(math.log(0.4), abs=1e-5)
    only = Sampler(SamplingOptions(logprobs=0), (), 0)(LOGITS)
    assert only.top_logprobs == ()
    assert only.logprob == pytest.approx(math.log(0.4), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"temperature": -0.1}, r"temperature is -0.1; it must be 0 or more \(1e-30 to 1e\+30\)"),
        ({"temperature": math.nan}, r"temperature is nan; it must be 0 or more \(1e-30 to 1e\+30\)"),
        ({"temperature": math.inf}, r"temperature is inf; it must be 0 or more \(1e-30 to 1e\+30\)"),
        ({"temperature": True}, r"temperature is True; it must be 0 or more \(1e-30 to 1e\+30\)"),
        ({"temperature": 1e-40}, r"temperature is 1e-40; it must be 0 or more \(1e-30 to 1e\+30\)"),
        ({"temperature": 10**400}, r"temperature is 10+; it must be 0 or more \(1e-30 to 1e\+30\)"),
        ({"top_k": 0}, "top_k is 0; it must be 1 or more"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be 1 or more"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01; it must be above 0 and at most 1"),
        ({"min_p": -0.5}, "min_p is -0.5; it must be between 0 and 1"),
        ({"repetition_penalty": 0}, r"repetition_penalty is 0; it must be above 0 \(1e-30 to 1e\+30\)"),
        (
            {"repetition_penalty": 1e-39},
            r"repetition_penalty is 1e-39; it must be above 0 \(1e-30 to 1e\+30\)",
        ),
        (
            {"repetition_penalty": 1e39},
            r"repetition_penalty is 1e\+39; it must be above 0 \(1e-30 to 1e\+30\)",
        ),
        ({"presence_penalty": math.inf}, r"presence_penalty is inf; it must be -1e\+30 to 1e\+30"),
        ({"presence_penalty": 1e39}, r"presence_penalty is 1e\+39; it must be -1e\+30 to 1e\+30"),
        ({"frequency_penalty": math.nan}, r"frequency_penalty is nan; it must be -1e\+30 to 1e\+30"),
        ({"frequency_penalty": -1e39}, r"frequency_penalty is -1e\+39; it must be -1e\+30 to 1e\+30"),
        ({"logit_bias": {3: math.inf}}, r"logit_bias\[3\] is inf; it must be -inf or -1e\+30 to 1e\+30"),
        ({"logit_bias": {5: 1e39}}, r"logit_bias\[5\] is 1e\+39; it must be -inf or -1e\+30 to 1e\+30"),
        ({"logit_bias": {-1: 0.5}}, "a token of logit_bias is -1; it must be a token id"),
        ({"seed": -1}, "seed is -1; it must be 0 or more"),
        ({"logprobs": -1}, "logprobs is -1; it must be 0 or more"),
        ({"stop_token_ids": (-5,)}, "a stop token is -5; it must be a token id"),
        ({"stop": "end"}, "stop is 'end'; it must be a tuple of texts"),
        ({"stop": ("",)}, "a stop text is ''; it must be a text that is not empty"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number, 1 or more"),
    ],
)
def test_an_impossible_option_is_an_error_that_says_what_is_possible(options, line):
    with pytest.raises(SamplingError, match=f"^{line}$") as caught:
        SamplingOptions(**options)
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize("option", [{"seed": 7}, {"seed": 0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_an_option_of_drawing_without_drawing_is_an_error(option):
    with pytest.raises(
        SamplingError, match=f"^{next(iter(option))} does nothing without temperature above 0"
    ):
        SamplingOptions(**option)
    SamplingOptions(temperature=0.5, **option)


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="tempreature"):
        SamplingOptions(tempreature=1.0)


@pytest.mark.parametrize("options", [{"logit_bias": {320: 1.0}}, {"stop_token_ids": (320,)}])
def test_an_option_with_a_token_outside_the_vocabulary_is_an_error(options):
    with pytest.raises(SamplingError, match=r"^token 320 of an option is outside the vocabulary of 320$"):
        SamplingOptions(**options).check_vocabulary(320)


def test_more_logprobs_than_tokens_is_an_error():
    with pytest.raises(SamplingError, match=r"^logprobs is 321, more than the vocabulary of 320$"):
        SamplingOptions(logprobs=321).check_vocabulary(320)


def test_greedy_needs_only_the_argmax_unless_an_option_needs_the_logits():
    assert SamplingOptions(max_new_tokens=5, stop=("x",)).only_argmax
    for more in ({"temperature": 1.0}, {"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"presence_penalty": 0.5}):
        assert not SamplingOptions(**more).only_argmax


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9, "min_p": 0.05}, {"logprobs": 5}],
)
def test_a_large_vocabulary_is_sampled_in_a_few_milliseconds(options):
    logits = (np.random.default_rng(0).standard_normal(151936) * 4).astype(np.float32)
    choose = Sampler(SamplingOptions(temperature=0.8, **options), (), 0)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        choose(logits)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.008, f"{min(times) * 1e3:.2f} ms"  # about 1 ms when the machine is free
