"""The loop: prefill once, then decode token by token, each step with its text and statistics.

Rows of a batch that are done are dropped from the engine, so the others do not wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt

from .. import TfmxError
from .detokenizer import Detokenizer, StopTexts
from .engine import Engine, Logits
from .manifest import Manifest
from .sampling import Choice, Sampler, SamplingOptions, largest
from .tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


class NumericsError(TfmxError):
    """The model computed something that is no number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Of the whole call so far, all its rows together. Time that the caller spends between steps is not counted."""

    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt, found in the cache of the turn before
    new_tokens: int = 0
    time_to_first_token: float = 0.0  # seconds, from the call to the first step
    decode_seconds: float = 0.0  # after the first step
    decode_tokens: int = 0  # new tokens after each row's first
    drafted_tokens: int = 0  # guessed and checked, by speculation
    accepted_tokens: int = 0  # of these, what was chosen

    @property
    def prefill_tokens_per_second(self) -> float:
        return _rate(self.prompt_tokens - self.cached_tokens, self.time_to_first_token)

    @property
    def decode_tokens_per_second(self) -> float:
        return _rate(self.decode_tokens, self.decode_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token and its log-probability, the model's own."""

    token_id: int
    logprob: float
    token_bytes: (
        bytes | None
    )  # what it stands for, exactly: it may be a part of a character; None without tokenizer

    @property
    def text(self) -> str | None:
        """The same as far as it is text; what is not, as U+FFFD."""
        return None if self.token_bytes is None else self.token_bytes.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One new token of one row."""

    row: int  # which prompt of the batch
    token_id: int
    text: str  # what this token makes final; "" inside a character, or while a stop text may be beginning
    finish_reason: FinishReason | None  # "stop": end token or stop text; "length": max_new_tokens or context
    logprob: TokenLogprob | None  # of this token, when asked for
    top_logprobs: tuple[TokenLogprob, ...]  # of the likeliest, likeliest first
    seed: int  # gives the same tokens again
    statistics: Statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """All steps of one row."""

    prompt_ids: tuple[int, ...]  # of an encoder-decoder: the source; () if that is no tokens
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob | None, ...]
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    seed: int
    statistics: Statistics  # of the whole batch


@dataclass(slots=True)
class Row:
    """What one sequence needs besides the engine."""

    index: int
    prompt_ids: list[int]
    sampler: Sampler
    limit: int  # new tokens
    stop_ids: frozenset[int]
    detokenizer: Detokenizer | None  # None: ids only
    stop_texts: StopTexts
    spell: Callable[[int], bytes | None] | None = None  # a token's bytes
    token_ids: list[int] = field(default_factory=list)  # the answer so far

    @property
    def end(self) -> int:
        """How many tokens it will have at most, with the prompt's; all but the last are run."""
        return len(self.prompt_ids) + self.limit

    def named(self, token_id: int, logprob: float) -> TokenLogprob:
        token_bytes = self.spell(token_id) if self.spell else None
        return TokenLogprob(token_id=token_id, logprob=logprob, token_bytes=token_bytes)

    def accept(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Add a token; gives the text that became final and whether the row is done."""
        self.token_ids.append(token_id)
        ended, text = token_id in self.stop_ids, ""
        if not ended:
            text, stopped = self.stop_texts.push(self.detokenizer.push(token_id) if self.detokenizer else "")
            if stopped:
                return text, "stop"
            if len(self.token_ids) < self.limit:
                return text, None
        rest, stopped = self._rest()
        return text + rest, "stop" if ended or stopped else "length"

    def _rest(self) -> tuple[str, bool]:
        """The text that was held back, and whether a stop text ends it."""
        text, stopped = self.stop_texts.push(self.detokenizer.flush() if self.detokenizer else "")
        if stopped:
            return text, True
        held, stopped = self.stop_texts.flush()
        return text + held, stopped


def make_row(
    manifest: Manifest,
    index: int,
    prompt_ids: list[int],
    options: SamplingOptions,
    seed: int,
    tokenizer: Tokenizer | None,
    context: Sequence[int],
) -> Row:
    room = manifest.max_context - len(prompt_ids) + 1  # the last token is never run, so it needs no position
    own_stops = () if options.ignore_eos else manifest.generation.eos_token_ids
    return Row(
        index=index,
        prompt_ids=prompt_ids,
        sampler=Sampler(options, prompt_ids, seed),
        limit=room if options.max_new_tokens is None else min(options.max_new_tokens, room),
        stop_ids=frozenset((*own_stops, *options.stop_token_ids)),
        detokenizer=Detokenizer(tokenizer.decode, context) if tokenizer else None,
        stop_texts=StopTexts(options.stop),
        spell=tokenizer.token_bytes if tokenizer else None,
    )


def run_rows(
    engine: Engine,
    rows: list[Row],
    options: SamplingOptions,
    seed: int,
    *,
    started: float,
    cached: int = 0,
    source_tokens: int = 0,
) -> Iterator[Step]:
    """Generate until every row is done.

    The engine holds the first `cached` tokens of a single row already. `source_tokens`: what an encoder has read.
    """
    prompt_tokens = source_tokens + sum(len(row.prompt_ids) for row in rows)
    new_tokens = decode_tokens = step = 0
    first_seconds = decode_seconds = 0.0
    active = rows
    choose = _choose_largest if options.only_argmax else _choose
    logits = engine.prefill([row.prompt_ids[cached:] for row in rows])
    while True:
        choices = choose(logits, active, options, step)
        results = [row.accept(choice.token_id) for row, choice in zip(active, choices, strict=True)]
        seconds = time.perf_counter() - started
        new_tokens += len(active)
        if step == 0:
            first_seconds = seconds
        else:
            decode_seconds, decode_tokens = decode_seconds + seconds, decode_tokens + len(active)
        statistics = Statistics(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached,
            new_tokens=new_tokens,
            time_to_first_token=first_seconds,
            decode_seconds=decode_seconds,
            decode_tokens=decode_tokens,
            drafted_tokens=engine.drafted,
            accepted_tokens=engine.accepted,
        )
        for row, choice, (text, reason) in zip(active, choices, results, strict=True):
            yield _make_step(row, choice, text, reason, seed, statistics)
        started = time.perf_counter()
        going = [place for place, (_, reason) in enumerate(results) if reason is None]
        if not going:
            return
        if len(going) < len(active):
            engine.keep(going)
            active = [active[place] for place in going]
        logits = engine.decode([row.token_ids[-1] for row in active])
        step += 1


def collect_results(prompts: Sequence[npt.NDArray[Any]], steps: list[Step]) -> list[Result]:
    """All steps of a batch, by row."""
    results = []
    for index, prompt in enumerate(prompts):
        own = [step for step in steps if step.row == index]
        reason = own[-1].finish_reason
        assert reason is not None
        results.append(
            Result(
                prompt_ids=tuple(prompt.tolist()) if prompt.ndim == 1 else (),
                token_ids=tuple(step.token_id for step in own),
                text="".join(step.text for step in own),
                finish_reason=reason,
                logprobs=tuple(step.logprob for step in own),
                top_logprobs=tuple(step.top_logprobs for step in own),
                seed=own[-1].seed,
                statistics=steps[-1].statistics,
            )
        )
    return results


def _choose_largest(logits: Logits, rows: list[Row], options: SamplingOptions, step: int) -> list[Choice]:  # noqa: ARG001 (as `_choose`)
    tokens, finite = logits.greedy()
    _check_finite(finite, rows, step)
    return [Choice(token) for token in tokens]


def _choose(logits: Logits, rows: list[Row], options: SamplingOptions, step: int) -> list[Choice]:
    if logits.can_draw and options.logprobs is None:
        drawn = logits.draw([row.sampler.next_draw() for row in rows], options)
        _check_finite(drawn.finite.tolist(), rows, step)
        for row, token, logit in zip(rows, drawn.tokens, drawn.logits, strict=True):
            row.sampler.took(int(token), float(logit))
        return [Choice(int(token)) for token in drawn.tokens]
    array = logits.numpy()  # (B, V)
    _check_finite([largest(values)[1] for values in array], rows, step)
    return [row.sampler(values) for row, values in zip(rows, array, strict=True)]


def _check_finite(finite: list[bool], rows: list[Row], step: int) -> None:
    for row, good in zip(rows, finite, strict=True):
        if not good:
            raise NumericsError(
                f"the logits of step {step} (row {row.index}) are not finite: the weights or the precision are at fault"
            )


def _make_step(
    row: Row, choice: Choice, text: str, reason: FinishReason | None, seed: int, statistics: Statistics
) -> Step:
    return Step(
        row=row.index,
        token_id=choice.token_id,
        text=text,
        finish_reason=reason,
        logprob=None if choice.logprob is None else row.named(choice.token_id, choice.logprob),
        top_logprobs=tuple(row.named(token_id, logprob) for token_id, logprob in choice.top_logprobs),
        seed=seed,
        statistics=statistics,
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
