"""What guesses the next tokens: the text itself (prompt lookup), or a smaller model.

A guess need not be right: every drafted token is checked by the model (speculation.py). A drafter only has to be
quick, and to say how much its next guess can be trusted, so that hits and misses are counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .engine import Graphs, open_engine

_SHORTEST = 2  # tokens that must have come before: after one alone a guess is hardly ever right
_LONGEST = 16  # tokens that a match is followed back; more says nothing new
_PLACES = 8  # earlier places that are compared, the latest first
_MODEL = 4  # the trust in a model's guess to begin with: as in a match of so many tokens


class Drafter(Protocol):
    @property
    def is_free(self) -> bool:
        """Whether a guess costs next to nothing, so that it may be watched without being used."""

    def read(self, tokens: Sequence[int]) -> None:
        """Tokens that are now part of the text."""

    def trust(self) -> int:
        """How good the next guess is, as a whole number that grows with it; 0: there is none."""

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens that may follow; only where `trust` is above 0."""


class PromptLookup:
    """Guesses that what followed the last few tokens earlier follows them again.

    The place with the longest match is taken, the latest of equals; trust is the length of the match. A copy that
    reaches the end of the text goes on with what it has copied, as in a loop.
    """

    is_free = True

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # of each few tokens: where what followed them is
        self._place = 0

    def read(self, tokens: Sequence[int]) -> None:
        text = self._tokens
        for token in tokens:
            if len(text) >= _SHORTEST:
                self._places.setdefault(tuple(text[-_SHORTEST:]), []).append(len(text))
            text.append(token)

    def trust(self) -> int:
        best = 0
        for place in reversed(self._places.get(tuple(self._tokens[-_SHORTEST:]), [])[-_PLACES:]):
            length = self._match(place)
            if length > best:
                best, self._place = length, place
        return best

    def draft(self, count: int) -> list[int]:
        guess = self._tokens[self._place : self._place + count]
        period = len(guess)
        while len(guess) < count:
            guess.append(guess[-period])
        return guess

    def _match(self, place: int) -> int:
        """How many tokens before this place are those at the end of the text."""
        text, most = self._tokens, min(place, _LONGEST)
        length = _SHORTEST
        while length < most and text[place - 1 - length] == text[-1 - length]:
            length += 1
        return length


class DraftModel:
    """Guesses what a smaller model finds likeliest. Its cache follows the text, and forgets guesses that were wrong."""

    is_free = False

    def __init__(self, graphs: Graphs, expected: int) -> None:
        self._context = graphs.manifest.max_context
        self._engine = open_engine(graphs, 1, min(expected, self._context))
        self._text: list[int] = []
        self._held: list[int] = []  # tokens in the engine: the text, then guesses
        self._same = 0  # so many of them are the text's

    def read(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)
        if len(tokens) > 1 and len(self._text) <= self._context:  # a prompt: at once, but for its last token
            self._forget()
            if new := self._text[len(self._held) : -1]:
                self._append(new)

    def trust(self) -> int:
        return _MODEL if len(self._text) <= self._context else 0

    def draft(self, count: int) -> list[int]:
        self._forget()
        guess = [self._append(self._text[len(self._held) :])]
        room = self._context - len(self._text) + 1  # the last guess is never run, so it needs no position
        while len(guess) < min(count, room):
            guess.append(self._append(guess[-1:]))
        return guess

    def _forget(self) -> None:
        """Leave in the engine what is the text's; its last token is to be run."""
        text, held = self._text, self._held
        most = min(len(text) - 1, len(held))
        while self._same < most and held[self._same] == text[self._same]:
            self._same += 1
        if self._same < len(held):
            self._engine.trim(self._same)
            del held[self._same :]

    def _append(self, tokens: list[int]) -> int:
        """Run the tokens; gives the likeliest to follow."""
        logits = self._engine.decode(tokens) if len(tokens) == 1 else self._engine.prefill([tokens])
        self._held.extend(tokens)
        return int(logits.greedy()[0][0])
