"""What the parity gate feeds to PyTorch and to the graphs: shapes that have broken exports elsewhere.

A case is a batch of rows whose elements are fed in runs. Its columns (past, then new, pads included) are laid out
once, here; where a target keeps its cache in another order, `parity.py` translates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..tfm_model.declarations import Elements
from .signature import Signature
from .stitch import GraphKind

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]
Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Padding = Literal["left", "right"]
DECODE_STEPS = 16
LONG = 200  # more than three spans of random features
MOST_COLUMNS = 1024  # of an encoder's longest case: its scores are a square


@dataclass(frozen=True, slots=True)
class Run:
    """One call of one graph."""

    graph: GraphKind
    inputs: Array  # ids (B, T), vectors (B, T, F) or images (B, C, H, W)
    attention_mask: (
        Ids | None
    )  # (B, P+T); None where the inputs have none: images, modules that cannot see pads
    position_ids: Ids | None = None  # (B, T); None where the graph finds them itself
    keep: int = 0  # num_logits_to_keep

    @property
    def length(self) -> int:
        return self.inputs.shape[1]

    @property
    def is_real(self) -> Flags:
        """Which of the new elements are not pads, (B, T)."""
        assert self.attention_mask is not None
        flags: Flags = self.attention_mask[:, -self.length :] == 1
        return flags


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    past_mask: Ids  # (B, P): the cache that the first run finds
    runs: tuple[Run, ...]  # an encoder-decoder's begin with encode
    spare: int = 0  # slots of garbage behind the cache, where the target has a buffer with room
    columns_only: bool = False  # not for caches by slots: there, several tokens after a past are one row's
    is_golden: bool = False  # kept in the bundle, for checks without PyTorch

    @property
    def answers(self) -> tuple[Run, ...]:
        """The runs that give the main output: an encoder-decoder's first does not."""
        return self.runs[1:] if len(self.runs) > 1 and self.runs[0].graph == "encode" else self.runs


def parity_cases(signature: Signature, longest: int, *, is_recurrent: bool = False) -> list[Case]:
    """`longest`: the longest sequence to try; below the context only where memory would not hold the cache.

    `is_recurrent`: a prefill computes all steps at once, by spans, so that a long one is another path.
    """
    if signature.kind == "encoder":
        return _encoder_cases(signature.inputs, has_mask=signature.has_mask)
    make, context = _Maker(signature), signature.steps.length
    steps = DECODE_STEPS
    long = [make("long ragged prefill", [LONG, LONG // 2], decode=1)] if is_recurrent else []
    return [
        *long,
        make("one token", [1]),
        make("longer than traced", [37]),
        make("ragged batch, padded left", [3, 11, 7], padding="left"),
        make("ragged batch, padded right", [3, 11, 7], padding="right"),
        make("only the last logits", [3, 11, 7], padding="left", keep=1),
        make("past of 1", [4], past=[1]),
        make("odd past", [6], past=[13], spare=5),
        make("one token after a past", [1], past=[9]),
        make(f"near the limit: {longest} of {context} positions", [8], past=[max(longest - 9, 0)], decode=1),
        make("prefill in chunks", [13], chunks=[5, 1, 7]),
        make("prefill and 16 steps", [6], decode=steps, spare=steps),
        make("ragged batch and 16 steps", [2, 9, 5], padding="left", decode=steps, spare=steps + 3),
        make("ragged batch, padded right, and 3 steps", [8, 4], padding="right", decode=3, spare=4),
        make(
            "ragged chunks after a ragged past", [7, 3, 5], past=[5, 12, 1], chunks=[4, 3], columns_only=True
        ),
        make("decode from nothing", [0, 0], decode=3, spare=4),
        make("decode after a ragged past", [0, 0, 0], past=[5, 12, 1], decode=3, spare=3),
        make("golden: one prompt", [12], decode=2, spare=8, is_golden=True),
        make(
            "golden: ragged batch", _golden_rows(signature), padding="left", decode=1, spare=8, is_golden=True
        ),
    ]


def _golden_rows(signature: Signature) -> list[int]:
    """An encoder-decoder's golden batch is ragged in its sources."""
    return [4, 4] if signature.kind == "encoder-decoder" else [10, 4]


def warm_up_case(signature: Signature) -> Case:
    """Sequences whose caches are the pasts of the other cases."""
    return _Maker(signature)("warm-up", [64] * 3)


def _encoder_cases(elements: Elements, *, has_mask: bool) -> list[Case]:
    draw = Draw(elements, has_mask=has_mask)
    longest = min(elements.length, MOST_COLUMNS)
    ragged: list[tuple[str, Sequence[int], Padding]] = [
        ("ragged batch, padded left", [3, 11, 7], "left"),
        ("ragged batch, padded right", [3, 11, 7], "right"),
        ("very ragged batch", [1, 29, 2, 16], "right"),
    ]
    shapes: list[tuple[str, Sequence[int], Padding]] = [
        ("one element", [1], "left"),
        ("two elements", [2] * 4, "left"),
        ("longer than traced", [37] * 4, "left"),
        (f"{longest} of {elements.length} positions", [longest], "left"),
        *(ragged if has_mask else []),
        ("golden: one input", [12], "left"),
        ("golden: ragged batch", [10, 4], "left") if has_mask else ("golden: batch", [7, 7], "left"),
    ]
    if elements.kind == "images":
        shapes = [
            ("one image", [0], "left"),
            ("three images", [0] * 3, "left"),
            ("golden: two images", [0] * 2, "left"),
        ]
    return [
        Case(
            name,
            np.zeros((len(rows), 0), np.int64),
            (draw.encode(rows, padding),),
            is_golden=name.startswith("golden"),
        )
        for name, rows, padding in shapes
    ]


class Draw:
    """Random elements; vectors are numbers that half precision holds exactly, so that all see the same."""

    def __init__(self, elements: Elements, *, has_mask: bool = True) -> None:
        self.random = np.random.default_rng(20240229)
        self.elements, self.has_mask = elements, has_mask

    def __call__(self, B: int, T: int) -> Array:
        if self.elements.kind == "tokens":
            assert self.elements.vocab_size is not None
            return self.random.integers(0, self.elements.vocab_size, (B, T), dtype=np.int64)
        sizes = {"batch_size": B, "length": T}
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in self.elements.shape("length")]
        return self.random.standard_normal(shape).astype(np.float16).astype(np.float64)

    def encode(self, rows: Sequence[int], padding: Padding) -> Run:
        if self.elements.kind == "images":
            return Run("encode", self(len(rows), 0), None)
        rows = [min(row, self.elements.length) for row in rows]
        mask = _padded(rows, max(rows), padding) if self.has_mask else None
        return Run("encode", self(len(rows), max(rows)), mask)


class _Maker:
    def __init__(self, signature: Signature) -> None:
        self.draw = Draw(signature.steps)
        self.source = Draw(signature.inputs) if signature.kind == "encoder-decoder" else None
        self.context = signature.steps.length

    def __call__(
        self,
        name: str,
        rows: Sequence[int],  # how many new elements each row gets before decoding
        *,
        past: Sequence[int] | None = None,  # how many each row has in the cache
        padding: Padding = "left",
        chunks: Sequence[int] | None = None,
        decode: int = 0,
        spare: int = 0,
        keep: int = 0,
        columns_only: bool = False,
        is_golden: bool = False,
    ) -> Case:
        past = [min(count, self.context - 2) for count in past or [0] * len(rows)]
        rows, decode = self._fitted(rows, past, decode)
        past_mask = _padded(past, max(past), "left")
        mask = np.concatenate([past_mask, _padded(rows, max(rows), padding)], axis=1)
        P, T = max(past), max(rows)
        inputs = self.draw(len(rows), T + decode)
        widths = list(chunks) if chunks and sum(chunks) == T else [T] if T else []
        runs = [replace(run, keep=keep) for run in self._runs("prefill", inputs, mask, P, widths)]
        mask = np.concatenate([mask, np.ones((len(rows), decode), np.int64)], axis=1)
        runs += self._runs("decode", inputs[:, T:], mask, P + T, [1] * decode)
        spare = max(min(spare, self.context - P - T - decode), 0)
        if self.source is not None:
            lengths = [3 + (5 * row + T) % 8 for row in range(len(rows))]
            runs.insert(0, self.source.encode(lengths, padding))
        return Case(name, past_mask, tuple(runs), spare, columns_only, is_golden)

    def _fitted(self, rows: Sequence[int], past: Sequence[int], decode: int) -> tuple[list[int], int]:
        """Shortened where the model's context is smaller than the case."""
        room = self.context - max(past)
        rows = [min(row, max(room - min(decode, 1), 1)) if row else 0 for row in rows]
        return rows, max(min(decode, room - max(rows)), 0)

    def _runs(
        self, graph: GraphKind, inputs: Array, mask: Ids, past: int, widths: Sequence[int]
    ) -> Iterator[Run]:
        positions = np.cumsum(mask, axis=1) - 1
        pad_position = 1  # what transformers gives to pads; any will do
        positions = np.where(mask == 1, positions, pad_position)
        start = 0
        for width in widths:
            end = start + width
            columns = slice(past + start, past + end)
            yield Run(graph, inputs[:, start:end], mask[:, : past + end], positions[:, columns])
            start = end


def _padded(lengths: Sequence[int], width: int, padding: Padding) -> Ids:
    columns = np.arange(width)[None, :]
    counts = np.array(lengths)[:, None]
    is_real = columns >= width - counts if padding == "left" else columns < counts
    return is_real.astype(np.int64)
