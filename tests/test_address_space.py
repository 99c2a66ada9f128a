"""Under a limit on address space (`ulimit -v`) each command does its work or says one line: no abort, no traceback."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from command_line import PROGRAM, bundle, checkpoint

from tfmx import TfmxError
from tfmx.cli.boundary import explain
from tfmx.runtime import address_space
from tfmx.runtime.address_space import AddressSpaceError, lacks_memory, require_address_space
from tfmx.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much is in use on Linux only")


def limited(megabytes: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limit,
        stdin=subprocess.DEVNULL,
    )


def fails_in_one_line(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether it failed, and then in the one way that is right."""
    if done.returncode == 0:
        assert done.stderr == ""
        return False
    assert (done.returncode, done.stdout) == (1, ""), done
    assert done.stderr.startswith("tfmx: error: "), done
    assert "not enough memory" in done.stderr, done
    assert done.stderr.count("\n") == 1, done
    return True


def test_run_says_one_line_or_works():
    """From where Python itself starts to where all is well; some of these were SIGABRT and SIGSEGV."""
    command = [*PROGRAM, "run", str(bundle()), "hello", "--max-tokens", "3", "-q"]
    failed = [
        fails_in_one_line(limited(megabytes, command))
        for megabytes in (60, 100, 150, 180, 200, 210, 250, 1000)
    ]
    assert failed == [True] * 7 + [False]


def test_export_says_one_line(tmp_path):
    command = [*PROGRAM, "export", str(checkpoint()), "-o", str(tmp_path / "b"), "--no-verify"]
    assert all(
        fails_in_one_line(limited(megabytes, command)) for megabytes in (300, 600, 700)
    )  # 600 was SIGABRT
    assert not (tmp_path / "b").exists()


def test_inspect_and_import_need_little():
    assert not fails_in_one_line(limited(100, [*PROGRAM, "inspect", str(bundle())]))
    assert not fails_in_one_line(limited(60, [sys.executable, "-c", "import tfmx"]))


@pytest.fixture
def tight(monkeypatch):
    monkeypatch.setattr(address_space, "free_address_space", lambda: 10 << 20)


def test_what_would_end_the_process_is_not_begun(tight, monkeypatch):
    from tiny_bundle import tiny_tokenizer

    data = tiny_tokenizer().to_str().encode()
    line = r"^there is not enough memory: reading the tokenizer needs about 16 MiB of address space, .* leaves 10;"
    with pytest.raises(AddressSpaceError, match=line):
        Tokenizer(data)
    monkeypatch.undo()
    tokenizer = Tokenizer(data)
    monkeypatch.setattr(address_space, "free_address_space", lambda: 20 << 20)
    assert tokenizer.decode(tokenizer.encode("Hi")) == "Hi"
    with pytest.raises(AddressSpaceError, match="encoding the text needs about 40 MiB"):
        tokenizer.encode("x" * 100_000)


def test_without_a_limit_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(address_space, "free_address_space", lambda: None)
    require_address_space(1 << 60, "anything")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ImportError("x.so: cannot allocate memory in static TLS block"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_errors_that_mean_memory_say_so(error):
    assert explain(error) == (
        "there is not enough memory for this; see what `tfmx inspect` says that a run needs",
        1,
    )
    behind = ValueError("Failed to export the model")
    behind.__cause__ = error
    assert lacks_memory(behind)
    assert not lacks_memory(TfmxError("another"))
