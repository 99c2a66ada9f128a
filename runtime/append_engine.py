"""Runs graphs whose cache grows by concatenation, and recurrent states of constant size.

Ragged rows are padded on the left: padding columns stay in the cache and the mask hides them. A token's
position is the number of real tokens before it in its row. Each run's presents are the next run's pasts,
as they are: nothing is copied to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .device_choice import DeviceLogits
from .engine import CHUNK, FloatArray, Graphs, HostLogits, IntArray, Logits, check_room
from .session import NUMPY_DTYPES, Session, ort_device, ort_value

_PAD = 0  # any valid token: the mask hides it
_SHRINK_FROM = 128  # columns: a shorter prefill leaves little in the arena


class AppendEngine:
    def __init__(self, graphs: Graphs, batch: int) -> None:
        self.lengths = [0] * batch
        self._graphs = graphs
        self._states = graphs.manifest.state
        self._host, self._here = ort_device("cpu"), ort_device(graphs.device.kind)
        self._mask = np.zeros((batch, 0), np.int64)  # (B, P): 1 where the cache holds a real token
        self._inputs = [state.past for state in self._states]
        self._outputs = [*(state.present for state in self._states), "logits"]
        self._places = [self._here] * len(self._states) + [
            self._host if graphs.chooser is None else self._here
        ]
        self._past: list[Any] = []  # OrtValues
        self._memory: list[npt.NDArray[Any]] = []  # of those that were made from arrays
        shapes = [(batch, *(0 if isinstance(dim, str) else dim for dim in s.shape[1:])) for s in self._states]
        self._set_past(
            [np.zeros(shape, NUMPY_DTYPES[s.dtype]) for s, shape in zip(self._states, shapes, strict=True)]
        )

    @property
    def can_trim(self) -> bool:
        return all(state.growth != "constant" for state in self._states)

    def prefill(self, rows: Sequence[Sequence[int]]) -> Logits:
        return self._result(self._append(rows, keep=1)[-1])

    def decode(self, tokens: Sequence[int] | IntArray) -> Logits:
        check_room(self._graphs.manifest, self.lengths, [1] * len(self.lengths))
        ids = np.asarray(tokens, np.int64).reshape(-1, 1)  # (B, 1)
        mask = np.concatenate((self._mask, np.ones_like(ids)), axis=1)
        positions = np.asarray(self.lengths, np.int64)[:, None]
        logits = self._run(self._graphs.decoder(len(ids)), ids, mask, positions, keep=1, shrink=False)
        self.lengths = [length + 1 for length in self.lengths]
        return self._result(logits)

    def score(self, row: Sequence[int]) -> FloatArray:
        assert len(self.lengths) == 1
        return np.concatenate([logits.numpy()[0] for logits in self._append([row], keep=0)])

    def keep(self, rows: Sequence[int]) -> None:
        index = list(rows)
        mask = self._mask[index]
        columns = np.asarray(mask.any(axis=0))  # a column that is padding in every row left can go
        self._rewrite(index, columns)
        self._mask, self.lengths = mask[:, columns], [self.lengths[row] for row in index]

    def trim(self, length: int) -> None:
        assert self.can_trim
        mask = self._mask * (self._mask.cumsum(axis=1) <= length)
        columns = np.asarray(mask.any(axis=0))
        self._rewrite(list(range(len(self.lengths))), columns)
        self._mask, self.lengths = mask[:, columns], [min(length, old) for old in self.lengths]

    def _append(self, rows: Sequence[Sequence[int]], *, keep: int) -> list[Any]:
        """Run the rows, padded, in chunks of columns; gives the logits (OrtValues) of each chunk."""
        counts = [len(row) for row in rows]
        check_room(self._graphs.manifest, self.lengths, counts)
        P, T = self._mask.shape[1], max(counts)
        ids, new = np.full((len(rows), T), _PAD, np.int64), np.zeros((len(rows), T), np.int64)
        for index, row in enumerate(rows):
            ids[index, T - len(row) :], new[index, T - len(row) :] = row, 1
        mask = np.concatenate((self._mask, new), axis=1)  # (B, P+T)
        positions = (mask.cumsum(axis=1) - 1).clip(0)[:, P:]
        before = self._past, self._memory, self._mask
        logits = []
        try:
            for start in range(0, T, CHUNK):
                end = min(start + CHUNK, T)
                parts = ids[:, start:end], mask[:, : P + end], positions[:, start:end]
                shrink = end == T >= _SHRINK_FROM
                logits.append(self._run(self._graphs.prefill, *parts, keep=keep, shrink=shrink))
        except BaseException:  # also Ctrl-C: the old pasts are still whole
            self._past, self._memory, self._mask = before
            raise
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return logits

    def _run(
        self, session: Session, ids: IntArray, mask: IntArray, positions: IntArray, *, keep: int, shrink: bool
    ) -> Any:
        """One run; its presents become the past. Gives the logits as an OrtValue."""
        arrays = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        arrays["num_logits_to_keep"] = np.asarray(keep, np.int64)
        feeds = {n: np.require(array, requirements="C") for n, array in arrays.items() if n in session.takes}
        names = [*self._inputs, *feeds]
        values = [*self._past, *(ort_value(array, self._host) for array in feeds.values())]
        *past, logits = session.run_values(names, values, self._outputs, self._places, shrink=shrink)
        self._past, self._memory, self._mask = past, [], mask
        return logits

    def _result(self, logits: Any) -> Logits:
        B, T, V = logits.shape()
        if self._graphs.chooser is None or T != 1:
            return HostLogits(logits.numpy()[:, -1])
        return DeviceLogits(logits.data_ptr(), (B, V), lambda: logits.numpy()[:, -1], self._graphs.chooser)

    def _rewrite(self, rows: list[int], columns: npt.NDArray[np.bool_]) -> None:
        """Rebuild the state from some of its rows and cache columns, by way of the host."""
        arrays = []
        for state, value in zip(self._states, self._past, strict=True):
            array = value.numpy()[rows]
            if state.growth == "append":
                axis = next(i for i, dim in enumerate(state.shape) if i and isinstance(dim, str))
                array = array.compress(columns, axis=axis)
            arrays.append(np.ascontiguousarray(array))
        self._set_past(arrays)

    def _set_past(self, arrays: list[npt.NDArray[Any]]) -> None:
        self._past, self._memory = [ort_value(array, self._here) for array in arrays], arrays
