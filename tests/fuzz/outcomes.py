"""What became of a mutant: the classes, from good to bad, and how they are told apart."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

RAN = "ran"
REFUSED = "refused by tfmx"  # before onnxruntime saw it
REFUSED_BY_ORT = "refused by onnxruntime"
FAILED = "one-line error"  # later: while it ran, or because what came out is no number
DIFFERS = "DIFFERS"
TRACEBACK = "TRACEBACK"
INTERNAL = "INTERNAL ERROR"
HANG = "HANG"
SIGNAL = "SIGNAL"
GENERATOR = "NOT MADE"  # the campaign's own fault

OUTCOMES = (REFUSED, REFUSED_BY_ORT, FAILED, RAN, DIFFERS, TRACEBACK, INTERNAL, HANG, SIGNAL, GENERATOR)
BAD = (DIFFERS, TRACEBACK, INTERNAL, HANG, SIGNAL, GENERATOR)
_SEVERITY = (RAN, FAILED, REFUSED_BY_ORT, REFUSED, *BAD)

_LINE = re.compile(r"tfmx: error: [^\n]*\n")
_STAGES = re.compile(r"(?:(?!tfmx: )[^\n]{1,80}\n)*")  # before it: what takes minutes says what it is at
_TELLS_STAGES = {"verify", "export"}


@dataclass(frozen=True)
class Outcome:
    index: int
    kind: str
    base: str
    what: str
    verdict: str
    detail: str  # the line that was said, or what is wrong

    @property
    def is_bad(self) -> bool:
        return self.verdict in BAD


def judge(command: str, code: int, out: str, err: str) -> tuple[str, str]:
    """The class of one command line that ended by itself, and its line."""
    if "internal error" in err:
        return INTERNAL, f"{command}: {_shown(err)}"
    if "Traceback" in err or code not in {0, 1, 2}:
        return TRACEBACK, f"{command}: exit code {code}: {_shown(err)}"
    if code == 0:
        return RAN, ""
    stages = _STAGES.match(err) if command in _TELLS_STAGES else None
    if not _LINE.fullmatch(err, stages.end() if stages else 0):
        return TRACEBACK, f"{command}: not one line: {_shown(err)}"
    line = f"{command}: {_shown(err)}"
    if "onnxruntime cannot load" in err or "onnxruntime failed in" in err:
        return REFUSED_BY_ORT, line
    return (REFUSED if command == "inspect" else FAILED), line


def worst(found: list[tuple[str, str]]) -> tuple[str, str]:
    return max(found, key=lambda entry: _SEVERITY.index(entry[0]))


def killed(number: int, command: str) -> tuple[str, str]:
    return SIGNAL, f"{command}: {signal.Signals(number).name}"


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
