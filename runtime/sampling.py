"""Chooses the next token from a row of logits.

In this order: repetition penalty (over prompt and answer), presence and frequency penalty (over the answer),
logit bias; then, unless temperature is 0 (greedy: the largest logit, the lowest id of equals), temperature,
top-k, top-p, min-p and the draw. Log-probabilities are the model's own: before any of these.

Every row draws from a generator seeded with the seed alone, one number a token, so a seed gives the same
tokens in any batch, streamed or not. Nothing sorts the whole vocabulary, and what is as long as it is written into
arrays that stay: new memory of that size costs a page fault for every 4 kB, each step.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .. import TfmxError
from .sampling_options import SamplingError, SamplingOptions

__all__ = [
    "Choice",
    "Draw",
    "NoTokenError",
    "Sampler",
    "SamplingError",
    "SamplingOptions",
    "fresh_seed",
    "largest",
]

_BLOCK = 64  # logits

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class NoTokenError(TfmxError):
    """The options have excluded every token."""


@dataclass(frozen=True, slots=True)
class Choice:
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # most likely first


def largest(logits: FloatArray) -> tuple[int, bool]:
    """The largest logit's token, the lowest id of equals, and whether all logits (V,) are finite.

    Both places are a NaN's if there is one. `min` would take four times as long as `argmin`: its way through numpy is
    longer, and a decode step leaves nothing of it in the caches.
    """
    top, bottom = int(logits.argmax()), int(logits.argmin())
    return top, math.isfinite(logits.item(top) - logits.item(bottom))


def fresh_seed() -> int:
    return secrets.randbits(53)  # every JSON reader keeps 53 bits


@dataclass(frozen=True, slots=True)
class Draw:
    """What a device needs to choose one row's token itself: the logits of a few ids change, then one number."""

    ids: IntArray  # (K,), each once
    penalty: FloatArray  # (K,): positive logits are divided by it, negative ones multiplied
    minus: FloatArray  # (K,): taken off then
    uniform: float


class Sampler:
    """From a row of finite logits (V,) to the next token; it remembers what it chose."""

    def __init__(self, options: SamplingOptions, prompt_ids: Iterable[int], seed: int) -> None:
        self._options = options
        self._penalise = _make_penalty(options, prompt_ids)
        self._draw = _Drawing(options)
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def __call__(self, logits: FloatArray) -> Choice:
        row, options = self._penalise(logits), self._options
        token_id = (
            int(row.argmax()) if options.temperature == 0 else self._draw(row, float(self._rng.random()))
        )
        self.took(token_id, float(row[token_id]))
        return _with_logprobs(logits, token_id, options.logprobs)

    def next_draw(self) -> Draw:
        """For a device that draws; tell what it drew with `took`."""
        ids, penalty, minus = self._penalise.changes()
        return Draw(ids, penalty, minus, float(self._rng.random()))

    def took(self, token_id: int, logit: float) -> None:
        """`logit`: after penalties and bias."""
        if not math.isfinite(logit):
            raise NoTokenError("logit_bias bans every token")
        self._penalise.saw(token_id)


@dataclass(slots=True)
class _Penalty:
    """The logits after penalties and bias; the given array is left as it is."""

    options: SamplingOptions
    seen: dict[int, int]  # token: how often it is in the answer; 0 for tokens of the prompt
    bias_ids: IntArray
    bias: FloatArray
    row: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))  # what the last call gave

    def __call__(self, logits: FloatArray) -> FloatArray:
        options = self.options
        counted = bool(options.presence_penalty or options.frequency_penalty)
        repeated = options.repetition_penalty != 1
        if not (counted or repeated or len(self.bias_ids)):
            return logits
        if len(self.row) != len(logits):
            self.row = np.empty_like(logits)
        row = self.row
        np.copyto(row, logits)
        if counted or repeated:
            ids = np.fromiter(self.seen.keys(), np.int64, len(self.seen))
            values = row[ids]
            if repeated:  # Keskar et al. 2019: dividing a negative logit would raise it
                penalty = np.float32(options.repetition_penalty)
                values = np.where(values > 0, values / penalty, values * penalty)
            if counted:
                counts = np.fromiter(self.seen.values(), np.float32, len(self.seen))
                values -= np.float32(options.presence_penalty) * (counts > 0)
                values -= np.float32(options.frequency_penalty) * counts
            row[ids] = values
        if len(self.bias_ids):
            row[self.bias_ids] += self.bias
        return row

    def changes(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """The same for `Draw`: ids, and what is done to their logits."""
        options, bias = self.options, dict(zip(self.bias_ids.tolist(), self.bias.tolist(), strict=True))
        counted = bool(options.presence_penalty or options.frequency_penalty)
        seen = self.seen if counted or options.repetition_penalty != 1 else {}
        ids = [*seen, *(token_id for token_id in bias if token_id not in seen)]
        penalty = [options.repetition_penalty if token_id in seen else 1.0 for token_id in ids]
        minus = [
            options.presence_penalty * (seen.get(token_id, 0) > 0)
            + options.frequency_penalty * seen.get(token_id, 0)
            - bias.get(token_id, 0.0)
            for token_id in ids
        ]
        return np.asarray(ids, np.int64), np.asarray(penalty, np.float32), np.asarray(minus, np.float32)

    def saw(self, token_id: int) -> None:
        self.seen[token_id] = self.seen.get(token_id, 0) + 1


def _make_penalty(options: SamplingOptions, prompt_ids: Iterable[int]) -> _Penalty:
    bias_ids = np.fromiter(options.logit_bias.keys(), np.int64, len(options.logit_bias))
    bias = np.fromiter(options.logit_bias.values(), np.float32, len(options.logit_bias))
    repeated = options.repetition_penalty != 1
    return _Penalty(options, dict.fromkeys(prompt_ids, 0) if repeated else {}, bias_ids, bias)


class _Drawing:
    """One token by inverse transform: a uniform number in [0, 1) picks a place in the cumulated probabilities."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._everything = np.empty(0, np.float32)  # of each token its weight, where all are needed

    def __call__(self, row: FloatArray, uniform: float) -> int:
        options = self._options
        peak = row.item(int(row.argmax()))
        if peak == -math.inf:
            return 0  # the caller sees that it is banned
        if options.top_k is not None and options.top_k < len(row):
            ids = _largest(row, options.top_k)
            weights = _weights(row[ids], peak, options.temperature)
            return int(ids[_place(_filtered(weights, options, float(weights.sum())), uniform)])
        if len(self._everything) != len(row):
            self._everything = np.empty_like(row)
        everything = _weights(row, peak, options.temperature, self._everything)
        if options.top_p == 1 and options.min_p == 0:
            return _place_in_blocks(everything, uniform)
        total = float(everything.sum())
        ids = _nucleus(row, everything, options, total)
        return int(ids[_place(_filtered(everything[ids], options, total), uniform)])


def _weights(
    logits: FloatArray, peak: float, temperature: float, out: FloatArray | None = None
) -> FloatArray:
    """Probabilities but for their sum; the largest logit's is 1. In float32: float64 takes ten times as long."""
    weights = np.subtract(logits, np.float32(peak), out=out)
    with np.errstate(over="ignore"):  # a large penalty over a tiny temperature: -inf, whose weight is 0
        weights /= np.float32(temperature)
    return np.exp(weights, out=weights)


def _largest(row: FloatArray, count: int) -> IntArray:
    """The ids of the `count` largest, largest first, the lower id first of equals.

    Of the largest numbers of so many blocks the smallest is a bound: at least `count` reach it, and hardly more.
    """
    blocks = len(row) // _BLOCK
    values = row
    if count < blocks:  # a column is a block
        values = np.maximum.reduce(row[: blocks * _BLOCK].reshape(_BLOCK, blocks))
    ids = np.flatnonzero(row >= np.partition(values, len(values) - count)[len(values) - count])
    return ids[np.lexsort((ids, -row[ids]))][:count]


def _nucleus(row: FloatArray, weights: FloatArray, options: SamplingOptions, total: float) -> IntArray:
    """Enough of the largest ids, in order, for top-p and min-p; usually a few hundred decide."""
    target, floor = options.top_p * total, options.min_p  # the largest weight is 1
    count = 256
    while count < len(row):
        ids = _largest(row, count)
        reached = options.top_p < 1 and weights[ids].sum() >= target
        if reached or weights[ids[-1]] < floor:
            return ids
        count *= 8
    return _largest(row, len(row))


def _filtered(weights: FloatArray, options: SamplingOptions, total: float) -> FloatArray:
    """Weights, largest first, cut after top-p's and min-p's last; at least one is left."""
    count = len(weights)
    if options.top_p < 1:
        count = min(count, int(np.searchsorted(_cumulated(weights), options.top_p * total)) + 1)
    if options.min_p > 0:
        count = min(count, int((weights >= options.min_p * weights[0]).sum()))
    return weights[: max(count, 1)]


def _cumulated(weights: FloatArray) -> npt.NDArray[np.float64]:
    cumulated: npt.NDArray[np.float64] = weights.cumsum(dtype=np.float64)
    return cumulated


def _place(weights: FloatArray, uniform: float) -> int:
    cumulated = _cumulated(weights)
    return _possible(weights, int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right")))


def _place_in_blocks(weights: FloatArray, uniform: float) -> int:
    """`_place` for a whole vocabulary: first the block, then the place in it."""
    size = 512
    sums = np.add.reduceat(weights, np.arange(0, len(weights), size))
    cumulated = _cumulated(sums)
    point = uniform * cumulated[-1]
    block = _possible(sums, int(np.searchsorted(cumulated, point, side="right")))
    before = cumulated[block] - sums[block]
    # as a share of the block: its sum is a float32, and not quite that of its weights
    return block * size + _place(weights[block * size : (block + 1) * size], (point - before) / sums[block])


def _possible(weights: FloatArray, place: int) -> int:
    """The place, or the nearest that is not impossible: rounding must not pick a banned token."""
    place = min(place, len(weights) - 1)
    if weights[place] > 0:
        return place
    possible = np.flatnonzero(weights)
    return int(possible[np.abs(possible - place).argmin()])


def _with_logprobs(logits: FloatArray, token_id: int, top: int | None) -> Choice:
    if top is None:
        return Choice(token_id)
    peak = logits.max()
    normaliser = float(peak) + math.log(float(np.exp(logits - peak).sum(dtype=np.float64)))
    best = _largest(logits, top) if top else ()
    return Choice(
        token_id,
        float(logits[token_id]) - normaliser,
        tuple((int(best_id), float(logits[best_id]) - normaliser) for best_id in best),
    )
