"""Huge pages: what is resident moves and stays the same, what has holes stays small, and refusals are respected."""

from __future__ import annotations

import mmap
import platform
import queue
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_bundle import tiny_weights, write_bundle

import tfmx
from tfmx.runtime import huge_pages, session
from tfmx.runtime.huge_pages import use_huge_pages
from tfmx.runtime.sampling import SamplingOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
SIZE = 32 << 20
ALL = 1 << 40


def private(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_resident_memory_moves_and_stays_the_same():
    pattern = bytes(range(256)) * (SIZE // 256)
    memory = private(SIZE)
    memory.write(pattern)
    moved = use_huge_pages(ALL)
    if moved == 0 and tuple(map(int, platform.release().split(".")[:2])) < (6, 1):
        pytest.skip("this kernel cannot")
    assert moved >= SIZE // 2
    assert memory[:] == pattern


def test_no_more_is_moved_than_asked_for():
    memory = private(SIZE)
    memory.write(b"x" * SIZE)
    page = 2 << 20
    assert use_huge_pages(0) == 0
    assert use_huge_pages(3 * page + 1) <= 4 * page
    assert memory[:] == b"x" * SIZE


def test_memory_with_holes_does_not_grow():
    memory = private(4 * SIZE)
    for place in range(0, 4 * SIZE, 1 << 20):  # a small page of each MB
        memory[place] = 1
    before = resident()
    use_huge_pages(ALL)
    assert resident() - before < SIZE


def test_nothing_happens_where_the_system_says_never(monkeypatch, tmp_path):
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    memory = private(SIZE)
    memory.write(b"x" * SIZE)
    assert use_huge_pages(ALL) == 0


def test_nothing_happens_where_there_are_no_such_files(monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    assert use_huge_pages(ALL) == 0


def test_a_large_session_asks_once_and_only_when_it_is_used_for_long(monkeypatch, tmp_path):
    asked = threading.Semaphore(0)
    monkeypatch.setattr(session, "use_huge_pages", lambda _limit: asked.release())
    monkeypatch.setattr(session, "_movable_weights", lambda manifest: manifest.files["weights.bin"].size)
    write_bundle(tmp_path / "b", "capacity", weights=tiny_weights())
    model = tfmx.load(tmp_path / "b", threads=1)

    def answer(tokens: int) -> None:
        list(model.generate([1, 2, 3], SamplingOptions(ignore_eos=True), max_new_tokens=tokens))

    answer(8)
    assert not asked.acquire(timeout=0.3)
    answer(24)
    assert asked.acquire(timeout=30)  # beside the work, whenever a busy machine gets to it
    answer(24)
    assert not asked.acquire(timeout=0.3)


def test_a_small_session_does_not_ask(monkeypatch, tmp_path):
    asked = threading.Semaphore(0)
    monkeypatch.setattr(session, "use_huge_pages", lambda _limit: asked.release())
    write_bundle(tmp_path / "b", "capacity", weights=tiny_weights())
    model = tfmx.load(tmp_path / "b", threads=1)
    list(model.generate([1, 2, 3], SamplingOptions(ignore_eos=True), max_new_tokens=24))
    assert not asked.acquire(timeout=0.3)


@pytest.fixture
def large(monkeypatch, tmp_path):
    """A model whose session counts as large."""
    monkeypatch.setattr(session, "_movable_weights", lambda manifest: manifest.files["weights.bin"].size)
    write_bundle(tmp_path / "b", "capacity", weights=tiny_weights())
    return tfmx.load(tmp_path / "b", threads=1)


def test_a_session_asks_for_a_few_times_its_weights_even_if_the_count_jumped(large, monkeypatch):
    """Two threads that count at once may step over any one number."""
    limits = queue.SimpleQueue()
    monkeypatch.setattr(session, "use_huge_pages", limits.put)
    large._open_graphs().decoder._brief_runs = 99
    list(large.generate([1, 2, 3], SamplingOptions(ignore_eos=True), max_new_tokens=4))
    assert limits.get(timeout=30) == 3 * large.manifest.files["weights.bin"].size
    assert limits.empty()


def test_a_thread_that_cannot_be_started_ends_no_answer(large, monkeypatch):
    def refuse(_work):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(session, "Beside", refuse)
    steps = list(large.generate([1, 2, 3], SamplingOptions(ignore_eos=True), max_new_tokens=24))
    assert len(steps) == 24


@pytest.mark.parametrize(
    ("quant", "size", "moved"),
    [("int4", 1 << 26, 1 << 26), ("int4", 1 << 20, 0), ("int4", 1 << 28, 0), (None, 1 << 26, 0)],
)
def test_quantised_weights_of_some_size_are_worth_it(quant, size, moved):
    manifest = SimpleNamespace(quant=quant, files={"weights.bin": SimpleNamespace(size=size)})
    assert session._movable_weights(manifest) == moved
