"""Speculation: a few tokens are guessed and checked in one run of the graph, which costs little more than a step.

`SpeculativeEngine` is an engine that runs ahead. Whoever generates asks it for the logits after one token, as of any
engine, chooses as always, and asks for those after the chosen one. If that is the token that was guessed, the
logits are there already; if not, the engine forgets the guesses. So every token is chosen by the one sampler from
the model's own logits, and what was guessed cannot change it: greedy gives the same tokens, a seed draws the same
ones. (That is the rule of speculative sampling for a certain guess x: it is taken with probability p(x), and what
is drawn instead comes from the rest.)

The logits of a token may differ in their last bits between a run of one token and of several: kernels add up in
another order. With 8-bit activations (MatMulNBits at accuracy level 4) that is more than the last bits, as between
prefill and decode.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from .. import InputError
from .draft_length import DraftLength, RunCosts
from .drafters import Drafter, DraftModel, PromptLookup
from .engine import Engine, FloatArray, Graphs, HostLogits, Logits, Row, Wiring
from .manifest import Manifest

if TYPE_CHECKING:
    from .model import Model


class SpeculationError(InputError):
    """What cannot be speculated about, or not with this draft model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """How tokens are guessed."""

    draft: Model | None = None  # a smaller model with the same tokens; None: from what is in the text already


def check_speculation(speculation: Speculation, model: Model) -> None:
    """Refuse (SpeculationError) a bundle or a draft model that it cannot be done with."""
    manifest = model.manifest
    if not manifest.generates:
        raise SpeculationError(
            "speculation is for bundles that generate tokens one by one; this one does not"
        )
    if manifest.inputs.kind != "tokens":
        raise SpeculationError(
            f"speculation is for bundles over tokens; this one takes {manifest.inputs.kind}"
        )
    _check_forgets(manifest, "this bundle", "do not speculate")
    if Wiring.of(manifest).last_only:
        raise SpeculationError(
            "this bundle's graphs give the logits of the last position only, so guesses cannot be checked"
        )
    if speculation.draft is not None:
        _check_draft(speculation.draft, model)


def _check_forgets(manifest: Manifest, what: str, instead: str) -> None:
    if manifest.is_recurrent:
        raise SpeculationError(
            f"{what} has a recurrent state, which cannot forget guesses that were wrong; {instead}"
        )


def _check_draft(draft: Model, model: Model) -> None:
    found, wanted = draft.manifest, model.manifest
    if wanted.kind != "decoder" or found.kind != "decoder" or not found.generates:
        raise SpeculationError(
            f"a decoder can guess for a decoder, both generating; the draft model is {_kind(found)}, this bundle {_kind(wanted)}"
        )
    if found.vocab_size != wanted.vocab_size:
        raise SpeculationError(
            f"the draft model's vocabulary has {found.vocab_size} tokens, this bundle's {wanted.vocab_size}; both must have the same"
        )
    _check_forgets(found, "the draft model", "give another one, or none")
    mine, other = model.tokenizer, draft.tokenizer
    if mine is None or other is None:  # ids are all there is
        return
    for token_id in range(wanted.vocab_size or 0):
        if mine.token(token_id) != other.token(token_id):
            raise SpeculationError(
                f"token {token_id} is {mine.token(token_id)!r} in this bundle and {other.token(token_id)!r} in the draft "
                "model; they must have the same tokenizer"
            )


def _kind(manifest: Manifest) -> str:
    return f"a{'n' * manifest.kind.startswith('e')} {manifest.kind}"


def open_drafter(
    draft: Graphs | None, prompt_ids: Sequence[int], expected: int, source: Sequence[int] = ()
) -> Drafter:
    """What guesses for one sequence that is expected to reach `expected` tokens; `draft`: the sessions of the draft model.

    `source`: of an encoder-decoder, what its answer may copy from.
    """
    drafter: Drafter
    if draft is not None:
        drafter = DraftModel(draft, expected)
    else:
        drafter = PromptLookup()
        drafter.read(source)
    drafter.read(prompt_ids)
    return drafter


@dataclass(slots=True)
class _Check:
    """A draft that was run, and how far the caller has gone along with it."""

    draft: list[int]
    trust: int
    logits: FloatArray  # (T+1, V): after the token before the draft, and after each of the draft's
    seconds: float
    accepted: int = 0

    def accepts(self, token: int) -> bool:
        """Whether the token is the one that was guessed."""
        if self.accepted == len(self.draft) or token != self.draft[self.accepted]:
            return False
        self.accepted += 1
        return True

    def next(self) -> Logits:
        return HostLogits(self.logits[self.accepted : self.accepted + 1])


class SpeculativeEngine:
    """Runs one sequence ahead of its caller, who sees no difference but in time.

    The drafter has read the prompt. There will be `end` tokens at most, with the prompt's.
    """

    def __init__(self, engine: Engine, drafter: Drafter, costs: RunCosts, end: int) -> None:
        self.lengths = list(engine.lengths)  # what the caller has appended; the engine may hold guesses too
        self.drafted = self.accepted = 0  # tokens
        self._engine, self._drafter, self._costs, self._end = engine, drafter, costs, end
        self._length = DraftLength(costs)
        self._check: _Check | None = None  # what was run ahead
        self._watched: tuple[int, int] | None = None  # a guess that was not run, and its trust

    @property
    def can_trim(self) -> bool:
        return self._engine.can_trim

    def prefill(self, rows: Sequence[Row]) -> Logits:
        self.settle()
        started = time.perf_counter()
        logits = self._engine.prefill(rows)
        self._costs.read_prompt(len(rows[0]), time.perf_counter() - started)
        return self._result(logits)

    def decode(self, tokens: Row) -> Logits:
        token = int(tokens[0])
        self._drafter.read([token])
        if self._check is not None and self._check.accepts(token):
            self.accepted += 1
            self.lengths = [self.lengths[0] + 1]
            return self._check.next()
        self.settle()
        if self._watched is not None:
            guess, trust = self._watched
            self._length.watched(trust, hit=guess == token)
        return self._run_ahead(token)

    def score(self, row: Row, extras: Sequence[str] = ()) -> dict[str, npt.NDArray[Any]]:
        self.settle()
        found = self._engine.score(row, extras)
        self.lengths = list(self._engine.lengths)
        return found

    def keep(self, rows: Sequence[int]) -> None:
        assert list(rows) == [0]  # there is no other

    def trim(self, length: int) -> None:
        self.settle()
        self._engine.trim(length)
        self.lengths = list(self._engine.lengths)

    def settle(self) -> None:
        """Forget the guesses that were not taken: the engine then holds what the caller has appended, and no more."""
        check, self._check = self._check, None
        if check is None:
            return
        started = time.perf_counter()
        if self._engine.lengths[0] > self.lengths[0]:
            self._engine.trim(self.lengths[0])
        seconds = check.seconds + time.perf_counter() - started
        self._length.checked(check.trust, len(check.draft), check.accepted, seconds)

    def _run_ahead(self, token: int) -> Logits:
        """The logits after the token; those after the tokens that may follow it are kept."""
        trust = self._drafter.trust()
        draft = self._draft(trust)
        started = time.perf_counter()
        if not draft:
            step = self._engine.decode([token])
            self._length.stepped(time.perf_counter() - started)
            return self._result(step)
        logits, *_ = self._engine.score([token, *draft]).values()
        self._check = _Check(draft, trust, logits, time.perf_counter() - started)
        self.drafted += len(draft)
        self.lengths = [self.lengths[0] + 1]
        return self._check.next()

    def _draft(self, trust: int) -> list[int]:
        room = self._end - self.lengths[0] - 2  # besides the token that is run, and the last, which never is
        count = self._length.choose(trust, room)
        self._watched = None
        if count == 0:
            if trust and self._drafter.is_free:
                self._watched = self._drafter.draft(1)[0], trust
            return []
        started = time.perf_counter()
        draft = self._drafter.draft(count)
        self._length.drafted(count, time.perf_counter() - started)
        return draft

    def _result(self, logits: Logits) -> Logits:
        self.lengths = list(self._engine.lengths)
        # a device draws other tokens with the same numbers than the sampler does, which has to draw from checks
        return HostLogits(logits.numpy()) if logits.can_draw else logits
