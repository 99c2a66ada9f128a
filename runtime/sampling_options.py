"""What may be asked of the choice of tokens, and when an answer is to end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .. import InputError

# Of temperatures, penalties and biases. Logits below 1e8 and fewer than 1e8 tokens with these stay below float32's 3.4e38:
# what overflowed would be chosen, or banned, without a word.
_LEAST, _MOST = 1e-30, 1e30
DRAWING = ("top_k", "top_p", "min_p", "seed")  # what changes nothing where the likeliest token is taken


class SamplingError(InputError):
    """A sampling option that cannot be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How to choose tokens and when to stop. The defaults are greedy, to the end of the answer or the context."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None  # only the k most likely
    top_p: float = 1.0  # only the most likely that together reach this probability
    min_p: float = 0.0  # only those at least this likely, relative to the most likely
    repetition_penalty: float = 1.0  # above 1 makes tokens of prompt and answer less likely
    presence_penalty: float = 0.0  # subtracted once for each token of the answer
    frequency_penalty: float = 0.0  # subtracted as often as the token is in the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added; -inf bans a token
    seed: int | None = None  # None: a fresh one, reported in each step
    logprobs: int | None = None  # with each token its log-probability and those of the n most likely
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end tokens
    ignore_eos: bool = False  # go on past the model's own end tokens, for measurements
    stop: tuple[str, ...] = ()  # the answer ends before the first of these texts that begins in it
    max_new_tokens: int | None = None  # None: as many as the context holds

    def __post_init__(self) -> None:
        temperature = self.temperature
        _require(
            _within(temperature, _LEAST, _MOST) or _within(temperature, 0, 0),
            "temperature",
            temperature,
            f"0 or more ({_LEAST:g} to {_MOST:g})",
        )
        _require(self.top_k is None or _whole(self.top_k, 1), "top_k", self.top_k, "1 or more")
        _require(_within(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "above 0 and at most 1")
        _require(_within(self.min_p, 0, 1), "min_p", self.min_p, "between 0 and 1")
        penalty = self.repetition_penalty
        _require(
            _within(penalty, _LEAST, _MOST),
            "repetition_penalty",
            penalty,
            f"above 0 ({_LEAST:g} to {_MOST:g})",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_within(value, -_MOST, _MOST), name, value, f"-{_MOST:g} to {_MOST:g}")
        for token_id, bias in self.logit_bias.items():
            _require(_whole(token_id, 0), "a token of logit_bias", token_id, "a token id")
            _require(
                bias == -math.inf or _within(bias, -_MOST, _MOST),
                f"logit_bias[{token_id}]",
                bias,
                f"-inf or -{_MOST:g} to {_MOST:g}",
            )
        _require(self.seed is None or _whole(self.seed, 0), "seed", self.seed, "0 or more")
        _require(self.logprobs is None or _whole(self.logprobs, 0), "logprobs", self.logprobs, "0 or more")
        for token_id in self.stop_token_ids:
            _require(_whole(token_id, 0), "a stop token", token_id, "a token id")
        _require(not isinstance(self.stop, str), "stop", self.stop, "a tuple of texts")
        for text in self.stop:
            _require(isinstance(text, str) and text != "", "a stop text", text, "a text that is not empty")
        count = self.max_new_tokens
        _require(count is None or _whole(count, 1), "max_new_tokens", count, "a whole number, 1 or more")
        for name in DRAWING:
            if self.temperature == 0 and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise SamplingError(f"{name} does nothing without temperature above 0, which makes it draw")

    def check_vocabulary(self, vocab_size: int) -> None:
        for token_id in (*self.logit_bias, *self.stop_token_ids):
            if token_id >= vocab_size:
                raise SamplingError(
                    f"token {token_id} of an option is outside the vocabulary of {vocab_size}"
                )
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise SamplingError(f"logprobs is {self.logprobs}, more than the vocabulary of {vocab_size}")

    @property
    def only_argmax(self) -> bool:
        """The largest logit is all that is asked for: it can be found where the logits are."""
        neutral = self.repetition_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return self.temperature == 0 and neutral and not self.logit_bias and self.logprobs is None


def _require(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise SamplingError(f"{name} is {value!r}; it must be {wanted}")


def _within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
