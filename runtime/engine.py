"""What runs a batch of sequences: token ids in, logits of the last position out, the state in between.

Two engines have the same face: `AppendEngine` for caches that grow by concatenation and for recurrent
states, `CapacityEngine` for caches of fixed capacity that the graph writes in place.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .. import TfmxError
from .bundle import Bundle
from .device_choice import Drawn, open_chooser
from .devices import Device
from .manifest import BundleError, Manifest
from .sampling import Draw, SamplingOptions
from .session import Session

CHUNK = 512  # tokens a prefill run: bounds the memory of attention scores, large enough for full speed

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class ContextFullError(TfmxError):
    """A sequence would outgrow the model's context."""


class Graphs:
    """The sessions of one bundle on one device.

    Each session holds its own (pre-packed) copy of the weights, so as few as possible are made. The prefill
    graph with one new token computes what the decode graph does, at the same speed, so by default (`lean`)
    it also decodes single sequences, and the decode graph is loaded when the first batch needs it. Measured
    on SmolLM2 in float32: 756 MB instead of 1,282, and half the time to load. Both sessions pre-pack: the
    packed kernels give a row the same bits whatever the batch, the others do not.
    """

    def __init__(
        self, bundle: Bundle, device: Device, *, threads: int | None = None, lean: bool = True
    ) -> None:
        self.manifest = bundle.manifest
        self.device = device
        self._bundle = bundle
        self._threads = threads
        self._lean = lean
        self.prefill = Session(bundle, "prefill", device, threads=threads)
        self._decode: Session | None = None
        self._lock = threading.Lock()
        # choose the next token where the logits are; on the CPU numpy does it
        chooses = device.kind == "cuda" and {"select", "sample"} <= bundle.graphs.keys()
        self.chooser = open_chooser(bundle, device) if chooses else None

    def decoder(self, batch: int) -> Session:
        """The session for decode steps of so many rows."""
        if self._lean and batch == 1:
            return self.prefill
        with self._lock:  # two threads must not load it twice
            if self._decode is None:
                self._decode = Session(self._bundle, "decode", self.device, threads=self._threads)
            return self._decode


class Logits(Protocol):
    """The logits of a batch's last position, where they are. Valid until the engine's next call."""

    def numpy(self) -> FloatArray:
        """(B, V) on the host."""

    def greedy(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """The largest logit's token (B,), and whether the row's logits are all finite (B,)."""

    @property
    def can_draw(self) -> bool:
        """Whether `draw` works; where not, the sampler is given the logits."""

    def draw(self, draws: Sequence[Draw], options: SamplingOptions) -> Drawn:
        """Each row's next token by its sampling options."""


class Engine(Protocol):
    lengths: list[int]  # tokens of each row that are in the state

    @property
    def can_trim(self) -> bool: ...

    def prefill(self, rows: Sequence[Sequence[int]]) -> Logits:
        """Append tokens to each row, at least one; ragged rows are fine. After a failure nothing was appended."""

    def decode(self, tokens: Sequence[int] | IntArray) -> Logits:
        """Append one token to each row."""

    def score(self, row: Sequence[int]) -> FloatArray:
        """Append tokens to a batch of one, giving the logits of every position (T, V)."""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these (ascending)."""

    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens of each row."""


def open_engine(graphs: Graphs, batch: int, expected: int) -> Engine:
    """An engine for `batch` new sequences that are expected to reach `expected` tokens."""
    from .append_engine import AppendEngine
    from .capacity_engine import CapacityEngine

    growths = {entry.growth for entry in graphs.manifest.state}
    if "capacity" not in growths:
        return AppendEngine(graphs, batch)
    if growths != {"capacity"}:
        raise BundleError("this bundle mixes growth capacity and constant, which this tfmx cannot run")
    return CapacityEngine(graphs, batch, expected)


def check_room(manifest: Manifest, lengths: Sequence[int], new: Sequence[int]) -> None:
    longest = max(length + count for length, count in zip(lengths, new, strict=True))
    if longest > manifest.max_context:
        raise ContextFullError(f"{longest} tokens do not fit the context of {manifest.max_context}")


@dataclass(frozen=True, slots=True)
class HostLogits:
    array: FloatArray  # (B, V)

    def numpy(self) -> FloatArray:
        return self.array

    def greedy(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        return self.array.argmax(axis=1), np.asarray(np.isfinite(self.array).all(axis=1))

    @property
    def can_draw(self) -> bool:
        return False

    def draw(self, draws: Sequence[Draw], options: SamplingOptions) -> Drawn:  # noqa: ARG002 - never called
        raise AssertionError("the sampler does it here")
