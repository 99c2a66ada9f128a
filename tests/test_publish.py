"""A folder holds the old bundle whole or the new one whole, whatever happens to the export."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from random_models import PLAIN, random_source

from tfmx.export import publish
from tfmx.export.pipeline import ExportOptions, export_model
from tfmx.export.publish import PublishError, TargetError, published
from tfmx.runtime.bundle import Bundle

UNVERIFIED = ExportOptions(verify=False)
OTHER = replace(PLAIN, mlp=replace(PLAIN.mlp, hidden=128))


def export_plain(out: Path, config=PLAIN) -> None:
    export_model(random_source(config), out, UNVERIFIED)


def digests(out: Path) -> dict[str, str]:
    return {name: info.sha256 for name, info in Bundle.open(out).manifest.files.items()}


def leftovers(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Digests of the two bundles that the tests replace by each other; tracing them here warms the cache."""
    folder = tmp_path_factory.mktemp("versions")
    export_plain(folder / "old", PLAIN)
    export_plain(folder / "new", OTHER)
    return [digests(folder / "old"), digests(folder / "new")]


def test_an_export_replaces_the_bundle_before_it(versions, tmp_path: Path) -> None:
    export_plain(tmp_path / "out", PLAIN)
    export_plain(tmp_path / "out", OTHER)
    assert digests(tmp_path / "out") == versions[1]
    assert leftovers(tmp_path) == []


def test_an_error_leaves_the_old_bundle_and_no_litter(versions, tmp_path: Path) -> None:
    export_plain(tmp_path / "out", PLAIN)

    def fail() -> None:
        with published(tmp_path / "out") as folder:
            (folder / "half-written").write_text("x")
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert digests(tmp_path / "out") == versions[0]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "kind", ["file", "link", "other files", "a web page's manifest", "a bundle and other files"]
)
def test_a_target_that_is_no_bundle_is_refused(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        out.symlink_to(tmp_path / "elsewhere")
    else:
        if kind == "a bundle and other files":
            export_plain(out)
        out.mkdir(exist_ok=True)
        (out / "thesis.txt").write_text("mine")
        if kind == "a web page's manifest":
            (out / "manifest.json").write_text('{"name": "page", "files": {"thesis.txt": 1}}')
    with pytest.raises(TargetError, match="choose another -o"):
        export_plain(out)
    assert kind in {"file", "link"} or (out / "thesis.txt").read_text() == "mine"


def test_files_that_come_while_the_export_runs_are_kept(tmp_path: Path) -> None:
    def put_a_file_there() -> None:
        with published(tmp_path / "out"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "thesis.txt").write_text("mine")

    with pytest.raises(TargetError, match="choose another -o"):
        put_a_file_there()
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    assert leftovers(tmp_path) == []


def test_a_file_system_without_locks_is_an_error_not_a_loop(tmp_path: Path, monkeypatch) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(PublishError, match="No locks available"):
        export_plain(tmp_path / "out")


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")
def test_a_folder_that_another_export_took_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, calls = publish._lock, []

    def robbed(folder: Path) -> int | None:
        calls.append(folder)
        if len(calls) == 1:
            folder.rmdir()
        return lock(folder)

    monkeypatch.setattr(publish, "_lock", robbed)
    with published(tmp_path / "out") as folder:
        (folder / "whole").write_text("x")
    assert calls == [folder, folder]
    assert (tmp_path / "out" / "whole").exists()


def test_an_empty_folder_becomes_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_plain(tmp_path / "out")
    Bundle.open(tmp_path / "out")


def test_missing_parents_are_made(tmp_path: Path) -> None:
    export_plain(tmp_path / "a" / "b" / "out")
    Bundle.open(tmp_path / "a" / "b" / "out")


def test_a_bundle_is_readable_by_others(tmp_path: Path) -> None:
    export_plain(tmp_path / "out")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.skipif(sys.platform != "linux", reason="kills forked children")
def test_100_kills_leave_the_old_or_the_new_bundle_whole(versions, tmp_path: Path) -> None:
    """Children are forked with the traces in their memory, so that kills fall into the writing, not the imports."""
    out = tmp_path / "out"
    export_plain(out, PLAIN)
    context = multiprocessing.get_context("fork")
    started = time.monotonic()
    whole = context.Process(target=export_plain, args=(out, OTHER))
    whole.start()
    whole.join()
    length = time.monotonic() - started
    outcomes = {0: 0, 1: 0}
    chance = random.Random(7)
    kills = attempts = 0
    while kills < 100:
        child = context.Process(target=export_plain, args=(out, (PLAIN, OTHER)[attempts % 2]))
        attempts += 1
        child.start()
        child.join(chance.uniform(0, 1.3 * length))
        if child.pid is not None and child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += child.exitcode == -signal.SIGKILL
        outcomes[versions.index(digests(out))] += 1
    assert min(outcomes.values()) > 0, outcomes  # both were seen
    assert attempts > kills  # some came through: kills fell up to the very end
    export_plain(out, PLAIN)
    assert leftovers(tmp_path) == []


def test_two_exports_at_once_leave_one_of_them_whole(versions, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    out = tmp_path / "out"
    for _ in range(5):
        children = [context.Process(target=export_plain, args=(out, config)) for config in (PLAIN, OTHER)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
        assert digests(out) in versions
        assert leftovers(tmp_path) == []


def limited(out: Path, size: int) -> None:
    signal.signal(
        signal.SIGXFSZ, signal.SIG_IGN
    )  # then a write past the limit is an error, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        export_plain(out, OTHER)
    except PublishError as error:
        os._exit(17 if "nothing was changed" in str(error) else 18)
    os._exit(0)


def test_a_file_that_cannot_grow_leaves_the_old_bundle(versions, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_plain(out, PLAIN)
    child = multiprocessing.get_context("fork").Process(target=limited, args=(out, 100_000))
    child.start()
    child.join()
    assert child.exitcode == 17
    assert digests(out) == versions[0]
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_old_bundle_and_room_for_another_try(versions, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(info.size for info in _files(tmp_path)) * 3 // 2  # room for one bundle and a half
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        export_plain(disk / "out", PLAIN)
        with pytest.raises(PublishError, match="No space left on device; nothing was changed"):
            export_plain(disk / "out", OTHER)
        assert digests(disk / "out") == versions[0]
        assert leftovers(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def _files(tmp_path: Path):
    export_plain(tmp_path / "measure", PLAIN)
    return Bundle.open(tmp_path / "measure").manifest.files.values()


def test_an_export_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfmx", "export", "preset:rotary", "-o", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not leftovers(tmp_path):
            assert process.poll() is None, "it ended before it could be told to"
            time.sleep(0.01)
        process.terminate()
        said = process.communicate()
    assert (process.returncode, said[0]) == (143, b"")
    assert b"error" not in said[1]  # the stages alone
    assert list(tmp_path.iterdir()) == []
