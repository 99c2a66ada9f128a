"""What the parity gate feeds to PyTorch and to the graphs: shapes that have broken exports elsewhere.

A case is a batch of rows whose tokens are fed in runs. Its columns (past, then new, pads included) are laid out
once, here; where a target keeps its cache in another order, `parity.py` translates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from .stitch import GraphKind

Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Padding = Literal["left", "right"]
DECODE_STEPS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """One call of one graph."""

    graph: GraphKind
    input_ids: Ids  # (B, T)
    attention_mask: Ids  # (B, P+T)
    position_ids: Ids  # (B, T)
    keep: int = 0  # num_logits_to_keep

    @property
    def is_real(self) -> Flags:
        """Which of the new tokens are not pads, (B, T)."""
        flags: Flags = self.attention_mask[:, -self.input_ids.shape[1] :] == 1
        return flags


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    past_mask: Ids  # (B, P): the cache that the first run finds
    runs: tuple[Run, ...]
    spare: int = 0  # slots of garbage behind the cache, where the target has a buffer with room
    columns_only: bool = False  # not for caches by slots: there, several tokens after a past are one row's
    is_golden: bool = False  # kept in the bundle, for checks without PyTorch


def parity_cases(vocab_size: int, context: int, longest: int) -> list[Case]:
    """`longest`: the longest sequence to try; below `context` only where memory would not hold the cache."""
    make = _Maker(vocab_size, context)
    steps = DECODE_STEPS
    return [
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
        make("golden: ragged batch", [10, 4], padding="left", decode=1, spare=8, is_golden=True),
    ]


def warm_up_case(vocab_size: int, context: int) -> Case:
    """Sequences whose caches are the pasts of the other cases."""
    return _Maker(vocab_size, context)("warm-up", [64] * 3)


class _Maker:
    def __init__(self, vocab_size: int, context: int) -> None:
        self.random = np.random.default_rng(20240229)
        self.vocab_size, self.context = vocab_size, context

    def __call__(
        self,
        name: str,
        rows: Sequence[int],  # how many new tokens each row gets before decoding
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
        ids = self.random.integers(0, self.vocab_size, (len(rows), T + decode), dtype=np.int64)
        widths = list(chunks) if chunks and sum(chunks) == T else [T] if T else []
        runs = [replace(run, keep=keep) for run in self._runs("prefill", ids, mask, P, widths)]
        mask = np.concatenate([mask, np.ones((len(rows), decode), np.int64)], axis=1)
        runs += self._runs("decode", ids[:, T:], mask, P + T, [1] * decode)
        spare = max(min(spare, self.context - P - T - decode), 0)
        return Case(name, past_mask, tuple(runs), spare, columns_only, is_golden)

    def _fitted(self, rows: Sequence[int], past: Sequence[int], decode: int) -> tuple[list[int], int]:
        """Shortened where the model's context is smaller than the case."""
        room = self.context - max(past)
        rows = [min(row, max(room - min(decode, 1), 1)) if row else 0 for row in rows]
        return rows, max(min(decode, room - max(rows)), 0)

    def _runs(self, graph: GraphKind, ids: Ids, mask: Ids, past: int, widths: Sequence[int]) -> Iterator[Run]:
        positions = np.cumsum(mask, axis=1) - 1
        pad_position = 1  # what transformers gives to pads; any will do
        positions = np.where(mask == 1, positions, pad_position)
        start = 0
        for width in widths:
            end = start + width
            columns = slice(past + start, past + end)
            yield Run(graph, ids[:, start:end], mask[:, : past + end], positions[:, columns])
            start = end


def _padded(lengths: Sequence[int], width: int, padding: Padding) -> Ids:
    columns = np.arange(width)[None, :]
    counts = np.array(lengths)[:, None]
    is_real = columns >= width - counts if padding == "left" else columns < counts
    return is_real.astype(np.int64)
