"""What loading leaves in memory is given back, and nothing that is needed is lost."""

from __future__ import annotations

import mmap
import sys
from types import SimpleNamespace

import pytest
from tiny_bundle import write_bundle

import tfmx
from tfmx.runtime import loading, mappings, memory
from tfmx.runtime.mappings import Mapping

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
SIZE = 1 << 20
CONTENT = bytes(range(256)) * (SIZE // 256)


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "weights.bin").write_bytes(CONTENT)
    return tmp_path / "weights.bin"


def mapped(file) -> mmap.mmap:
    """As onnxruntime maps it: private and writable; all of it was read."""
    with file.open("rb") as source:
        memory = mmap.mmap(source.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    assert memory[:] == CONTENT
    return memory


def mappings_of(file) -> list[Mapping]:
    return [mapping for mapping in mappings.measured_mappings() if mapping.path == str(file)]


def bundle_at(folder, quant="int4") -> SimpleNamespace:
    return SimpleNamespace(path=folder, manifest=SimpleNamespace(quant=quant))


@linux
def test_what_was_read_is_given_back_and_can_be_read_again(weights):
    read = mapped(weights)
    assert [mapping.resident for mapping in mappings_of(weights)] == [SIZE]
    memory.give_back_read(bundle_at(weights.parent))
    assert [mapping.resident for mapping in mappings_of(weights)] == [0]
    assert read[:] == CONTENT


@linux
def test_it_is_found_through_a_link(weights, tmp_path):
    read = mapped(weights)
    (tmp_path / "link").symlink_to(weights.parent)
    memory.give_back_read(bundle_at(tmp_path / "link"))
    assert [mapping.resident for mapping in mappings_of(weights)] == [0]
    assert read[:] == CONTENT


@linux
@pytest.mark.parametrize(("quant", "byteorder"), [(None, "little"), ("int4", "big")])
def test_what_is_needed_at_once_or_was_swapped_stays(quant, byteorder, weights, monkeypatch):
    read = mapped(weights)
    monkeypatch.setattr(memory.sys, "byteorder", byteorder)
    memory.give_back_read(bundle_at(weights.parent, quant))
    assert [mapping.resident for mapping in mappings_of(weights)] == [SIZE]
    assert read[:] == CONTENT


@linux
def test_other_files_stay(weights, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "weights.bin"
    other.write_bytes(CONTENT)
    read = mapped(other)
    memory.give_back_read(bundle_at(weights.parent))
    assert [mapping.resident for mapping in mappings_of(other)] == [SIZE]
    assert read[:] == CONTENT


def test_loading_gives_back_what_it_read(tmp_path, monkeypatch):
    write_bundle(tmp_path / "b", "capacity")
    given = []
    monkeypatch.setattr(loading, "give_back_read", given.append)
    model = tfmx.load(tmp_path / "b", threads=1)
    assert given == [model.bundle]


def test_nothing_happens_on_another_system(weights, monkeypatch):
    def no_list():
        raise FileNotFoundError("/proc/self/maps")

    monkeypatch.setattr(memory, "mappings", no_list)
    memory.give_back_read(bundle_at(weights.parent))
