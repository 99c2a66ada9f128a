"""The options of `tfmx run` that choose tokens, as one `SamplingOptions`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..runtime.sampling_options import SamplingOptions


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not ID=VALUE, such as 42=-5 or 42=-inf") from error


@dataclass(frozen=True, slots=True)
class _Option:
    """An option that is not given is None or (): the defaults are those of SamplingOptions."""

    name: str
    field: str  # of SamplingOptions
    type: Callable[[str], Any]
    metavar: str
    help: str
    multiple: bool = False

    def add(self, function: Callable[..., None]) -> Callable[..., None]:
        decorate = click.option(
            self.name,
            self.field,
            type=self.type,
            metavar=self.metavar,
            help=self.help,
            multiple=self.multiple,
        )
        return decorate(function)


_OPTIONS = (
    _Option("--max-tokens", "max_new_tokens", int, "N", "Stop after N tokens.  [default: until it ends or the context is full]"),
    _Option("--temperature", "temperature", float, "T", "Randomness; 0 always takes the likeliest token.  [default: 0]"),
    _Option("--top-k", "top_k", int, "K", "Draw from the K likeliest tokens only.  [default: all]"),
    _Option("--top-p", "top_p", float, "P", "Draw from the likeliest tokens that together reach probability P.  [default: 1]"),
    _Option("--min-p", "min_p", float, "P", "Draw from tokens at least P times as likely as the likeliest.  [default: 0]"),
    _Option("--repetition-penalty", "repetition_penalty", float, "X", "Above 1: tokens of prompt and answer become less likely.  [default: 1]"),
    _Option("--presence-penalty", "presence_penalty", float, "X", "Taken off the logit of each token that the answer has.  [default: 0]"),
    _Option("--frequency-penalty", "frequency_penalty", float, "X", "The same, as many times as it has it.  [default: 0]"),
    _Option("--logit-bias", "logit_bias", _parse_bias, "ID=VALUE", "Add VALUE to the logit of token ID; -inf bans it. Repeatable.", multiple=True),
    _Option("--seed", "seed", int, "N", "With --temperature: the same seed gives the same tokens.  [default: a new one, told on stderr]"),
    _Option("--logprobs", "logprobs", int, "N", "With --json: each token's log-probability, and those of the N likeliest."),
    _Option("--stop", "stop", str, "TEXT", "End before this text. Repeatable.", multiple=True),
    _Option("--stop-id", "stop_token_ids", int, "ID", "End at this token, as at the model's own end tokens. Repeatable.", multiple=True),
)  # fmt: skip
_NAMES = {option.field: option.name for option in _OPTIONS}
SAMPLING_FIELDS = frozenset(_NAMES)


def sampling_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options, which reach the function as its argument `sampling`; impossible ones never do."""

    @functools.wraps(function)
    def with_sampling(**values: Any) -> None:
        given = {field: values.pop(field) for field in _NAMES}
        function(sampling=make_sampling(given), **values)

    decorated: Callable[..., None] = with_sampling
    for option in reversed(_OPTIONS):
        decorated = option.add(decorated)
    return decorated


def make_sampling(values: dict[str, Any]) -> SamplingOptions:
    from ..runtime.sampling_options import DRAWING, SamplingError, SamplingOptions

    given = {field: value for field, value in values.items() if value not in (None, ())}
    if not given.get("temperature"):
        for field in DRAWING:
            if field in given:
                raise click.UsageError(
                    f"{_NAMES[field]} does nothing without --temperature above 0, which makes it draw tokens"
                )
    if "logit_bias" in given:
        pairs = given["logit_bias"]
        given["logit_bias"] = dict(pairs)
        if len(given["logit_bias"]) < len(pairs):
            raise click.UsageError("--logit-bias names a token twice")
    try:
        return SamplingOptions(**given)
    except SamplingError as error:
        # "top_p is 2.0; it must be ...", "logit_bias[5] is 1e+39; ..."
        line = re.sub(r"^\w+", lambda match: _NAMES.get(match[0], match[0]), str(error))
        raise SamplingError(line) from error
