"""Runs graphs whose cache grows by concatenation, recurrent states, and what an encoder computed once.

Ragged rows are padded on the left: padding columns stay in the cache and the mask hides them. A token's
position is the number of real tokens before it in its row. Each run's presents are the next run's pasts,
as they are: nothing is copied to the host. Fixed states are pasts that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .device_choice import DeviceLogits
from .encoder import Encoded
from .engine import CHUNK, Graphs, HostLogits, IntArray, Logits, Row, Wiring, check_room
from .inputs import Array, pad_left
from .manifest import BundleError, StateInfo
from .session import NUMPY_DTYPES, Session, ort_device, ort_value

_SHRINK_FROM = 128  # columns: a shorter prefill leaves little in the arena

_Value = tuple[Any, Array | None]  # an OrtValue, and the array whose memory it uses


class AppendEngine:
    drafted = accepted = 0

    def __init__(self, graphs: Graphs, batch: int, encoded: Encoded | None = None) -> None:
        self.lengths = [0] * batch
        self._graphs = graphs
        self._wiring = Wiring.of(graphs.manifest)
        self._states = graphs.manifest.state
        self._host, self._here = ort_device("cpu"), ort_device(graphs.device.kind)
        self._mask = np.zeros((batch, 0), np.int64)  # (B, P): 1 where the cache holds a real token
        self._source_mask = np.zeros((batch, 0), np.int64) if encoded is None else encoded.mask  # (B, S)
        self._past = [self._begin(state, batch, encoded) for state in self._states]

    @property
    def can_trim(self) -> bool:
        return not self._graphs.manifest.is_recurrent

    def prefill(self, rows: Sequence[Row]) -> Logits:
        return self._result(self._append(rows, keep=1, extras=())[-1][0])

    def decode(self, tokens: Row) -> Logits:
        check_room(self._graphs.manifest, self.lengths, [1] * len(self.lengths))
        new = np.asarray(tokens, self._wiring.dtype)[:, None]  # (B, 1) or (B, 1, F)
        mask = np.concatenate((self._mask, np.ones((len(new), 1), np.int64)), axis=1)
        positions = np.asarray(self.lengths, np.int64)[:, None]
        output, *_ = self._run(self._graphs.decoder, new, mask, positions, keep=1, shrink=False)
        self.lengths = [length + 1 for length in self.lengths]
        return self._result(output)

    def score(self, row: Row, extras: Sequence[str] = ()) -> dict[str, Array]:
        assert len(self.lengths) == 1
        runs = self._append([row], keep=0, extras=extras)
        outputs = [run[0].numpy()[0] for run in runs]
        main = outputs[-1] if self._wiring.last_only else np.concatenate(outputs)
        maps = [value.numpy()[0] for value in runs[-1][1:]]
        return {self._wiring.output: main, **dict(zip(extras, maps, strict=True))}

    def held(self) -> list[Array]:
        """Of each state that grows what every token wrote, on the host: (tokens, numbers), row after row."""
        real = self._mask == 1
        return [
            np.moveaxis(value.numpy(), state.axis, 1)[real].reshape(sum(self.lengths), -1)
            for state, (value, _) in zip(self._states, self._past, strict=True)
            if state.growth == "append"
        ]

    def keep(self, rows: Sequence[int]) -> None:
        index = list(rows)
        mask, source_mask = self._mask[index], self._source_mask[index]
        columns, source = _used(mask), _used(source_mask)
        self._rewrite(index, columns, source)
        self._mask, self._source_mask = mask[:, columns], source_mask[:, source]
        self.lengths = [self.lengths[row] for row in index]

    def trim(self, length: int) -> None:
        assert self.can_trim
        mask = self._mask * (self._mask.cumsum(axis=1) <= length)
        columns = _used(mask)
        self._rewrite(list(range(len(self.lengths))), columns, _used(self._source_mask))
        self._mask, self.lengths = mask[:, columns], [min(length, old) for old in self.lengths]

    def _begin(self, state: StateInfo, batch: int, encoded: Encoded | None) -> _Value:
        if state.growth == "fixed":
            assert encoded is not None
            return encoded.outputs[state.present], None
        shape = (batch, *(0 if isinstance(dim, str) else dim for dim in state.shape[1:]))
        return self._value(np.zeros(shape, NUMPY_DTYPES[state.dtype]))

    def _append(self, rows: Sequence[Row], *, keep: int, extras: Sequence[str]) -> list[list[Any]]:
        """Run the rows, padded, in chunks of columns; gives the outputs (OrtValues) of each chunk.

        Attention maps are had in one run: what was before a recurrent state is in no later map.
        """
        counts = [len(row) for row in rows]
        check_room(self._graphs.manifest, self.lengths, counts)
        data, new = pad_left(rows, self._wiring.tail, self._wiring.dtype)
        P, T = self._mask.shape[1], max(counts)
        mask = np.concatenate((self._mask, new), axis=1)  # (B, P+T)
        positions = (np.asarray(self.lengths, np.int64)[:, None] + new.cumsum(axis=1) - 1).clip(0)
        before = self._past, self._mask
        step = T if extras else CHUNK
        found = []
        try:
            for start in range(0, T, step):
                end = min(start + step, T)
                parts = data[:, start:end], mask[:, : P + end], positions[:, start:end]
                shrink = end == T >= _SHRINK_FROM
                found.append(self._run(self._graphs.prefill, *parts, keep=keep, shrink=shrink, extras=extras))
        except BaseException:  # also Ctrl-C: the old pasts are still whole
            self._past, self._mask = before
            raise
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return found

    def _run(
        self,
        session: Session,
        data: Array,
        mask: IntArray,
        positions: IntArray,
        *,
        keep: int,
        shrink: bool,
        extras: Sequence[str] = (),
    ) -> list[Any]:
        """One run; its presents become the past. Gives the main output and the extras as OrtValues."""
        shown = mask[:, -data.shape[1] :] if self._wiring.new_mask else mask
        arrays = {self._wiring.input: data, "attention_mask": shown, "position_ids": positions}
        arrays |= {
            "num_logits_to_keep": np.asarray(keep, np.int64),
            "encoder_attention_mask": self._source_mask,
        }
        feeds = {n: np.require(array, requirements="C") for n, array in arrays.items() if n in session.takes}
        carried = [state for state in self._states if state.growth != "fixed"]
        place = self._host if self._graphs.chooser is None else self._here  # of the main output
        found = session.run_values(
            [*(state.past for state in self._states), *feeds],
            [
                *(value for value, _ in self._past),
                *(ort_value(array, self._host) for array in feeds.values()),
            ],
            [*(state.present for state in carried), self._wiring.output, *extras],
            [*[self._here] * len(carried), place, *[self._host] * len(extras)],
            shrink=shrink,
        )
        self._check_columns(session, found[len(carried)].shape(), len(data))
        presents = iter(found)
        self._past = [
            past if state.growth == "fixed" else (next(presents), None)
            for state, past in zip(self._states, self._past, strict=True)
        ]
        self._mask = mask[:, :0] if self._wiring.new_mask else mask
        return found[len(carried) :]

    def _check_columns(self, session: Session, shape: list[int], batch: int) -> None:
        """What a graph says of its outputs, onnxruntime only warns of."""
        if len(shape) != 3 or shape[0] != batch or shape[1] < 1 or shape[2] != self._wiring.size:
            raise BundleError(
                f"{session.info.file} gave {self._wiring.output} of the shape {shape}, "
                f"expected [{batch}, 1 or more, {self._wiring.size}]"
            )

    def _result(self, output: Any) -> Logits:
        B, T, V = output.shape()
        if self._graphs.chooser is None or T != 1:
            return HostLogits(output.numpy()[:, -1])
        return DeviceLogits(output.data_ptr(), (B, V), lambda: output.numpy()[:, -1], self._graphs.chooser)

    def _rewrite(
        self, rows: list[int], columns: npt.NDArray[np.bool_], source: npt.NDArray[np.bool_]
    ) -> None:
        """Rebuild the state from some of its rows and of its cache's and source's columns, by way of the host."""
        kept = {"append": columns, "fixed": source}
        past = []
        for state, (value, _) in zip(self._states, self._past, strict=True):
            array = value.numpy()[rows]
            if state.growth in kept:
                array = array.compress(kept[state.growth], axis=state.axis)
            past.append(self._value(np.ascontiguousarray(array)))
        self._past = past

    def _value(self, array: Array) -> _Value:
        return ort_value(array, self._here), array


def _used(mask: IntArray) -> npt.NDArray[np.bool_]:
    """The columns that are no padding in some row; the others can go."""
    return np.asarray(mask.any(axis=0))
