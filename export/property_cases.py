"""The same few sequences, fed to a model in every way that the protocol says makes no difference.

One element after the other, in chunks, beside neighbours, between pads: `properties.py` runs them and compares each with
the sequence alone, in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .cases import Array, Case, Draw, Ids, Run
from .signature import Signature

Padding = Literal["left", "right", "between"]

LENGTHS = (12, 7, 9)
STEPS = 3
# What pads get as their position must not matter, so each padding gives them another one
_PAD_POSITIONS: dict[Padding, int] = {"left": 1, "right": 0, "between": -1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """How sequences are fed, and what it means if their outputs then differ."""

    name: str
    rows: tuple[int, ...] = (0, 1, 2)  # which sequences, side by side
    steps: int = 0  # so many elements at the end of each are decoded one by one
    chunks: tuple[int, ...] = ()  # columns of the prefills; the last one takes the rest
    padding: Padding = "left"
    length: int | None = None  # sequences are cut to it
    changed: bool = False  # the second half of each is another one; only the first half is compared
    mend: str


_STEP_MEND = (
    "what a step needs of earlier elements must come in through `state` and go out again, in the order of state_spec; "
    "`position_ids` tells where the new elements stand"
)
_PAD_MEND = (
    "elements with attention_mask 0 must change nothing: leave them out of attention, sums and recurrent states, and take "
    "positions from `position_ids`, not from columns"
)
_ROWS_MEND = "each row is computed for itself: no batch statistics (BatchNorm in training mode), no state or sum over the batch"


REPEATED = Arrangement(
    name="a second run of the same",
    rows=(0,),
    mend="the module draws random numbers or keeps something between calls; leave dropout to nn.Dropout, which eval() turns "
    "off, and give what must be kept as state",
)
BESIDE = Arrangement(name="a batch without pads", length=min(LENGTHS), mend=_ROWS_MEND)
PADDED = (
    Arrangement(name="a ragged batch, padded left", padding="left", mend=_PAD_MEND),
    Arrangement(name="a ragged batch, padded right", padding="right", mend=_PAD_MEND),
    Arrangement(name="a ragged batch, pads in between", padding="between", mend=_PAD_MEND),
)
PLAIN = Arrangement(
    name="its plain forward `reference`",
    mend="the steps and the plain forward are two models; find where their formulas differ",
)
CAUSAL = Arrangement(
    name="a changed later element",
    rows=(0,),
    changed=True,
    mend="an element must not see what comes after it; mask later columns",
)
STEPWISE = (
    Arrangement(name="a prefill, then steps", rows=(0,), steps=STEPS, mend=_STEP_MEND),
    Arrangement(name="steps alone", rows=(1,), steps=LENGTHS[1], mend=_STEP_MEND),
    Arrangement(name="a prefill in chunks", rows=(0,), chunks=(5, 1), mend=_STEP_MEND),
    Arrangement(name="a batch without pads, then steps", length=min(LENGTHS), steps=STEPS, mend=_ROWS_MEND),
)
PADDED_STEPS = (
    *(
        Arrangement(
            name=f"{arrangement.name}, then steps", padding=arrangement.padding, steps=STEPS, mend=_PAD_MEND
        )
        for arrangement in PADDED
    ),
    Arrangement(
        name="a ragged batch in chunks, where a row may have pads only",
        padding="right",
        chunks=(8,),
        mend=_PAD_MEND,
    ),
)


@dataclass(frozen=True, slots=True)
class Feeding:
    """A case, and which elements of which sequences its rows are."""

    arrangement: Arrangement
    case: Case
    sequences: tuple[int, ...]


class Feeder:
    """Draws sequences for a model once, and lays them out in any arrangement."""

    def __init__(self, signature: Signature, long: int) -> None:
        """`long`: the length of one more sequence, for windows and positions further on."""
        self.signature, context = signature, signature.steps.length
        draw = Draw(signature.steps)
        self.sequences: list[Array] = [draw(1, min(length, context))[0] for length in (*LENGTHS, long)]
        self.others = [draw(1, len(sequence))[0] for sequence in self.sequences]  # to change elements to
        self.sources: list[Array] = []
        if signature.kind == "encoder-decoder":
            source, longest = Draw(signature.inputs), signature.inputs.length
            self.sources = [source(1, min(length, longest))[0] for length in (5, 8, 3, 6)]
        self.is_image = signature.steps.kind == "images"

    def feed(self, arrangement: Arrangement) -> Feeding:
        rows = [self._sequence(index, arrangement) for index in arrangement.rows]
        if self.is_image:
            run = Run("encode", np.stack(rows), None)
            return Feeding(
                arrangement,
                Case(arrangement.name, np.zeros((len(rows), 0), np.int64), (run,)),
                arrangement.rows,
            )
        kind = self.signature.kind
        has_mask = kind != "encoder" or self.signature.has_mask
        first = [row[: max(len(row) - arrangement.steps, 0)] for row in rows]
        inputs, mask = laid_out(first, arrangement.padding)
        steps = (
            np.stack([row[len(row) - arrangement.steps :] for row in rows])
            if arrangement.steps
            else inputs[:, :0]
        )
        T = inputs.shape[1]
        inputs = np.concatenate([inputs, steps], axis=1)
        mask = np.concatenate([mask, np.ones((len(rows), steps.shape[1]), np.int64)], axis=1)
        if kind == "encoder":
            runs = [Run("encode", inputs, mask if has_mask else None)]
        else:
            widths = (
                [*arrangement.chunks, T - sum(arrangement.chunks)] if sum(arrangement.chunks) < T else [T]
            )
            runs = self._runs([width for width in widths if width], steps.shape[1], inputs, mask, arrangement)
        if kind == "encoder-decoder":
            runs.insert(0, self._source(arrangement))
        return Feeding(
            arrangement,
            Case(arrangement.name, np.zeros((len(rows), 0), np.int64), tuple(runs)),
            arrangement.rows,
        )

    def _sequence(self, index: int, arrangement: Arrangement) -> Array:
        sequence = self.sequences[index]
        if self.is_image:
            return sequence
        if arrangement.changed:
            half = len(sequence) // 2
            sequence = np.concatenate([sequence[:half], self.others[index][half:]])
        return sequence[: arrangement.length]

    def _runs(
        self, prefills: Sequence[int], steps: int, inputs: Array, mask: Ids, arrangement: Arrangement
    ) -> list[Run]:
        pad_position = _PAD_POSITIONS[arrangement.padding] % self.signature.steps.length
        positions = np.where(mask == 1, np.cumsum(mask, axis=1) - 1, pad_position)
        runs, start = [], 0
        for graph, width in [("prefill", width) for width in prefills] + [("decode", 1)] * steps:
            new = slice(start, start + width)
            runs.append(Run(graph, inputs[:, new], mask[:, : new.stop], positions[:, new]))  # type: ignore[arg-type]
            start += width
        return runs

    def _source(self, arrangement: Arrangement) -> Run:
        rows = [self.sources[index] for index in arrangement.rows]
        if self.signature.inputs.kind == "images":
            return Run("encode", np.stack(rows), None)
        return Run("encode", *laid_out(rows, arrangement.padding))


def laid_out(rows: Sequence[Array], padding: Padding) -> tuple[Array, Ids]:
    """Rows as one array (B, T, ...) and its mask (B, T); pads repeat what the row has elsewhere, as real as any."""
    longest = max(map(len, rows))
    ragged = any(len(row) < longest for row in rows)
    T = longest + 3 if ragged and padding == "between" else longest
    random = np.random.default_rng(T)
    mask = np.zeros((len(rows), T), np.int64)
    filler = next(row for row in rows if len(row) == longest)
    inputs = np.stack([np.resize(filler, (T, *filler.shape[1:])) for _ in rows])
    for index, row in enumerate(rows):
        columns = {
            "left": np.arange(T - len(row), T),
            "right": np.arange(len(row)),
            "between": np.sort(random.choice(T, len(row), replace=False)),
        }[padding]
        mask[index, columns] = 1
        inputs[index, columns] = row
    return inputs, mask
