"""One graph on one device: makes the onnxruntime session and runs it, interruptibly.

Memory patterns are off: every step of a growing sequence has a new shape, and onnxruntime would keep one
pattern for each. The arena is shrunk after long prefills, or it would stay at its peak for ever.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import TfmxError
from .address_space import lacks_memory
from .beside import Beside
from .bundle import Bundle
from .devices import Device, DeviceError, check_assignment, import_onnxruntime, make_session
from .huge_pages import use_huge_pages
from .interrupt import run_interruptible
from .manifest import WEIGHTS, GraphInfo, Manifest

_SETTLED = 16  # decode steps: the session will be used for longer
_MOVED = range(16 << 20, 128 << 20)  # bytes of weights: less stays in caches, more takes longer than it gains
_COPIES = 3  # of the weights, at most, that are moved to huge pages: packed ones, and what else is new
_SPIN = "3000"  # µs that threads wait awake; between steps it is some 100, and new threads hold up what loads beside them
_FATAL = 4  # log severity: a failure is raised, so it need not be logged as well
_SHRINK = {"cpu": "cpu:0", "cuda": "cpu:0;gpu:0"}

NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int64": np.int64,
    "int32": np.int32,
    "int8": np.int8,
}


class SessionError(TfmxError):
    """onnxruntime failed to load or to run a graph."""


class Session:
    """A graph ready to run. Thread-safe: every run has its own binding."""

    def __init__(self, bundle: Bundle, role: str, device: Device, *, threads: int | None = None) -> None:
        self.info: GraphInfo = bundle.manifest.graphs[role]
        self.takes = frozenset(tensor.name for tensor in self.info.inputs)
        self.device = device
        self.ort = import_onnxruntime()
        options = _session_options(self.ort, bundle.path, device, threads)
        graph = bundle.graph(role)  # its audit's own error is no failure of onnxruntime's
        try:
            self._session = run_interruptible(
                lambda: make_session(graph, options, device, int8_cache=bundle.manifest.has_int8_cache),
                cancel=lambda: options.set_load_cancellation_flag(True),
            )
            if device.kind == "cuda":
                check_assignment(self._session.get_provider_graph_assignment_info())
        except DeviceError:
            raise
        except Exception as error:
            why = "there is not enough memory: " if lacks_memory(error) else ""
            raise SessionError(
                f"{why}onnxruntime cannot load {self.info.file}: {_one_line(error)}"
            ) from error

        self._brief_options = self._run_options(shrink=False)
        weights = _movable_weights(bundle.manifest) if device.kind == "cpu" else 0
        self._to_move = _COPIES * weights  # bytes, once
        self._brief_runs = 0

    def binding(self) -> Binding:
        return Binding(self._session.io_binding(), self.device)

    def run(self, binding: Binding, *, shrink: bool = False) -> None:
        """Run with what is bound. `shrink` gives the arena's free memory back afterwards."""
        options = self._run_options(shrink=shrink)
        self._guard(lambda: self._session.run_with_iobinding(binding.raw, options), options)

    def run_briefly(self, binding: Binding) -> None:
        """The same for a decode step: Ctrl-C waits for its end, and nothing is handed to another thread."""
        try:
            # past onnxruntime's wrapper, which spends 80 µs on looking for a CUDA graph in the options
            self._session._sess.run_with_iobinding(binding.raw._iobinding, self._brief_options)  # noqa: SLF001
        except Exception as error:
            raise SessionError(f"onnxruntime failed in {self.info.file}: {_one_line(error)}") from error
        self._brief_runs += 1
        if self._to_move and self._brief_runs >= _SETTLED:  # not ==: two threads may count past it
            limit, self._to_move = self._to_move, 0
            with contextlib.suppress(RuntimeError):  # no thread can be started: it goes on as it is
                Beside(lambda: use_huge_pages(limit))

    def run_values(
        self, names: list[str], values: list[Any], outputs: list[str], places: list[Any], *, shrink: bool
    ) -> list[Any]:
        """Run OrtValues to OrtValues, each output allocated at its place (`ort_device`).

        For state that gets a new shape every run: with 60 tensors half the cost of binding each anew.
        """
        options = self._run_options(shrink=shrink)
        feeds, results = _value_vector(), _value_vector()
        for value in values:
            feeds.push_back(value)
        self._guard(
            lambda: self._session.run_with_ortvaluevector(options, names, feeds, outputs, results, places),
            options,
        )
        return [results[index] for index in range(len(outputs))]

    def _run_options(self, *, shrink: bool) -> Any:
        options = self.ort.RunOptions()  # fresh each time: one that was terminated stays so
        options.log_severity_level = _FATAL
        if shrink:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", _SHRINK[self.device.kind])
        return options

    def _guard(self, work: Any, options: Any) -> None:
        def cancel() -> None:
            options.terminate = True

        try:
            run_interruptible(work, cancel)
        except Exception as error:
            raise SessionError(f"onnxruntime failed in {self.info.file}: {_one_line(error)}") from error


class Binding:
    """What one run reads and writes, by address: nothing is copied on the CPU."""

    def __init__(self, raw: Any, device: Device) -> None:
        self.raw = raw
        self._device = device
        self._kept: dict[str, npt.NDArray[Any]] = {}  # bound by address, so they must live as long
        self._host = ort_device("cpu")
        self.in_place = device.kind == "cpu"  # else a host array is copied when it is bound, as it then is

    def input(self, name: str, array: npt.NDArray[Any]) -> None:
        """A contiguous host array, used in place; onnxruntime copies it where the device is another one."""
        self.raw.bind_cpu_input(name, array)

    def host_input(self, name: str, dtype: type[np.generic], shape: tuple[int, ...], address: int) -> None:
        """Host memory that the caller keeps; past onnxruntime's wrapper, for every step does it."""
        self.raw._iobinding.bind_input(name, self._host, dtype, shape, address)  # noqa: SLF001

    def input_with_default(self, name: str, array: npt.NDArray[Any]) -> None:
        """As `input`, for one that the graph also has an initializer for (`bind_cpu_input` does not find those)."""
        self._kept[name] = array
        self.raw.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def output(self, name: str, array: npt.NDArray[Any]) -> None:
        self._kept[name] = array
        self.raw.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def device_input(self, name: str, dtype: Any, shape: tuple[int, ...], pointer: int) -> None:
        self.raw.bind_input(name, self._device.kind, 0, dtype, shape, pointer)

    def device_output(self, name: str, dtype: Any, shape: tuple[int, ...], pointer: int) -> None:
        self.raw.bind_output(name, self._device.kind, 0, dtype, shape, pointer)


def ort_value(array: npt.NDArray[Any], place: Any) -> Any:
    """An OrtValue at a place. On the CPU it uses the array's memory, but does not keep the array alive: you must."""
    from onnxruntime.capi import _pybind_state

    return _pybind_state.OrtValue.ortvalue_from_numpy(array, place)


def ort_device(kind: str) -> Any:
    return import_onnxruntime().OrtDevice.make(kind, 0)._get_c_device()  # noqa: SLF001 (what run_with_ortvaluevector takes)


def _value_vector() -> Any:
    from onnxruntime.capi import _pybind_state

    return _pybind_state.OrtValueVector()


def _session_options(ort: Any, folder: Path, device: Device, threads: int | None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    options.enable_mem_pattern = False
    if threads is not None:  # None: as many as there are physical cores
        options.intra_op_num_threads = threads
    # the graph is given as the bytes that were audited; its weights lie in the bundle
    entries = {
        "session.model_external_initializers_file_folder_path": str(folder.absolute()),
        "session.intra_op.spin_duration_us": _SPIN,
    }
    if device.kind == "cuda":
        entries["session.record_ep_graph_assignment_info"] = "1"
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def _movable_weights(manifest: Manifest) -> int:
    """Bytes that pay for a move to huge pages. Float weights do not: memory is what limits them anyway."""
    weights = manifest.files.get(WEIGHTS)
    return weights.size if manifest.quant is not None and weights and weights.size in _MOVED else 0


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:397] + "..."
