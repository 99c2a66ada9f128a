"""Runs graphs whose cache is one buffer of fixed capacity C, bound as past and present: written in place.

A token's slot is its rank among the row's tokens, so there is no padding anywhere: each row is prefilled
alone, on its own slice of the buffers, and only decoding runs the batch together. The operator behind it
(GroupQueryAttention) needs this: several new tokens after a past work for one row only. It would silently
reallocate a buffer that is too short, so room is made before every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .device_buffer import DeviceBuffer
from .device_choice import DeviceLogits
from .engine import CHUNK, FloatArray, Graphs, HostLogits, IntArray, Logits, Row, Wiring, check_room
from .manifest import BundleError
from .session import NUMPY_DTYPES, Binding, Session

_GRANULE = 64  # capacities are multiples of it
_WHOLE_CHUNKS = (
    4096  # of capacity; beyond, chunks get smaller: attention holds a score a head, token and slot
)
_SHRINK_FROM = 128  # tokens: a shorter prefill leaves little in the arena


class _Step:
    """What a decode step reads, bound once: only the numbers change, and the length of the mask."""

    def __init__(self, session: Session, binding: Binding, wiring: Wiring, batch: int, capacity: int) -> None:
        self.binding, self._wiring, self._takes = binding, wiring, session.takes
        self._new: npt.NDArray[Any] = np.zeros((batch, 1, *wiring.tail), wiring.dtype)
        self._positions: IntArray = np.zeros((batch, 1), np.int64)
        self._mask: IntArray = np.ones(batch * (capacity + 1), np.int64)  # a step's mask is its front
        self._mask_address = self._mask.ctypes.data
        self._bind()

    def _bind(self) -> None:
        self.binding.input(self._wiring.input, self._new)
        if "position_ids" in self._takes:
            self.binding.input("position_ids", self._positions)

    def set(self, tokens: Row, lengths: Sequence[int]) -> None:
        batch, total = len(lengths), max(lengths) + 1
        for row in range(batch):  # one by one: to make an array of them first takes 20 µs
            self._new[row, 0] = tokens[row]
            self._positions[row, 0] = lengths[row]
        if not self.binding.in_place:
            self._bind()
        if "attention_mask" not in self._takes:
            return
        if batch > 1:  # each row's past, zeros, and the new token, whose column is the last in every row
            mask = self._mask[: batch * total].reshape(batch, total)
            mask[:, :-1] = np.arange(total - 1) < self._positions
            mask[:, -1] = 1
        self.binding.host_input("attention_mask", np.int64, (batch, total), self._mask_address)


class CapacityEngine:
    drafted = accepted = 0

    def __init__(self, graphs: Graphs, batch: int, expected: int) -> None:
        self._wiring = Wiring.of(graphs.manifest)
        if "num_logits_to_keep" not in graphs.prefill.takes and not self._wiring.last_only:
            raise BundleError("a prefill graph with a cache of fixed capacity must take num_logits_to_keep")
        self.lengths = [0] * batch
        self._graphs = graphs
        self._states = graphs.manifest.state
        self._axes = [state.axis for state in self._states]
        self._capacity = self._rounded(expected)
        self._buffers = [self._allocate(index, batch) for index in range(len(self._states))]
        self._step: _Step | None = None  # made anew when an address or the batch changes
        self._make_logits(batch)

    @property
    def can_trim(self) -> bool:
        return True

    @property
    def capacity(self) -> int:
        return self._capacity

    def prefill(self, rows: Sequence[Row]) -> Logits:
        self._make_room([len(row) for row in rows])
        before = list(self.lengths)
        try:
            for index, row in enumerate(rows):
                self._prefill_row(index, row)
        except BaseException:  # also Ctrl-C: what was written lies behind the old lengths and is never read
            self.lengths = before
            raise
        return self._last_logits()

    def decode(self, tokens: Row) -> Logits:
        if max(self.lengths) >= self._capacity:
            self._make_room([1] * len(self.lengths))
        session = self._graphs.decoder
        if self._step is None:
            self._step = _Step(
                session, self._bind_batch(session), self._wiring, len(self.lengths), self._capacity
            )
        self._step.set(tokens, self.lengths)
        session.run_briefly(self._step.binding)
        self.lengths = [length + 1 for length in self.lengths]
        return self._last_logits()

    def score(self, row: Row, extras: Sequence[str] = ()) -> dict[str, npt.NDArray[Any]]:
        assert len(self.lengths) == 1
        assert not extras  # the operator has none, and the manifest is refused
        self._make_room([len(row)])
        columns = 1 if self._wiring.last_only else len(row)
        output: FloatArray = np.empty((1, columns, self._wiring.size), np.float32)
        before = list(self.lengths)
        try:
            self._prefill_row(0, row, output)
        except BaseException:
            self.lengths = before
            raise
        return {self._wiring.output: output[0]}

    def held(self) -> list[npt.NDArray[Any]]:
        """Of each state that grows what every token wrote, on the host: (tokens, numbers), row after row."""
        found = []
        for buffer, axis in zip(self._buffers, self._axes, strict=True):
            by_slot = np.moveaxis(buffer.to_host(), axis, 1)  # (B, C, ...)
            rows = [row[:length] for row, length in zip(by_slot, self.lengths, strict=True)]
            found.append(np.concatenate(rows).reshape(sum(self.lengths), -1))
        return found

    def keep(self, rows: Sequence[int]) -> None:
        for buffer, axis in zip(self._buffers, self._axes, strict=True):
            buffer.keep(axis, list(rows), self.lengths)
        self.lengths = [self.lengths[row] for row in rows]
        self._step = None
        self._make_logits(len(rows))

    def trim(self, length: int) -> None:
        self.lengths = [min(length, old) for old in self.lengths]

    def _prefill_row(self, index: int, row: Row, every: FloatArray | None = None) -> None:
        """One row in chunks; its last logits go to the batch's buffer, or those of every position to `every`."""
        session = self._graphs.prefill
        binding = session.binding()
        self._bind_cache(binding, index, 1)
        if "num_logits_to_keep" in session.takes:
            binding.input_with_default("num_logits_to_keep", np.asarray(1 if every is None else 0, np.int64))
        if every is None:
            shape = (1, *self._logits.shape[1:])
            binding.device_output(self._wiring.output, np.float32, shape, self._logits.row_pointer(index))
        quant = self._graphs.manifest.quant
        # half is as fast with packed blocks, and leaves 15 MB less; fp32 would lose 4 %
        chunk = CHUNK if quant is None else CHUNK // 2
        chunk = max(chunk * _WHOLE_CHUNKS // max(self._capacity, _WHOLE_CHUNKS), 1)
        for start in range(0, len(row), chunk):
            new = np.asarray([row[start : start + chunk]], self._wiring.dtype)  # (1, T) or (1, T, F)
            past, T = self.lengths[index], new.shape[1]
            self._bind_new(
                session, binding, new, np.ones((1, past + T), np.int64), np.arange(past, past + T)[None]
            )
            if every is not None:
                part = every if self._wiring.last_only else every[:, start : start + T]
                binding.output(self._wiring.output, part)
            session.run(binding, shrink=start + T == len(row) >= _SHRINK_FROM)
            self.lengths[index] += T

    def _make_room(self, new: list[int]) -> None:
        assert len(new) == len(self.lengths)
        check_room(self._graphs.manifest, self.lengths, new)
        needed = max(length + count for length, count in zip(self.lengths, new, strict=True))
        if needed > self._capacity:
            capacity = self._rounded(max(needed, 2 * self._capacity))
            pairs = zip(self._buffers, self._axes, strict=True)
            grown = [buffer.grown(axis, capacity, self.lengths) for buffer, axis in pairs]
            self._step = None  # all or nothing: an interrupted growth leaves what is bound where it was
            self._buffers, self._capacity = grown, capacity

    def _rounded(self, length: int) -> int:
        return min(-(-length // _GRANULE) * _GRANULE, self._graphs.manifest.max_context)

    def _allocate(self, index: int, batch: int) -> DeviceBuffer:
        state = self._states[index]
        shape = (batch, *(self._capacity if isinstance(dim, str) else dim for dim in state.shape[1:]))
        return DeviceBuffer(shape, NUMPY_DTYPES[state.dtype], self._graphs.device)

    def _bind_cache(self, binding: Binding, row: int, count: int) -> None:
        for state, buffer in zip(self._states, self._buffers, strict=True):
            shape = (count, *buffer.shape[1:])
            binding.device_input(state.past, buffer.dtype, shape, buffer.row_pointer(row))
            binding.device_output(state.present, buffer.dtype, shape, buffer.row_pointer(row))

    def _bind_new(
        self, session: Session, binding: Binding, new: npt.NDArray[Any], mask: IntArray, positions: IntArray
    ) -> None:
        binding.input(self._wiring.input, new)
        if "attention_mask" in session.takes:
            binding.input("attention_mask", mask)
        if "position_ids" in session.takes:
            binding.input("position_ids", np.ascontiguousarray(positions))

    def _bind_batch(self, session: Session) -> Binding:
        binding = session.binding()
        self._bind_cache(binding, 0, len(self.lengths))
        binding.device_output(self._wiring.output, np.float32, self._logits.shape, self._logits.pointer)
        if "num_logits_to_keep" in session.takes:
            binding.input_with_default("num_logits_to_keep", np.asarray(1, np.int64))
        return binding

    def _make_logits(self, batch: int) -> None:
        """The buffer that every run writes, and the face that the caller sees of it, where one serves all runs."""
        logits = DeviceBuffer((batch, 1, self._wiring.size), np.float32, self._graphs.device)
        self._logits = logits
        self._result: Logits | None = None
        if self._graphs.chooser is not None:
            shape, read = (batch, self._wiring.size), lambda: logits.to_host()[:, 0]
            self._result = DeviceLogits(logits.pointer, shape, read, self._graphs.chooser)
        elif logits.device.kind == "cpu":
            self._result = HostLogits(logits.to_host()[:, 0])

    def _last_logits(self) -> Logits:
        if self._result is not None:
            return self._result
        return HostLogits(self._logits.to_host()[:, 0])  # a copy, so of this run only
