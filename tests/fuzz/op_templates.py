"""Reads `op_templates.txt`: a valid node of every operator that bundles may contain, with what it takes."""

from __future__ import annotations

import ast
import copy
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

TYPES = {
    "f": np.float32,
    "h": np.float16,
    "i": np.int64,
    "n": np.int32,
    "q": np.int8,
    "u": np.uint8,
    "b": np.bool_,
}
OPSET = 18

_LINE = re.compile(r"(?:(?P<domain>[a-z.]+)\.)?(?P<op>\w+)\((?P<inputs>.*?)\)(?P<rest>.*)")
_INPUT = re.compile(
    r"(?P<type>[fhinqub])(?:\[(?P<shape>[\d,]*)\](?:<(?P<below>\d+))?|=(?P<list>.+)|@(?P<scalar>.+))"
)


@dataclass
class Template:
    """One node; `arrays` are drawn anew for each use, None is an input that is left out."""

    domain: str
    op: str
    inputs: list[str]
    attributes: dict[str, Any]
    outputs: int
    opset: int
    arrays: list[np.ndarray | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.domain}.{self.op}" if self.domain else self.op

    def drawn(self, rng: Random) -> Template:
        found = copy.copy(self)
        found.attributes = dict(self.attributes)
        found.arrays = [_draw(rng, text) for text in self.inputs]
        return found


@functools.cache
def templates() -> tuple[Template, ...]:
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    return tuple(_parse(line) for line in text.splitlines() if line and not line.startswith("#"))


def _parse(line: str) -> Template:
    rest, _, opset = line.partition(" @ ")
    rest, _, outputs = rest.partition(" -> ")
    match = _LINE.fullmatch(rest)
    assert match, line
    attributes = dict(part.split("=", 1) for part in match["rest"].split())
    return Template(
        domain=match["domain"] or "",
        op=match["op"],
        inputs=[part for part in match["inputs"].split(", ") if part],
        attributes={name: ast.literal_eval(value) for name, value in attributes.items()},
        outputs=int(outputs or 1),
        opset=int(opset or OPSET),
    )


def _draw(rng: Random, text: str) -> np.ndarray | None:
    if text == "_":
        return None
    match = _INPUT.fullmatch(text)
    assert match, text
    dtype = TYPES[match["type"]]
    if match["list"] is not None:
        return np.asarray([float(value) for value in match["list"].split(",")]).astype(dtype)
    if match["scalar"] is not None:
        return np.asarray(float(match["scalar"])).astype(dtype)
    shape = [int(dim) for dim in match["shape"].split(",") if dim]
    numbers = np.random.default_rng(rng.getrandbits(32))
    if match["type"] == "b":
        return numbers.random(shape) < 0.5
    if match["type"] in "fh":
        return np.asarray(numbers.standard_normal(shape)).astype(dtype)
    return np.asarray(numbers.integers(0, int(match["below"] or 2), shape)).astype(dtype)
