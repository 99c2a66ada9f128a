"""Whatever goes wrong is one line and an exit code; a traceback only with --debug."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from command_line import (
    ENDLESS,
    PROGRAM,
    Done,
    bundle,
    checkpoint,
    long_bundle,
    program,
    program_without,
    tfmx,
)

from tfmx import InputError, TfmxError
from tfmx.cli import doctor
from tfmx.runtime.sampling import SamplingError


def failing(monkeypatch, error: BaseException, *arguments: str) -> Done:
    """`tfmx doctor` that runs into this."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(doctor, "_export_rows", fail)
    monkeypatch.setattr(doctor, "write_line", lambda text="": None)
    monkeypatch.setattr(doctor, "write_table", lambda rows, align="": None)
    return tfmx("doctor", *arguments)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (TfmxError("it\nbroke"), 1, "it broke"),
        (InputError("no such thing"), 2, "no such thing"),
        (SamplingError("deeper"), 2, "deeper"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/big/file"),
            1,
            "/big/file: No space left on device",
        ),
        (PermissionError(errno.EACCES, "Permission denied", b"/secret"), 1, "/secret: Permission denied"),
        (OSError("strange"), 1, "strange"),
        (MemoryError(), 1, "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 TB"), 1, "not enough memory"),
        (ModuleNotFoundError("no", name="onnxscript"), 1, "onnxscript is not installed"),
        (ModuleNotFoundError("no", name="onnxruntime"), 1, "`pip install '.[cpu]'`"),
        (TfmxError("\x1b]0;title\x07 coloured"), 1, "\ufffd]0;title\ufffd coloured"),
    ],
)
def test_an_error_is_one_line(monkeypatch, error, code, line):
    failing(monkeypatch, error).fails(code, line)


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("by zero"), SystemExit(0), ModuleNotFoundError("no", name="rich"), AssertionError()],
)
def test_a_bug_asks_to_be_reported(monkeypatch, error):
    done = failing(monkeypatch, error)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert f"internal error: {type(error).__name__}" in done.err
    assert "--debug" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("arguments", [("--debug", "doctor"), ("doctor", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(monkeypatch, arguments):
    monkeypatch.setattr(doctor, "_export_rows", lambda: 1 / 0)
    done = tfmx(*arguments)
    assert done.code == 1
    assert "Traceback" in done.err
    assert "ZeroDivisionError: division by zero" in done.err
    assert done.err.splitlines()[-1].startswith("tfmx: error: internal error")


def test_ctrl_c_is_quiet(monkeypatch):
    assert failing(monkeypatch, KeyboardInterrupt()) == Done(130, "", "")


def test_ctrl_c_behind_another_error_is_quiet(monkeypatch):
    error = TfmxError("onnxruntime cannot be imported")
    error.__cause__ = ImportError("initialization failed")
    error.__cause__.__cause__ = KeyboardInterrupt()
    assert failing(monkeypatch, error) == Done(130, "", "")


def test_warnings_of_libraries_are_not_shown(monkeypatch):
    import warnings

    monkeypatch.setattr(doctor, "_export_rows", lambda: warnings.warn("old", stacklevel=1) or [])
    assert tfmx("doctor").err == ""


# --- packages that are missing ---------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["torch", "onnx_ir"])
def test_export_without_its_packages_says_what_to_install(package, tmp_path):
    done = program_without(package, "export", checkpoint(), "-o", tmp_path / "out")
    done.fails(1, f"{package} is not installed", "pip install '.[export]'")


def test_verify_against_without_torch_says_what_to_install():
    program_without("torch", "verify", bundle(), "--against", checkpoint()).fails(
        1, "pip install '.[export]'"
    )


def test_run_without_onnxruntime_says_what_to_install():
    program_without("onnxruntime", "run", bundle(), "Hi").fails(1, "pip install '.[cpu]'", "[cuda] instead")


def test_run_and_inspect_need_no_torch():
    assert program_without("torch", "run", bundle(), "Hi", "--max-tokens", "2").code == 0
    assert program_without("onnxruntime", "inspect", bundle()).code == 0


# --- streams ---------------------------------------------------------------------------------------------

FULL = Path("/dev/full")


@pytest.mark.parametrize("command", ["run {bundle} Hi", "inspect {bundle}", "--help"])
def test_a_broken_pipe_is_quiet(command):
    line = f"{' '.join(PROGRAM)} {command.format(bundle=bundle())} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() in {"141", "0"}  # 0: it was done before the reader went away
    assert [text for text in done.stderr.splitlines() if not text.startswith("prefill ")] == []


def test_a_reader_that_has_enough_ends_the_run():
    line = f"{' '.join(PROGRAM)} run {long_bundle()} Hi {' '.join(ENDLESS)} | head -c 5"
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, check=False)
    assert len(done.stdout) == 5
    assert done.stderr == b""


@pytest.mark.skipif(not FULL.exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [["run", "Hi", "-q"], ["inspect"]])
def test_a_full_disk_is_one_line(arguments):
    command, *rest = arguments
    with FULL.open("wb") as full:
        done = subprocess.run(
            [*PROGRAM, command, bundle(), *rest], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    Done(done.returncode, "", done.stderr).fails(1, "standard output cannot be written", "No space left")


def test_a_closed_stdout_is_no_failure():
    line = f"{' '.join(PROGRAM)} run {bundle()} Hi -q >&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_any_encoding_of_the_terminal_will_do():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = program("run", bundle(), "naïve", "--max-tokens", "40", "-q", env=environment)
    assert (done.code, done.err) == (0, "")
    assert done.out.isascii()
