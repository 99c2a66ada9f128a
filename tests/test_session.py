"""Sessions: what onnxruntime refuses becomes one line, and long use does not grow."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny_bundle import list_files, tiny_weights, write_bundle, write_manifest

import tfmx
from tfmx import TfmxError
from tfmx.runtime import loading, memory
from tfmx.runtime.bundle import Bundle, BundleError
from tfmx.runtime.devices import Device
from tfmx.runtime.engine import Graphs, open_engine
from tfmx.runtime.sampling import SamplingOptions
from tfmx.runtime.session import SessionError

CPU = Device("cpu", "test")


def test_a_graph_that_onnxruntime_refuses_is_one_line(tmp_path, capfd):
    """It passes the audit, but onnxruntime has no kernel for an operator of these numbers."""
    folder = tmp_path / "b"
    manifest = write_bundle(folder, "append")
    model = onnx.load(folder / "prefill.onnx", load_external_data=False)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((3, 3), np.int8), "bytes"))
    model.graph.node.append(onnx.helper.make_node("Trilu", ["bytes"], ["half"]))
    (folder / "prefill.onnx").write_bytes(model.SerializeToString())
    write_manifest(folder, replace(manifest, files=list_files(folder)))
    with pytest.raises(SessionError, match=r"^onnxruntime cannot load prefill\.onnx: ") as caught:
        tfmx.load(folder)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, TfmxError)
    assert capfd.readouterr() == ("", "")


def test_a_graph_that_fails_the_audit_is_no_failure_of_onnxruntime(tmp_path):
    folder = tmp_path / "b"
    manifest = write_bundle(folder, "append")
    model = onnx.load(folder / "prefill.onnx", load_external_data=False)
    model.graph.node[0].op_type = "Loop"
    (folder / "prefill.onnx").write_bytes(model.SerializeToString())
    write_manifest(folder, replace(manifest, files=list_files(folder)))
    with pytest.raises(BundleError, match="Loop"):
        tfmx.load(folder)


def test_a_changed_file_explains_what_onnxruntime_refuses(tmp_path, monkeypatch):
    write_bundle(tmp_path / "b", "append")
    weights = bytearray((tmp_path / "b" / "weights.bin").read_bytes())
    weights[0] ^= 1
    (tmp_path / "b" / "weights.bin").write_bytes(weights)

    def refuse(*_, **__):
        raise SessionError("no")

    with pytest.raises(BundleError, match=r"weights\.bin was changed"):  # the session would be made
        tfmx.load(tmp_path / "b")
    monkeypatch.setattr(loading, "Graphs", refuse)
    with pytest.raises(BundleError, match=r"weights\.bin was changed"):
        tfmx.load(tmp_path / "b")
    with pytest.raises(SessionError, match=r"^no$"):
        tfmx.load(tmp_path / "b", check=False)


def test_ctrl_c_does_not_wait_for_the_sums(tmp_path, monkeypatch):
    write_bundle(tmp_path / "b", "append")
    may_end, ended = threading.Event(), threading.Event()

    def check(_bundle):
        may_end.wait(20)
        ended.set()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "_check_and_read_tokenizer", check)
    monkeypatch.setattr(loading, "Graphs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tfmx.load(tmp_path / "b")
    assert not ended.is_set()
    may_end.set()


def test_a_run_that_fails_is_one_line_and_the_session_goes_on(tmp_path, capfd):
    write_bundle(tmp_path / "b", "capacity")
    graphs = Graphs(Bundle.open(tmp_path / "b"), CPU, threads=1)
    engine = open_engine(graphs, 1, 16)
    with pytest.raises(SessionError, match=r"^onnxruntime failed in prefill\.onnx: .*Gather") as caught:
        engine.prefill([[9999]])
    assert "\n" not in str(caught.value)
    assert np.isfinite(engine.prefill([[5, 9]]).numpy()).all()
    assert capfd.readouterr() == ("", "")


def test_one_session_serves_a_single_sequence(tmp_path):
    write_bundle(tmp_path / "b", "capacity")
    graphs = Graphs(Bundle.open(tmp_path / "b"), CPU, threads=1)
    assert graphs.decoder is graphs.prefill
    separate = Graphs(Bundle.open(tmp_path / "b"), CPU, threads=1, lean=False)
    assert separate.decoder is separate.decoder is not separate.prefill


def private_memory() -> int:
    with Path("/proc/self/status").open(encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))  # KiB


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_many_answers_do_not_grow_the_process(flavour, tmp_path):
    write_bundle(tmp_path / "b", flavour, weights=tiny_weights())
    model = tfmx.load(tmp_path / "b", threads=1)
    free = SamplingOptions(ignore_eos=True)

    def answer(count: int) -> None:
        for number in range(count):
            list(model.generate([number % 320, 5, 9], free, max_new_tokens=60))

    answer(10)
    before = private_memory()
    answer(40)
    assert private_memory() - before < 4096


def test_giving_memory_back_is_left_out_where_the_c_library_cannot(monkeypatch):
    def no_library(_name):
        raise TypeError("as on Windows")

    memory.give_back_freed()
    monkeypatch.setattr(memory.ctypes, "CDLL", no_library)
    memory.give_back_freed()
