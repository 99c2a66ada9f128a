"""`tfmx doctor`: what is installed, where it can run, and why not elsewhere."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import click

from .. import TfmxError, __version__
from .boundary import EXIT_CODES, debug_option
from .console import size, write_line, write_table
from .progress import Bars

_RUNTIME = ("numpy", "tokenizers", "jinja2", "pillow", "onnxruntime", "onnxruntime-gpu")
_EXPORT = ("torch", "onnx", "onnx-ir", "onnxscript", "safetensors", "gguf")
# What onnxruntime's kernels look for; names as /proc/cpuinfo has them on x86 and on Arm.
_FLAGS = (
    "avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8",
    "asimd", "asimddp", "i8mm", "sve", "bf16",
)  # fmt: skip


@click.command(short_help="Show versions, devices and this machine.", epilog=EXIT_CODES)
@debug_option
def command() -> None:
    """Show what is installed, whether CUDA can be used and why not, and the machine."""
    write_line(f"tfmx {__version__}, Python {platform.python_version()}")
    _section("to run", _versions(_RUNTIME))
    _section("to export", _export_rows())
    with Bars() as progress:
        progress.stage("asking onnxruntime", 1)
        devices = _device_rows()
    _section("devices", devices)
    _section("machine", _machine_rows())


def _section(title: str, rows: Sequence[tuple[str, str]]) -> None:
    write_line()
    write_line(title)
    write_table(rows)


def _versions(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, _version(name) or "not installed") for name in names]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _export_rows() -> list[tuple[str, str]]:
    rows = _versions(_EXPORT)
    if any(_version(name) is None for name in _EXPORT):
        from ..runtime.extras import install_advice

        rows.append(("missing", f"what `tfmx export` needs; it comes with {install_advice('export')}"))
    return rows


def _device_rows() -> list[tuple[str, str]]:
    from ..runtime.devices import cuda_problem, import_onnxruntime

    telemetry = "off" if os.environ.get("ORT_DISABLE_TELEMETRY") == "1" else "ON"
    try:
        providers = ", ".join(import_onnxruntime().get_available_providers())
    except TfmxError as error:
        return [
            ("cpu", f"cannot be used: {error}"),
            ("cuda", "cannot be used: see cpu"),
            ("telemetry", telemetry),
        ]
    problem = cuda_problem()
    return [
        ("cpu", "works"),
        ("cuda", "works" if problem is None else f"cannot be used: {problem}"),
        ("providers", f"{providers} (what the package has, not what works)"),
        ("telemetry", telemetry),
    ]


def _machine_rows() -> list[tuple[str, str]]:
    cpu = _cpu_info()
    flags = [flag for flag in _FLAGS if flag in cpu.get("flags", cpu.get("Features", "")).split()]
    return [
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("processor", cpu.get("model name") or platform.processor() or "unknown"),
        ("instructions", " ".join(flags) or "unknown"),
        ("cores", f"{_usable_cores()} usable of {os.cpu_count()}"),
        ("memory", _memory()),
    ]


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty on other systems than Linux."""
    try:
        lines = (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        )
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _memory() -> str:
    from ..runtime.machine import total_memory

    total, free = total_memory(), _available_memory()
    if total is None:
        return "unknown"
    limit = _container_limit()
    parts = [size(total)]
    if free is not None:
        parts.append(f"{size(free)} available")
    if limit is not None and limit < total:
        parts.append(f"this container may use {size(limit)}")
    return ", ".join(parts)


def _available_memory() -> int | None:
    """As Linux counts it: with what it would take back from its caches."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _container_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text(encoding="ascii"))
        except (OSError, ValueError):  # ValueError: "max", no limit
            continue
    return None
