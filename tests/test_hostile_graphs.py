"""Graphs that would end the process inside onnxruntime, or show memory that nobody wrote, in bundles with right sums.

Each is what the exporter writes with one node more. Programs run in a process of their own: were a graph not refused,
that one would be killed, not the tests.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Done, program
from onnx import TensorProto, helper, numpy_helper
from tiny_bundle import list_files, write_bundle, write_manifest

MICROSOFT = "com.microsoft"
LEAST = np.iinfo(np.int64).min


def const(value: object, dtype: type[np.generic] = np.float32) -> np.ndarray:
    return np.asarray(value, dtype)


def node(
    op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: object
) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, "planted", domain=domain, **attributes)


class Plant:
    """A node, the constants that it reads, and what the audit is to say of it."""

    def __init__(self, planted: onnx.NodeProto, line: str, opset: int = 18, **constants: np.ndarray) -> None:
        self.node, self.line, self.opset, self.constants = planted, line, opset, constants


ROWS = np.ones((1, 4, 16), np.float32)
NOTHING = ROWS[..., :0]
CACHE = np.ones((1, 1, 8, 16), np.float32)
LENGTHS = {"s": const([3], np.int32), "t": const(4, np.int32), "pk": CACHE, "pv": CACHE}
PLANTS = {
    "GatherND counts its batch backwards": Plant(
        node("GatherND", ["x", "i"], ["y"], batch_dims=-2),
        "(GatherND): the attribute batch_dims = -2, wanted 0 to 7",
        x=ROWS,
        i=const([[[0]]], np.int64),
    ),
    "Max of nothing": Plant(
        node("Max", ["x", ""], ["y"]), "(Max): its last input has no name, wanted it left out", x=ROWS
    ),
    "LayerNormalization with a scale of another shape": Plant(
        node("LayerNormalization", ["x", "w"], ["y"], axis=-1),
        "(LayerNormalization): scale has the shape [4, 1], wanted [16]",
        x=ROWS,
        w=np.ones((4, 1), np.float32),
    ),
    "LayerNormalization with a bias that is not there": Plant(
        node("LayerNormalization", ["x", "w", ""], ["y"], axis=-1),
        "(LayerNormalization): its last input has no name, wanted it left out",
        x=ROWS,
        w=np.ones(16, np.float32),
    ),
    "Min with a gap": Plant(
        node("Min", ["x", "", "x"], ["y"]), "(Min): input x is absent, wanted a tensor", x=ROWS
    ),
    "GroupQueryAttention with 2^32 heads": Plant(
        node(
            "GroupQueryAttention", ["x", "x", "x", "pk", "pv", "s", "t"], ["y", "k", "v"], MICROSOFT,
            num_heads=2**32, kv_num_heads=1,
        ),
        "(com.microsoft.GroupQueryAttention): the attribute num_heads = 4294967296, wanted 1 to 4096",
        x=ROWS,
        **LENGTHS,
    ),
    "the smallest number divided by -1": Plant(
        node("Div", ["x", "d"], ["y"]),
        "(Div): divides whole numbers by what may be 0 or -1",
        x=const([LEAST], np.int64),
        d=const([-1], np.int64),
    ),
    "a number divided by 0": Plant(
        node("Div", ["x", "d"], ["y"]),
        "(Div): divides whole numbers by what may be 0 or -1",
        x=const([7], np.int32),
        d=const([0], np.int32),
    ),
    "what is left of the smallest number by -1": Plant(
        node("Mod", ["x", "d"], ["y"], fmod=0),
        "(Mod): divides whole numbers by what may be 0 or -1",
        x=const([LEAST], np.int64),
        d=const([-1], np.int64),
    ),
    "Attention with 0 heads": Plant(
        node("Attention", ["x", "x", "x"], ["y"], q_num_heads=0, kv_num_heads=0),
        "it uses the operator 'Attention'",
        opset=23,
        x=ROWS,
    ),
    "MultiHeadAttention with heads of 0 numbers": Plant(
        node("MultiHeadAttention", ["x", "x", "x"], ["y"], MICROSOFT, num_heads=2),
        "it uses the operator 'com.microsoft.MultiHeadAttention'",
        x=NOTHING,
    ),
    "GroupQueryAttention with 0 heads": Plant(
        node(
            "GroupQueryAttention", ["x", "x", "x", "pk", "pv", "s", "t"], ["y", "k", "v"], MICROSOFT,
            num_heads=0, kv_num_heads=1,
        ),
        "(com.microsoft.GroupQueryAttention): the attribute num_heads = 0, wanted 1 to 4096",
        x=ROWS,
        **LENGTHS,
    ),
    "GroupQueryAttention with heads of 0 numbers": Plant(
        node(
            "GroupQueryAttention", ["x", "x", "x", "pk", "pv", "s", "t"], ["y", "k", "v"], MICROSOFT,
            num_heads=1, kv_num_heads=1,
        ),
        "(com.microsoft.GroupQueryAttention): query [1, 4, 0] for 1 heads, wanted a multiple of 8 numbers in each",
        x=NOTHING,
        **LENGTHS | {"pk": CACHE[..., :0], "pv": CACHE[..., :0]},
    ),
    "Split into fewer parts than there are outputs": Plant(
        node("Split", ["x"], ["y", "z", "u", "v"], axis=-1, num_outputs=2),
        "(Split): the attribute num_outputs = 2, wanted 4 for as many outputs",
        x=ROWS,
    ),
    "Split into no parts": Plant(
        node("Split", ["x"], ["y", "z"], axis=-1, num_outputs=-1),
        "(Split): the attribute num_outputs = -1, wanted 1 to 64",
        x=ROWS,
    ),
    "LSTM of no steps": Plant(
        node("LSTM", ["x", "w", "r"], ["", "y"], hidden_size=5),
        "(LSTM): x has the shape [0, 1, 4], wanted a step and a row or more",
        x=np.ones((0, 1, 4), np.float32),
        w=np.ones((1, 20, 4), np.float32),
        r=np.ones((1, 20, 5), np.float32),
    ),
    "LSTM of no rows": Plant(
        node("LSTM", ["x", "w", "r"], ["", "y"], hidden_size=5),
        "(LSTM): x has the shape [3, 0, 4], wanted a step and a row or more",
        x=np.ones((3, 0, 4), np.float32),
        w=np.ones((1, 20, 4), np.float32),
        r=np.ones((1, 20, 5), np.float32),
    ),
    "Cast beyond 0 and 1": Plant(
        node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16, saturate=2),
        "(Cast): the attribute saturate = 2, wanted none of that name",
        opset=19,
        x=ROWS,
    ),
}  # fmt: skip


def planted(folder: Path, plant: Plant) -> Path:
    """A bundle whose prefill graph computes the node too, with right sums."""
    manifest = write_bundle(folder, "append")
    path = folder / "prefill.onnx"
    model = onnx.load(path, load_external_data=False)
    model.opset_import[0].version = plant.opset
    graph, last = model.graph, model.graph.node.pop()
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in plant.constants.items())
    graph.initializer.append(numpy_helper.from_array(const(0), "nothing"))
    graph.node.append(plant.node)
    graph.node.append(helper.make_node("Cast", ["y"], ["y32"], to=TensorProto.FLOAT))
    graph.node.append(helper.make_node("ReduceMax", ["y32"], ["most"], keepdims=0))
    graph.node.append(helper.make_node("Mul", ["most", "nothing"], ["zero"]))
    graph.node.append(helper.make_node("Add", [last.input[0], "zero"], [last.output[0]]))
    path.write_bytes(model.SerializeToString())
    write_manifest(folder, dataclasses.replace(manifest, files=list_files(folder)))
    return folder


def run(folder: Path, **options: object) -> Done:
    return program("run", folder, "--ids", "1,2,3", "--max-tokens", "3", **options)


@pytest.mark.parametrize("name", PLANTS)
def test_a_node_that_would_kill_or_leak_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    plant = PLANTS[name]
    done = run(planted(tmp_path / "b", plant))
    where = "" if plant.line.startswith("it uses") else "node planted "
    done.fails(1, f"prefill.onnx is not one of our graphs: {where}{plant.line}")


SHOW = "import sys, tfmx; print(tfmx.load(sys.argv[1], threads=1).apply([1, 2, 3])['logits'].tobytes().hex())"


def test_slots_of_the_cache_that_no_token_was_written_to_hold_nothing(tmp_path: Path) -> None:
    """A graph may read all of its past: what lay in that memory before must not come out of it."""
    folder = tmp_path / "b"
    manifest = write_bundle(folder, "capacity")
    path = folder / "prefill.onnx"
    model = onnx.load(path, load_external_data=False)
    graph, last = model.graph, model.graph.node.pop()
    graph.node.append(
        helper.make_node("ReduceMax", ["past_key_values.0.key"], ["most"], "reads it all", keepdims=0)
    )
    graph.node.append(helper.make_node("Add", [last.input[0], "most"], [last.output[0]], "shows it"))
    path.write_bytes(model.SerializeToString())
    write_manifest(folder, dataclasses.replace(manifest, files=list_files(folder)))
    shown = set()
    for fill in ("85", "170"):  # what malloc writes into memory that it gives
        environment = os.environ | {"MALLOC_PERTURB_": fill}
        done = subprocess.run(
            [sys.executable, "-c", SHOW, str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        shown.add(done.stdout)
    assert len(shown) == 1
