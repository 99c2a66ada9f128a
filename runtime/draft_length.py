"""How many drafted tokens are worth checking in one run: from what runs cost here, and how often guesses were right.

What a run of T tokens costs, in steps of one token, depends on the machine, the precision and the length of the
cache. So it is measured as it goes, and so are hits and misses; nothing is drafted where it would not pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

_LONGEST = 16  # tokens of a draft: with more of them nearly each is paid for in full
_FIRST_LENGTH = 2  # tokens of the first, when it is not known what the drafter costs
_MARGIN = 1.05  # times the speed of plain decoding that a draft must promise
_STAKE, _SHARE = 1.5, 0.02  # steps, and of the time so far: what all drafts together may lose
_SURE = 0.1  # steps that a draft may lose, as expected, in any case: what is nearly certain is not held back

_FAR = 32  # tokens, more than any check has: there the line of costs ends
_DEAREST = 0.5  # steps that a token more is assumed to cost at most: the first prompt of a process is slow
_WEIGHT, _WEIGHT_DOWN = 0.25, 0.5  # of a new time in the average: what disturbs a run never makes it faster
_OUTLIER = 2.0  # a run that took longer than so many times the average was disturbed
_FADE = 0.998  # a step. Costs that keep drafts away are doubted, so that they are measured again some time;
_FADE_DRAFTING = 0.98  # what the drafter takes is known from this generation alone, and doubted sooner

_LEVELS = 16  # of trust that are told apart
_MEMORY = 0.97  # of hits and misses: about the last 30 of each level
_FIRST, _PRIOR = 1.5, 2.0  # before anything was seen: 1 - 1.5 / trust are right, which counts as 2 guesses


class RunCosts:
    """Seconds of a run by its number of tokens: straight lines between what was seen, and what a prompt's share was."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._prompt: tuple[int, float] | None = None  # tokens and seconds of the last
        self._fade = 1.0

    @property
    def step(self) -> float | None:
        """Of one token; None before the first."""
        return self._seconds.get(1)

    def read_prompt(self, tokens: int, seconds: float) -> None:
        if tokens > 1:
            self._prompt = tokens, seconds

    def saw(self, tokens: int, seconds: float) -> None:
        old = self._seconds.get(tokens)
        self._seconds[tokens] = seconds if old is None else _average(old, min(seconds, _OUTLIER * old))
        if tokens > 1:
            self._fade = 1.0

    def doubt(self) -> None:
        """A draft was not tried, because of what runs are said to cost."""
        self._fade *= _FADE

    def checks(self, longest: int) -> Iterator[float]:
        """Of runs of 2, 3, ... tokens, up to a draft of `longest` and the token before it. Needs `step`."""
        step = self._seconds[1]
        more = _DEAREST * step
        if self._prompt is not None:
            tokens, seconds = self._prompt
            more = min(more, max(0.0, seconds - step) / (tokens - 1))
        ends = [*sorted(self._seconds.items()), (_FAR, step + more * (_FAR - 1))]
        for (low, before), (high, after) in pairwise(ends):
            slope = (after - before) / (high - low)
            for tokens in range(low + 1, min(high, longest + 1) + 1):
                yield max(step, (before + slope * (tokens - low)) * self._fade)


class HitRates:
    """The share of guesses that were right, for each level of trust, the latest counting most."""

    def __init__(self) -> None:
        self._hits = [0.0] * (_LEVELS + 1)
        self._tries = [0.0] * (_LEVELS + 1)

    def saw(self, trust: int, *, hit: bool) -> None:
        level = min(trust, _LEVELS)
        self._hits[level] = _MEMORY * self._hits[level] + hit
        self._tries[level] = _MEMORY * self._tries[level] + 1

    def of(self, trust: int) -> float:
        level = min(trust, _LEVELS)
        first = max(0.0, 1 - _FIRST / level)
        return (self._hits[level] + _PRIOR * first) / (self._tries[level] + _PRIOR)


class DraftLength:
    """Chooses the length of each draft of one generation."""

    def __init__(self, costs: RunCosts) -> None:
        self._costs = costs
        self._rates = HitRates()
        self._drafting: float | None = None  # seconds that the drafter takes for a token
        self._spent = 0.0  # seconds, of all runs
        self._saved = 0.0  # of these, against a step for each token; below 0 it was lost

    def choose(self, trust: int, room: int) -> int:
        """The length that promises the most tokens a second; 0 where plain decoding does. At most `room`."""
        step = self._costs.step
        if step is None or trust == 0 or room < 1:
            return 0
        stake = _STAKE * step + _SHARE * self._spent + self._saved
        best, most = 0, _MARGIN / step
        tokens = chance = 1.0  # expected of the run; that all guesses so far are right
        risk = 1 - self._rates.of(trust)  # that every guess is wrong
        longest, drafting = (_FIRST_LENGTH, 0.0) if self._drafting is None else (_LONGEST, self._drafting)
        for length, check in enumerate(self._costs.checks(min(room, longest)), start=1):
            chance *= self._rates.of(trust + length - 1)
            tokens += chance
            seconds = check + length * drafting
            if risk * (seconds - step) > max(stake, _SURE * step):
                break
            if tokens / seconds > most:
                best, most = length, tokens / seconds
        if best == 0:
            self._costs.doubt()
            self._drafting = None if self._drafting is None else self._drafting * _FADE_DRAFTING
        return best

    def stepped(self, seconds: float) -> None:
        """One token was run, without a draft."""
        self._costs.saw(1, seconds)
        self._spent += seconds

    def drafted(self, count: int, seconds: float) -> None:
        """The drafter has taken so long."""
        each = seconds / count
        self._drafting = each if self._drafting is None else _average(self._drafting, each)
        self._spent += seconds
        self._saved -= seconds

    def checked(self, trust: int, drafted: int, accepted: int, seconds: float) -> None:
        """A draft was run and followed as far as it was right; what comes after a wrong guess is not known."""
        for place in range(min(accepted + 1, drafted)):
            self._rates.saw(trust + place, hit=place < accepted)
        self._costs.saw(drafted + 1, seconds)
        self._spent += seconds
        self._saved += (accepted + 1) * (self._costs.step or 0.0) - seconds

    def watched(self, trust: int, *, hit: bool) -> None:
        """A guess was not used, but it was right or wrong."""
        self._rates.saw(trust, hit=hit)


def _average(old: float, new: float) -> float:
    return old + (_WEIGHT_DOWN if new < old else _WEIGHT) * (new - old)
