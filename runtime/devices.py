"""Chooses the device, and says why.

onnxruntime alone cannot be trusted here: its list of available providers names CUDA without a driver, a
session that was asked for CUDA can silently run on the CPU, and its fallback prints to stdout. So CUDA is
taken only after one small graph has truly run on it, and asking for it in vain is an error with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from .. import InputError, TfmxError
from .address_space import AddressSpaceError, lacks_memory, require_address_space
from .extras import install_advice

if TYPE_CHECKING:
    from .bundle import Bundle

DeviceName = Literal["cpu", "cuda", "auto"]

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_IMPORT = 64 << 20  # bytes of address space; with less than the 36 that it takes it complains on stderr
_WARNING, _FATAL = 2, 4  # onnxruntime's log severities; failures reach us as exceptions, once
_GQA = "com.microsoft.GroupQueryAttention"
_TILES_OFF = "ORT_GQA_DISABLE_FLASH_ATTENTION"
_tiles_lock = threading.Lock()  # held while the variable is ours: all threads have one environment

# y = x + x as an ONNX model (opset 18, float32 [n]); tests/test_devices.py makes it anew.
PROBE_MODEL = bytes.fromhex(
    "08083a3b0a0e0a01780a01781201792203416464120570726f62655a100a0178"
    "120b0a09080112050a0312016e62100a0179120b0a09080112050a0312016e42040a001012"
)

# What must not run on the CPU in a CUDA session. Shape arithmetic may: onnxruntime puts it there on purpose.
_HEAVY_OPS = frozenset(
    {
        "Attention",
        "Conv",
        "Gemm",
        "GroupQueryAttention",
        "LSTM",
        "LayerNormalization",
        "MatMul",
        "MatMulNBits",
        "MultiHeadAttention",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "Softmax",
    }
)


class DeviceError(InputError):
    """The device asked for cannot be had."""


class OnnxRuntimeMissingError(TfmxError):
    """onnxruntime itself cannot be imported."""


@dataclass(frozen=True, slots=True)
class Device:
    kind: Literal["cpu", "cuda"]
    reason: str  # why it was taken, for people

    @property
    def provider(self) -> str:
        return _PROVIDERS[self.kind]


def choose_device(wanted: DeviceName, bundle: Bundle | None = None) -> Device:
    """The device to run on. "auto" takes CUDA where it truly works, else the CPU, and says so in `reason`."""
    if wanted not in get_args(DeviceName):
        raise DeviceError(f"there is no device {wanted!r}; choose cpu, cuda or auto")
    if wanted == "cpu":
        import_onnxruntime()
        return Device("cpu", "asked for")
    problem = (bundle and bundle_problem(bundle)) or cuda_problem()
    if problem is None:
        return Device("cuda", "asked for" if wanted == "cuda" else "CUDA works here")
    if wanted == "cuda":
        raise DeviceError(f"CUDA cannot be used: {problem}")
    import_onnxruntime()
    return Device("cpu", f"no CUDA: {problem}")


def import_onnxruntime() -> Any:
    """The module `onnxruntime`, or an error that says what to install."""
    if "onnxruntime" not in sys.modules:
        require_address_space(_IMPORT, "onnxruntime")
    try:
        import onnxruntime
    except ImportError as error:
        if lacks_memory(error):
            raise AddressSpaceError(
                f"there is not enough memory to load onnxruntime ({_one_line(error)})"
            ) from error
        raise OnnxRuntimeMissingError(
            f"onnxruntime cannot be imported ({_one_line(error)}); {install_advice('cpu')}, "
            "with [cuda] instead for an NVIDIA GPU"
        ) from error
    return onnxruntime


def bundle_problem(bundle: Bundle) -> str | None:
    """Why this bundle cannot run on CUDA wherever it is, or None."""
    attends = any(_GQA in bundle.summary(role).ops for role in bundle.manifest.graphs)
    if attends and bundle.manifest.dtype == "fp32":  # whatever the cache is
        return (
            "this bundle's attention (GroupQueryAttention in float32) has no CUDA kernel; "
            "export with --dtype fp16 or --target portable"
        )
    return None


def cuda_problem() -> str | None:
    """Why CUDA cannot be used on this machine and what to do, or None when it works. Takes about a second."""
    return _package_problem() or _driver_problem() or _library_problem() or _probe_problem()


def _package_problem() -> str | None:
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if len(installed) == 2:
        return (
            "both onnxruntime and onnxruntime-gpu are installed, and they overwrite each other's files; "
            f"`pip uninstall onnxruntime onnxruntime-gpu`, then {install_advice('cuda')}"
        )
    if _PROVIDERS["cuda"] in import_onnxruntime().get_available_providers():
        return None
    if installed == ["onnxruntime"]:
        return (
            "the installed onnxruntime is the CPU package; "
            f"`pip uninstall onnxruntime`, then {install_advice('cuda')}"
        )
    return f"the installed onnxruntime was built without CUDA; in a new environment, {install_advice('cuda')}"


def _driver_problem() -> str | None:
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return (
            f"there is no NVIDIA driver here ({library} is not found); install one, or run with --device cpu"
        )
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return (
            f"the NVIDIA driver does not start (error {status}); see `nvidia-smi`, or run with --device cpu"
        )
    if count.value == 0:
        return "the NVIDIA driver sees no GPU; see `nvidia-smi`, or run with --device cpu"
    return None


def _library_problem() -> str | None:
    """Load CUDA and cuDNN from where pip puts them. onnxruntime prints what it misses, to stdout."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        import_onnxruntime().preload_dlls()
    failures = [
        line.removeprefix("Failed to load ")
        for line in said.getvalue().splitlines()
        if "Failed to load" in line
    ]
    if failures:
        names = ", ".join(line.partition(":")[0] for line in failures)
        return f"CUDA libraries are missing ({names}); they come with {install_advice('cuda')}"
    return None


def _probe_problem() -> str | None:
    """Run one addition on the GPU: the only proof that the driver, CUDA and cuDNN fit together."""
    import numpy as np

    options = import_onnxruntime().SessionOptions()
    options.log_severity_level = _FATAL
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = make_session(PROBE_MODEL, options, Device("cuda", "probe"))
        found = session.run(None, {"x": np.asarray([1.5], np.float32)})[0].tolist()
    except Exception as error:  # noqa: BLE001 (whatever it is, CUDA does not work)
        return f"a test run failed ({_one_line(error)}); see `nvidia-smi`, and `tfmx doctor` for the versions"
    return None if found == [3.0] else f"a test run gave {found} for 1.5 + 1.5"


def make_session(model: bytes, options: Any, device: Device, *, int8_cache: bool = False) -> Any:
    """An onnxruntime session that runs on `device` and nowhere else."""
    settings = {"device_id": "0", "use_tf32": "0"}  # TF32 would round float32 products to 10 bits
    providers = [(device.provider, settings)] if device.kind == "cuda" else [device.provider]
    ort = import_onnxruntime()
    with _quiet(ort) if device.kind == "cuda" else fastest_attention(int8_cache=int8_cache):
        session = ort.InferenceSession(model, options, providers=providers, enable_fallback=0)
    if session.get_providers()[0] != device.provider:
        raise DeviceError(f"onnxruntime gave {session.get_providers()[0]} instead of {device.provider}")
    return session


@contextlib.contextmanager
def fastest_attention(*, int8_cache: bool) -> Iterator[None]:
    """While a session is made: GroupQueryAttention's tiled kernel for float caches, its plain one for those of int8.

    At 135M parameters (int4, AVX2) the tiled one decodes 18 % faster at 1,024 tokens of a float cache; with int8 it reads a
    prompt 7 % slower and decodes 15 % slower at 512. Nothing but this variable chooses. One thread at a time.
    """
    with _tiles_lock:
        if not int8_cache or _TILES_OFF in os.environ:  # onnxruntime's own choice, or the user's
            yield
            return
        os.environ[_TILES_OFF] = "1"
        try:
            yield
        finally:
            os.environ.pop(_TILES_OFF, None)


@contextlib.contextmanager
def _quiet(ort: Any) -> Iterator[None]:
    """A provider that cannot be loaded is logged to stderr whatever the session's own level is."""
    ort.set_default_logger_severity(_FATAL)
    try:
        yield
    finally:
        ort.set_default_logger_severity(_WARNING)


def check_assignment(subgraphs: Iterable[Any]) -> None:
    """Refuse a CUDA session in which real work was left to the CPU (onnxruntime says so to nobody)."""
    for subgraph in subgraphs:
        if subgraph.ep_name == _PROVIDERS["cuda"]:
            continue
        for node in subgraph.get_nodes():
            if node.op_type in _HEAVY_OPS:
                raise DeviceError(
                    f"{node.op_type} of this bundle has no CUDA kernel here; run with --device cpu"
                )


def _is_installed(name: str) -> bool:
    from importlib import metadata  # 30 ms, and only asked for where CUDA is

    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
