"""What runs a batch of sequences: tokens or vectors in, the last position's output out, the state in between.

Two engines have the same face: `AppendEngine` for caches that grow by concatenation and for recurrent
states, `CapacityEngine` for caches of fixed capacity that the graph writes in place.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from .. import TfmxError
from .address_space import require_address_space
from .bundle import Bundle
from .device_choice import Drawn, open_chooser
from .devices import Device
from .manifest import BundleError, Manifest
from .memory import estimate_memory
from .sampling import Draw, SamplingOptions, largest
from .session import NUMPY_DTYPES, Session

if TYPE_CHECKING:
    from .encoder import Encoded

_SESSIONS = 96 << 20  # bytes of address space besides the weights: threads, and a small model's graph (30)
CHUNK = 256  # tokens a prefill run: 512 are no faster, and leave 45 MB more in the arena (135M parameters)

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Row = Sequence[int] | npt.NDArray[Any]  # (T,) token ids, or (T, F) vectors


class ContextFullError(TfmxError):
    """A sequence would outgrow the model's context."""


class Graphs:
    """The sessions of one bundle on one device.

    Each session holds its own (pre-packed) copy of the weights, and its own spinning threads, so as few as
    possible are made. The prefill graph with one new token computes what the decode graph does, at nearly the
    same speed (int4 at 135M parameters: 5.3 ms instead of 5.1), so by default (`lean`) it also decodes.
    """

    def __init__(
        self, bundle: Bundle, device: Device, *, threads: int | None = None, lean: bool = True
    ) -> None:
        self.manifest = bundle.manifest
        self.device = device
        self._bundle = bundle
        self._threads = threads
        self._lean = lean
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()
        for role in bundle.manifest.used_graphs:
            bundle.graph(role)  # audited now: a fault shows at once
        # at least: weights are mapped piece by piece while they are packed, and what lacks then onnxruntime says itself
        require_address_space(_SESSIONS + estimate_memory(bundle).packed, "loading the graphs")
        for role in ("encode", "prefill"):  # what every input goes through
            if role in bundle.manifest.graphs:
                self.session(role)
        # choose the next token where the logits are; on the CPU numpy does it
        chooses = device.kind == "cuda" and {"select", "sample"} <= bundle.manifest.graphs.keys()
        self.chooser = open_chooser(bundle, device) if chooses else None

    @property
    def prefill(self) -> Session:
        return self.session("prefill")

    def session(self, role: str) -> Session:
        """The session of a graph, loaded when it is first asked for."""
        with self._lock:  # two threads must not load it twice
            if role not in self._sessions:
                self._sessions[role] = Session(self._bundle, role, self.device, threads=self._threads)
            return self._sessions[role]

    @property
    def decoder(self) -> Session:
        """The session for decode steps.

        A recurrent state is always carried on by the decode graph: prefill computes all steps at once, by rounds or
        spans that cost the same for one element (17 ms instead of 0.3 for an ablated LSTM of 4 layers).
        """
        return self.prefill if self._lean and not self.manifest.is_recurrent else self.session("decode")


class Logits(Protocol):
    """The main output of a batch's last position, where it is. Valid until the engine's next call."""

    def numpy(self) -> FloatArray:
        """(B, V) on the host; V is the outputs' size."""

    def greedy(self) -> tuple[list[int], list[bool]]:
        """Of each row the largest logit's token, and whether all its logits are finite."""

    @property
    def can_draw(self) -> bool:
        """Whether `draw` works; where not, the sampler is given the logits."""

    def draw(self, draws: Sequence[Draw], options: SamplingOptions) -> Drawn:
        """Each row's next token by its sampling options."""


class Engine(Protocol):
    lengths: list[int]  # tokens of each row that are in the state
    drafted: int  # tokens that were guessed and checked, by speculation
    accepted: int  # of these, what was chosen

    @property
    def can_trim(self) -> bool: ...

    def prefill(self, rows: Sequence[Row]) -> Logits:
        """Append tokens to each row, at least one; ragged rows are fine. After a failure nothing was appended."""

    def decode(self, tokens: Row) -> Logits:
        """Append one token, (B,), or one vector, (B, F), to each row."""

    def score(self, row: Row, extras: Sequence[str] = ()) -> dict[str, npt.NDArray[Any]]:
        """Append to a batch of one, giving the main output of every position, (T, V), and attention maps, (H, T, P+T).

        (1, V) where the graph gives only the last position's.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these (ascending)."""

    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens of each row."""


def open_engine(graphs: Graphs, batch: int, expected: int, encoded: Encoded | None = None) -> Engine:
    """An engine for `batch` new sequences that are expected to reach `expected` tokens.

    `encoded`: what the encode graph of an encoder-decoder made of their sources.
    """
    from .append_engine import AppendEngine
    from .capacity_engine import CapacityEngine

    growths = {entry.growth for entry in graphs.manifest.state}
    if "capacity" not in growths:
        return AppendEngine(graphs, batch, encoded)
    if growths != {"capacity"}:
        raise BundleError("this bundle mixes growth capacity and constant, which this tfmx cannot run")
    return CapacityEngine(graphs, batch, expected)


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which inputs and outputs of the prefill and decode graphs carry the sequence."""

    input: str
    dtype: type[np.generic]
    tail: tuple[int, ...]  # of one element: () for a token, (F,) for a vector
    output: str
    size: int
    last_only: bool  # the graph gives one position, the last, whatever it is asked for
    new_mask: bool  # its mask has the new elements' columns only: a recurrent state has no others

    @classmethod
    def of(cls, manifest: Manifest) -> Wiring:
        graph, outputs = manifest.graphs["prefill"], manifest.outputs
        main, output = graph.input(manifest.main_input("prefill")), graph.output(outputs.name)
        assert main is not None
        assert output is not None
        tail = tuple(dim for dim in main.shape[2:] if isinstance(dim, int))
        last_only = output.shape[1] == 1
        mask = graph.input("attention_mask")
        new_mask = mask is not None and mask.shape[1] == main.shape[1]
        return cls(main.name, NUMPY_DTYPES[main.dtype], tail, outputs.name, outputs.size, last_only, new_mask)


def check_room(manifest: Manifest, lengths: Sequence[int], new: Sequence[int]) -> None:
    longest = max(length + count for length, count in zip(lengths, new, strict=True))
    if longest > manifest.max_context:
        raise ContextFullError(f"{longest} tokens do not fit the context of {manifest.max_context}")


class HostLogits:
    def __init__(self, array: FloatArray) -> None:
        self._array = array  # (B, V)
        self._rows = list(array)  # once, where one object serves all runs

    def numpy(self) -> FloatArray:
        return self._array

    def greedy(self) -> tuple[list[int], list[bool]]:
        found = [largest(row) for row in self._rows]
        return [token for token, _ in found], [finite for _, finite in found]

    @property
    def can_draw(self) -> bool:
        return False

    def draw(self, draws: Sequence[Draw], options: SamplingOptions) -> Drawn:  # noqa: ARG002 - never called
        raise AssertionError("the sampler does it here")
