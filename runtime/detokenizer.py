"""Token ids to text while they come: never half a character, never past a stop text.

A tokenizer's decoder turns an unfinished character into U+FFFD and may treat the first token of a sequence
specially, so a window of recent tokens is decoded as a whole and only what is new and final is given out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_WINDOW = 8  # tokens kept as context once their text was given out
_PATIENCE = 64  # tokens: text that ends in U+FFFD for so long really contains it
_UNFINISHED = "\ufffd"


class Detokenizer:
    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        """`context`: the tokens before the first, when the text continues theirs (a space may depend on them)."""
        self._decode = decode
        self._ids = list(context)[-_WINDOW:]
        self._sent = len(decode(self._ids).rstrip(_UNFINISHED)) if self._ids else 0
        self._whole = len(self._ids)  # so many ids of the window end at a character's end

    def push(self, token_id: int) -> str:
        """The text that this token makes final; "" while a character is unfinished."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        final = len(text) if len(self._ids) - self._whole > _PATIENCE else len(text.rstrip(_UNFINISHED))
        new = text[self._sent : final]
        self._sent = max(self._sent, final)
        if final == len(text):
            self._slide()
        return new

    def flush(self) -> str:
        """The rest, unfinished characters as U+FFFD."""
        return self._decode(self._ids)[self._sent :] if self._ids else ""

    def _slide(self) -> None:
        if len(self._ids) > _WINDOW and self._whole:
            del self._ids[: self._whole]  # both ends of what is left are ends of characters
            self._sent = len(self._decode(self._ids))
        self._whole = len(self._ids)


class StopTexts:
    """Passes text on up to where the first stop text begins, holding back what could be the beginning of one.

    The earliest beginning counts, in however many pieces the text comes: while a stop text that began earlier may
    still be completed, one that is complete already waits. Of those that begin together the shortest ends the answer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # begins where a stop text may have begun

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to give out, and whether a stop text was met (nothing comes after it)."""
        if not self._stops:
            return text, False
        text = self._held + text
        met = self._first(text)
        begun = len(text) - max(_overlap(text, stop) for stop in self._stops)
        if met is not None and met <= begun:
            self._held = ""
            return text[:met], True
        self._held = text[begun:]
        return text[:begun], False

    def flush(self) -> tuple[str, bool]:
        """The same at the end of the text: what has only begun will not be completed."""
        held, self._held = self._held, ""
        met = self._first(held)
        return (held, False) if met is None else (held[:met], True)

    def _first(self, text: str) -> int | None:
        """Where the first of the stop texts that `text` has begins."""
        places = (text.find(stop) for stop in self._stops)
        return min((place for place in places if place >= 0), default=None)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest beginning of `stop`, not all of it, that `text` ends with."""
    return next(
        (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0
    )
