"""Both engines against the numpy reference: every way that tokens get into the state, and out of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tiny_bundle import (
    CONTEXT,
    list_files,
    reference_greedy,
    reference_logits,
    tiny_weights,
    write_bundle,
    write_manifest,
)

from tfmx.runtime import append_engine, capacity_engine, device_buffer
from tfmx.runtime.bundle import Bundle, BundleError, GraphInfo, StateInfo, TensorInfo
from tfmx.runtime.device_choice import open_chooser
from tfmx.runtime.devices import Device
from tfmx.runtime.engine import ContextFullError, Graphs, open_engine

CLOSE = {"fp32": 3e-5, "fp16": 0.12}  # logits reach 20; float16 has 11 bits, two layers add up
ROWS = [[5, 9, 17, 3, 22], [7, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
CPU = Device("cpu", "test")


@pytest.fixture(scope="module")
def weights():
    return tiny_weights()


@pytest.fixture(scope="module", params=["append", "capacity", "append-separate", "capacity-separate"])
def graphs(request, tmp_path_factory):
    """`separate`: single sequences too decode with the decode graph, as `tfmx verify` runs them."""
    flavour, _, separate = request.param.partition("-")
    folder = tmp_path_factory.mktemp("engines") / flavour
    write_bundle(folder, flavour)
    return Graphs(Bundle.open(folder), CPU, threads=1, lean=not separate)


def last(weights, row):
    return reference_logits(weights, row)[-1]


def assert_close(found, expected, dtype="fp32"):
    error = np.abs(np.asarray(found, np.float64) - expected).max()
    assert error <= CLOSE[dtype], f"max difference {error:.3g}"


def test_a_single_prompt_then_decoding_gives_the_reference_logits(graphs, weights):
    engine, ids = open_engine(graphs, 1, 16), [5, 9, 17]
    assert_close(engine.prefill([ids]).numpy()[0], last(weights, ids))
    for token in (3, 250, 22, 9):
        ids.append(token)
        assert_close(engine.decode([token]).numpy()[0], last(weights, ids))
    assert engine.lengths == [7]


def test_a_prompt_of_one_token_works(graphs, weights):
    engine = open_engine(graphs, 1, 8)
    assert_close(engine.prefill([[42]]).numpy()[0], last(weights, [42]))


def test_a_ragged_batch_gives_each_row_what_it_gets_alone(graphs, weights):
    engine, rows = open_engine(graphs, 3, 32), [list(row) for row in ROWS]
    logits = engine.prefill(rows)
    for step in range(6):
        for found, row in zip(logits.numpy(), rows, strict=True):
            assert_close(found, last(weights, row))
        tokens, finite = logits.greedy()
        assert all(finite)
        for row, token in zip(rows, tokens, strict=True):
            row.append((token + step) % 320)  # leave the model's own path: any token must work
        logits = engine.decode([row[-1] for row in rows])
    assert engine.lengths == [len(row) for row in rows]


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_prefill_in_chunks_gives_the_same(graphs, weights, chunk, monkeypatch):
    monkeypatch.setattr(append_engine, "CHUNK", chunk)
    monkeypatch.setattr(capacity_engine, "CHUNK", chunk)
    engine = open_engine(graphs, 3, 32)
    for found, row in zip(engine.prefill(ROWS).numpy(), ROWS, strict=True):
        assert_close(found, last(weights, row))
    assert_close(open_engine(graphs, 1, 32).score(ROWS[2])["logits"], reference_logits(weights, ROWS[2]))


def test_a_second_turn_continues_the_rows(graphs, weights):
    engine = open_engine(graphs, 3, 8)
    engine.prefill(ROWS)
    engine.decode([1, 2, 3])
    more = [[30, 31], [32, 33, 34, 35], [36]]
    found = engine.prefill(more).numpy()
    for i, row in enumerate(ROWS):
        assert_close(found[i], last(weights, [*row, i + 1, *more[i]]))
    found = engine.decode([7, 8, 9]).numpy()
    for i, row in enumerate(ROWS):
        assert_close(found[i], last(weights, [*row, i + 1, *more[i], i + 7]))


def test_trimmed_tokens_are_forgotten(graphs, weights):
    engine = open_engine(graphs, 3, 8)
    engine.prefill(ROWS)
    engine.decode([1, 2, 3])
    engine.trim(4)
    assert engine.lengths == [4, 3, 4]
    found = engine.prefill([[50], [51, 52], [53, 54, 55]]).numpy()
    kept = [[*ROWS[0][:4], 50], [*ROWS[1], 2, 51, 52], [*ROWS[2][:4], 53, 54, 55]]
    for i, row in enumerate(kept):
        assert_close(found[i], last(weights, row))
    assert engine.can_trim


def test_rows_that_are_done_can_be_dropped(graphs, weights):
    engine = open_engine(graphs, 3, 32)
    engine.prefill(ROWS)
    engine.decode([1, 2, 3])
    engine.keep([1, 2])
    assert engine.lengths == [3, 12]
    found = engine.decode([60, 61]).numpy()
    assert_close(found[0], last(weights, [*ROWS[1], 2, 60]))
    assert_close(found[1], last(weights, [*ROWS[2], 3, 61]))
    engine.keep([0])
    assert_close(engine.decode([62]).numpy()[0], last(weights, [*ROWS[1], 2, 60, 62]))


def test_the_whole_context_can_be_filled_and_no_more(graphs, weights):
    ids = [(7 * i) % 320 for i in range(CONTEXT)]
    engine = open_engine(graphs, 1, 4)
    engine.prefill([ids[: CONTEXT - 2]])
    engine.decode([ids[-2]])
    assert_close(engine.decode([ids[-1]]).numpy()[0], last(weights, ids))
    with pytest.raises(ContextFullError, match=f"{CONTEXT + 1} tokens do not fit the context of {CONTEXT}"):
        engine.decode([1])
    with pytest.raises(ContextFullError):
        open_engine(graphs, 2, 4).prefill([[1], [*ids, 1]])


def test_a_failed_prefill_leaves_the_state_as_it_was(graphs, weights, monkeypatch):
    engine = open_engine(graphs, 2, 64)
    engine.prefill([ROWS[0], ROWS[1]])
    monkeypatch.setattr(append_engine, "CHUNK", 2)
    monkeypatch.setattr(capacity_engine, "CHUNK", 2)
    with pytest.raises(Exception, match="indices element out of data bounds"):
        engine.prefill([[30, 31, 32, 33, 9999], [34]])  # the second chunk fails
    assert engine.lengths == [5, 2]
    found = engine.decode([60, 61]).numpy()
    assert_close(found[0], last(weights, [*ROWS[0], 60]))
    assert_close(found[1], last(weights, [*ROWS[1], 61]))


def test_logits_do_not_depend_on_the_batch_bit_by_bit(graphs):
    """The same seed must give the same tokens whatever the batch: fp32 kernels are batch-invariant."""
    together, alone = open_engine(graphs, 3, 32), open_engine(graphs, 1, 32)
    both, one = together.prefill([ROWS[2]] * 3).numpy(), alone.prefill([ROWS[2]]).numpy()
    assert np.array_equal(both[1], one[0])
    assert np.array_equal(together.decode([4, 4, 4]).numpy()[2], alone.decode([4]).numpy()[0])


# --- the cache of fixed capacity -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def capacity_graphs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("capacity") / "bundle"
    write_bundle(folder, "capacity")
    return Graphs(Bundle.open(folder), CPU, threads=1)


def test_the_capacity_grows_as_needed_and_stays_right(capacity_graphs, weights, monkeypatch):
    monkeypatch.setattr(capacity_engine, "_GRANULE", 8)
    engine, rows = open_engine(capacity_graphs, 2, 3), [[5, 9, 17], [7]]
    assert engine.capacity == 8
    engine.prefill(rows)
    seen = []
    for token in range(100, 100 + 40):
        logits = engine.decode([token, token + 50])
        rows[0].append(token)
        rows[1].append(token + 50)
        seen.append(engine.capacity)
    assert sorted(set(seen)) == [8, 16, 32, 64]
    for found, row in zip(logits.numpy(), rows, strict=True):
        assert_close(found, last(weights, row))


def test_the_capacity_never_passes_the_context(capacity_graphs):
    assert open_engine(capacity_graphs, 1, 10**6).capacity == CONTEXT


def test_garbage_in_unused_slots_is_never_read(capacity_graphs, weights):
    """Buffers are not cleared: what an earlier request or the allocator left there must not matter."""
    engine = open_engine(capacity_graphs, 2, 32)
    for buffer in engine._buffers:
        buffer.to_host()[:] = np.nan
    rows = [[5, 9, 17, 3], [7]]
    engine.prefill(rows)
    found = engine.decode([60, 61]).numpy()
    for i, row in enumerate(rows):
        assert_close(found[i], last(weights, [*row, 60 + i]))


def test_the_cache_is_written_in_place(capacity_graphs):
    engine = open_engine(capacity_graphs, 2, 32)
    pointers = [buffer.pointer for buffer in engine._buffers]
    for buffer in engine._buffers:
        buffer.to_host()[:] = 0
    engine.prefill([[1, 2, 3], [4]])
    engine.decode([5, 6])
    assert [buffer.pointer for buffer in engine._buffers] == pointers
    for buffer in engine._buffers:
        filled = np.abs(buffer.to_host()).sum(axis=(1, 3)) > 0  # (B, C)
        assert filled.sum(axis=1).tolist() == [4, 2]
        assert buffer.pointer % 64 == 0


def test_memory_on_a_device_behaves_the_same(capacity_graphs, weights, monkeypatch):
    """The branch for CUDA (an OrtValue, changed by way of the host), with the CPU in the GPU's place."""
    from types import SimpleNamespace

    import onnxruntime

    def put(array, _kind, _index):
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array.copy(), "cpu", 0)
        return SimpleNamespace(numpy=lambda: value.numpy().copy(), data_ptr=value.data_ptr)  # as from a GPU

    fake = SimpleNamespace(OrtValue=SimpleNamespace(ortvalue_from_numpy=put))
    monkeypatch.setattr(device_buffer, "import_onnxruntime", lambda: fake)
    monkeypatch.setattr(capacity_engine, "_GRANULE", 8)

    def on_device(shape, dtype, _device):
        return device_buffer.DeviceBuffer(shape, dtype, Device("cuda", "test"))

    monkeypatch.setattr(capacity_engine, "DeviceBuffer", on_device)
    engine, rows = open_engine(capacity_graphs, 3, 3), [list(row) for row in ROWS]
    engine.prefill(rows)
    engine.decode([1, 2, 3])
    engine.keep([0, 2])
    rows = [[*rows[0], 1], [*rows[2], 3]]
    for token in range(100, 130):  # grows twice
        logits = engine.decode([token, token + 50])
        rows[0].append(token)
        rows[1].append(token + 50)
    for found, row in zip(logits.numpy(), rows, strict=True):
        assert_close(found, last(weights, row))


# --- recurrent states ------------------------------------------------------------------------------------


@pytest.fixture
def recurrent(tmp_path):
    """Logits of a running sum of embeddings: a state of constant size."""
    folder, weights = tmp_path / "recurrent", tiny_weights()
    manifest = write_bundle(folder, "append")
    state = StateInfo(
        past="past_state",
        present="present_state",
        dtype="float32",
        shape=("batch_size", 32),
        growth="constant",
    )
    graphs = {}
    for role in ("prefill", "decode"):
        T = 1 if role == "decode" else "sequence_length"
        inputs = [
            ("input_ids", "int64", ("batch_size", T)),
            ("attention_mask", "int64", ("batch_size", T)),
            ("past_state", "float32", ("batch_size", 32)),
        ]
        outputs = [
            ("logits", "float32", ("batch_size", 1, 320)),
            ("present_state", "float32", ("batch_size", 32)),
        ]
        types = {"int64": onnx.TensorProto.INT64, "float32": onnx.TensorProto.FLOAT}
        nodes = [
            helper.make_node("Gather", ["embed", "input_ids"], ["all"]),
            helper.make_node("Unsqueeze", ["attention_mask", "last"], ["mask"]),
            helper.make_node("Cast", ["mask"], ["real"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Mul", ["all", "real"], ["x"]),
            helper.make_node("ReduceSum", ["x", "one"], ["sum"], keepdims=0),
            helper.make_node("Add", ["past_state", "sum"], ["present_state"]),
            helper.make_node("Unsqueeze", ["present_state", "one"], ["y"]),
            helper.make_node("MatMul", ["y", "head"], ["logits"]),
        ]
        constants = {"embed": weights["embed"], "head": weights["head"], "one": np.asarray([1], np.int64)}
        constants["last"] = np.asarray([2], np.int64)
        graph = helper.make_graph(
            nodes,
            role,
            *(
                [helper.make_tensor_value_info(n, types[t], s) for n, t, s in side]
                for side in (inputs, outputs)
            ),
            [numpy_helper.from_array(array, name) for name, array in constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        (folder / f"{role}.onnx").write_bytes(model.SerializeToString())
        sides = [
            tuple(TensorInfo(name=n, dtype=t, shape=s) for n, t, s in side) for side in (inputs, outputs)
        ]
        graphs[role] = GraphInfo(file=f"{role}.onnx", inputs=sides[0], outputs=sides[1])
    write_manifest(folder, replace(manifest, graphs=graphs, state=(state,), files=list_files(folder)))
    return folder


def test_a_recurrent_state_is_carried_from_run_to_run(recurrent, weights, monkeypatch):
    monkeypatch.setattr(append_engine, "CHUNK", 2)
    engine = open_engine(Graphs(Bundle.open(recurrent), CPU, threads=1), 2, 16)
    engine.prefill([[1, 2, 3], [4, 5, 6]])
    engine.decode([7, 8])
    engine.keep([1])
    found = engine.prefill([[9, 10, 11]]).numpy()[0]
    assert_close(found, weights["embed"][[4, 5, 6, 8, 9, 10, 11]].sum(0) @ weights["head"])
    assert not engine.can_trim


def test_a_decode_graph_that_fails_the_audit_is_refused_at_once(recurrent):
    """Also with all sums right; its session would be made at the first step."""
    manifest = Bundle.look(recurrent).manifest
    graph = onnx.load(recurrent / "decode.onnx")
    graph.graph.node[0].op_type = "Loop"
    (recurrent / "decode.onnx").write_bytes(graph.SerializeToString())
    write_manifest(recurrent, replace(manifest, files=list_files(recurrent)))
    with pytest.raises(BundleError, match="Loop"):
        Graphs(Bundle.look(recurrent), CPU, threads=1)


def test_a_chat_that_cannot_be_trimmed_starts_anew(recurrent):
    """A recurrent state cannot forget: only a history that continues it is reused."""
    import tfmx

    model = tfmx.load(recurrent, threads=1)
    hi, ho = ([{"role": "user", "content": text}] for text in ("Hi", "Ho"))
    first = [step.token_id for step in model.chat(hi, max_new_tokens=5)]
    other = list(model.chat(ho, max_new_tokens=5))
    assert other[0].statistics.cached_tokens == 0
    assert [step.token_id for step in model.chat(hi, max_new_tokens=5)] == first


# --- float16, and choosing on the device -----------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_float16_bundles_run_on_the_cpu(flavour, tmp_path, weights):
    write_bundle(tmp_path / "b", flavour, dtype="fp16")
    graphs = Graphs(Bundle.open(tmp_path / "b"), CPU, threads=1)
    engine, rows = open_engine(graphs, 3, 16), [list(row) for row in ROWS]
    engine.prefill(rows)
    found = engine.decode([60, 61, 62]).numpy()
    for i, row in enumerate(rows):
        assert_close(found[i], last(weights, [*row, 60 + i]), "fp16")


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_the_select_graph_chooses_what_the_host_would(flavour, tmp_path, weights):
    write_bundle(tmp_path / "b", flavour, select=True)
    bundle = Bundle.open(tmp_path / "b")
    graphs = Graphs(bundle, CPU, threads=1)
    assert graphs.chooser is None  # on the CPU numpy does it
    graphs.chooser = open_chooser(bundle, CPU)
    engine, ids = open_engine(graphs, 1, 32), [5, 9, 17]
    logits = engine.prefill([ids])
    found = []
    for _ in range(5):
        tokens, finite = logits.greedy()
        assert all(finite)
        assert tokens[0] == logits.numpy()[0].argmax()
        found.append(tokens[0])
        logits = engine.decode(tokens)
    assert found == reference_greedy(weights, ids, 5)


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_logits_that_are_not_finite_are_noticed_by_both_choosers(flavour, tmp_path):
    weights = tiny_weights()
    weights["head"][3, 7] = np.inf
    write_bundle(tmp_path / "b", flavour, weights=weights, select=True)
    bundle = Bundle.open(tmp_path / "b")
    plain, on_device = Graphs(bundle, CPU, threads=1), Graphs(bundle, CPU, threads=1)
    on_device.chooser = open_chooser(bundle, CPU)
    for graphs in (plain, on_device):
        _, finite = open_engine(graphs, 2, 8).prefill([[1, 2], [3]]).greedy()
        assert not any(finite)
