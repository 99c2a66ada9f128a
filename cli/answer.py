"""An answer while it comes: streamed as text, or collected as one JSON object; then its statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from .console import say, write, write_line

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..runtime.generate import Step, TokenLogprob
    from ..runtime.model import Model


@dataclass(slots=True)
class Answer:
    steps: list[Step] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Printer:
    as_json: bool
    quiet: bool
    has_text: bool  # False: the bundle has no tokenizer, and tokens are shown as their ids
    device: str
    sampled: bool  # the seed matters
    speculates: bool  # then guesses are counted, also where there are none

    def show(self, steps: Iterator[Step], answer: Answer) -> None:
        """Follow the steps to the end; `answer` has those that came, also when Ctrl-C ends it."""
        with closing(cast("Generator[Step]", steps)):
            for step in steps:
                answer.steps.append(step)  # first: whatever was shown is part of the answer
                if not self.as_json:
                    comma = "," if len(answer.steps) > 1 else ""
                    write(step.text if self.has_text else f"{comma}{step.token_id}")
        if self.as_json:
            write_line(json.dumps(self.json(answer), allow_nan=False))  # ASCII: whole in every encoding
        else:
            write_line()
            if not self.quiet:
                say(self.statistics(answer.steps[-1]))

    def statistics(self, last: Step) -> str:
        found = last.statistics
        cached = f", {found.cached_tokens} cached" if found.cached_tokens else ""
        guessed = (
            f", {found.accepted_tokens} of {found.drafted_tokens} guesses right" if self.speculates else ""
        )
        seed = f", seed {last.seed}" if self.sampled else ""
        return (
            f"prefill {found.prefill_tokens_per_second:.1f} tokens/s "
            f"({found.prompt_tokens - found.cached_tokens} tokens{cached}), "
            f"first token {found.time_to_first_token:.2f} s, "
            f"decode {found.decode_tokens_per_second:.1f} tokens/s ({found.decode_tokens}{guessed}), "
            f"end: {last.finish_reason}{seed}"
        )

    def json(self, answer: Answer) -> dict[str, object]:
        last = answer.steps[-1]
        found = last.statistics
        content: dict[str, object] = {
            "text": answer.text if self.has_text else None,
            "token_ids": [step.token_id for step in answer.steps],
            "finish_reason": last.finish_reason,
            "prompt_tokens": found.prompt_tokens,
            "cached_tokens": found.cached_tokens,
            "new_tokens": found.new_tokens,
            "seed": last.seed if self.sampled else None,
            "device": self.device,
            "timings": {
                "time_to_first_token": found.time_to_first_token,
                "decode_seconds": found.decode_seconds,
                "prefill_tokens_per_second": found.prefill_tokens_per_second,
                "decode_tokens_per_second": found.decode_tokens_per_second,
            },
        }
        if self.speculates:
            content["drafted_tokens"] = found.drafted_tokens
            content["accepted_tokens"] = found.accepted_tokens
        if last.logprob is not None:
            content["logprobs"] = [_logprobs(step) for step in answer.steps]
        return content


def make_printer(model: Model, *, as_json: bool, quiet: bool, sampled: bool, speculates: bool) -> Printer:
    return Printer(
        as_json=as_json,
        quiet=quiet,
        has_text=model.tokenizer is not None,
        device=model.device.kind,
        sampled=sampled,
        speculates=speculates,
    )


def _logprobs(step: Step) -> dict[str, object]:
    assert step.logprob is not None
    return {**_logprob(step.logprob), "top": [_logprob(entry) for entry in step.top_logprobs]}


def _logprob(entry: TokenLogprob) -> dict[str, object]:
    """A text alone would not tell parts of characters apart."""
    return {
        "token_id": entry.token_id,
        "text": entry.text,
        "bytes": None if entry.token_bytes is None else list(entry.token_bytes),
        "logprob": entry.logprob,
    }
