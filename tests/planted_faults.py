"""Faults that exporters have shipped, planted into a finished export one at a time.

A fault edits the protobufs of one or both graphs, or the weights file. `targets` says where it can be planted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

BOTH = ("ort", "portable")


@dataclass(frozen=True)
class Fault:
    name: str
    targets: tuple[str, ...]
    plant: Callable[[Folder], None]


class Folder:
    """An export that can be edited."""

    def __init__(self, path: Path, target: str) -> None:
        self.path, self.target = path, target

    def edit(
        self, change: Callable[[onnx.ModelProto], None], graphs: tuple[str, ...] = ("prefill", "decode")
    ) -> None:
        before = [(self.path / f"{kind}.onnx").read_bytes() for kind in graphs]
        for kind, content in zip(graphs, before, strict=True):
            model = onnx.ModelProto.FromString(content)
            change(model)
            after = model.SerializeToString()
            assert after != content, "the fault changed nothing"
            (self.path / f"{kind}.onnx").write_bytes(after)

    def weight(self, name: str, change: Callable[[np.ndarray], None]) -> None:
        model = onnx.load(self.path / "prefill.onnx", load_external_data=False)
        place = {i.name: {e.key: e.value for e in i.external_data} for i in model.graph.initializer}[name]
        shape = next(i.dims for i in model.graph.initializer if i.name == name)
        array = np.memmap(
            self.path / "weights.bin", np.float32, "r+", offset=int(place["offset"]), shape=tuple(shape)
        )
        before = array.copy()
        change(array)
        array.flush()
        assert not np.array_equal(before, array), "the fault changed nothing"


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.name == name)


def nodes(model: onnx.ModelProto, op_type: str, scope: str = "") -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type == op_type and n.name.startswith(scope)]


def set_attribute(node: onnx.NodeProto, name: str, change: Callable[[float], float]) -> None:
    for attribute in node.attribute:
        if attribute.name == name:
            value = change(helper.get_attribute_value(attribute))
            attribute.CopyFrom(helper.make_attribute(name, value))
            return
    raise AssertionError(f"{node.name} has no attribute {name}")


def constant(model: onnx.ModelProto, value: object, dtype: type = np.int64) -> str:
    """A new initializer."""
    name = f"fault.{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
    return name


def value_of(model: onnx.ModelProto, name: str) -> np.ndarray | None:
    for initializer in model.graph.initializer:
        if initializer.name == name and not initializer.external_data:
            return numpy_helper.to_array(initializer)
    return None


def insert_before(model: onnx.ModelProto, position: onnx.NodeProto, new: onnx.NodeProto) -> None:
    index = next(i for i, n in enumerate(model.graph.node) if n.name == position.name)
    model.graph.node.insert(index, new)


def scale_eps(factor: float) -> Callable[[Folder], None]:
    def plant(folder: Folder) -> None:
        def change(model: onnx.ModelProto) -> None:
            if folder.target == "ort":
                set_attribute(
                    nodes(model, "SkipSimplifiedLayerNormalization", "blocks.1")[0],
                    "epsilon",
                    lambda e: e * factor,
                )
                return
            add = next(
                n
                for n in nodes(model, "Add", "blocks.1")
                if np.ndim(v := value_of(model, n.input[1])) == 0 and v is not None
            )
            add.input[1] = constant(model, value_of(model, add.input[1]) * factor, np.float32)

        folder.edit(change)

    return plant


def scale_scores(folder: Folder) -> None:
    def change(model: onnx.ModelProto) -> None:
        if folder.target == "ort":
            set_attribute(node(model, "blocks.1.GroupQueryAttention_0"), "scale", lambda s: s * 1.01)
            return
        scaled = next(n for n in nodes(model, "Mul", "blocks.1") if value_of(model, n.input[1]) is not None)
        scaled.input[1] = constant(model, value_of(model, scaled.input[1]) * 1.01, np.float32)

    folder.edit(change)


def rotary_theta(folder: Folder) -> None:
    def table(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], None]:
        def change(array: np.ndarray) -> None:
            context, half = array.shape
            angles = np.outer(np.arange(context), 10100.0 ** -(np.arange(half) / half))
            array[:] = function(angles)

        return change

    folder.weight("rotary.cos", table(np.cos))
    folder.weight("rotary.sin", table(np.sin))


def shift_rotary(folder: Folder) -> None:
    """Every position off by one, for new tokens only: what a wrong position_ids does."""
    for name in ("rotary.cos", "rotary.sin"):
        folder.weight(name, lambda array: array.__setitem__(slice(None, -1), array[1:].copy()))


def rotate_backwards(folder: Folder) -> None:
    folder.weight("rotary.sin", lambda array: np.negative(array, out=array))


def swap_columns(name: str, first: slice, second: slice) -> Callable[[Folder], None]:
    def plant(folder: Folder) -> None:
        def change(array: np.ndarray) -> None:
            array[:, first], array[:, second] = array[:, second].copy(), array[:, first].copy()

        folder.weight(name, change)

    return plant


def swap_head_rows(folder: Folder) -> None:
    def change(array: np.ndarray) -> None:
        array[0:16], array[16:32] = array[16:32].copy(), array[0:16].copy()

    folder.weight("blocks.1.attention.out.weight", change)


def nudge(name: str, index: tuple[int, ...], by: float) -> Callable[[Folder], None]:
    def plant(folder: Folder) -> None:
        folder.weight(name, lambda array: array.__setitem__(index, array[index] + by))

    return plant


def round_to_half(folder: Folder) -> None:
    folder.weight(
        "blocks.2.mlp.up.weight", lambda array: array.__setitem__(slice(None), array.astype(np.float16))
    )


def swap_layers(folder: Folder) -> None:
    other: list[np.ndarray] = []
    folder.weight("blocks.0.mlp.down.weight", lambda array: (other.append(array.copy()), array.__imul__(0)))
    held: list[np.ndarray] = []

    def take(array: np.ndarray) -> None:
        held.append(array.copy())
        array[:] = other[0]

    folder.weight("blocks.1.mlp.down.weight", take)
    folder.weight("blocks.0.mlp.down.weight", lambda array: array.__setitem__(slice(None), held[0]))


def bake_length(folder: Folder) -> None:
    """The length of the example that was traced instead of the input's own."""

    def change(model: onnx.ModelProto) -> None:
        shape = next(n for n in nodes(model, "Shape") if n.input[0] != "attention_mask")
        length = next(n for n in nodes(model, "Gather") if n.input[0] == shape.output[0])
        five = constant(model, [5])
        for other in model.graph.node:
            for i, name in enumerate(other.input):
                if name == length.output[0]:
                    other.input[i] = five

    folder.edit(change, ("prefill",))


def drop_mask(folder: Folder) -> None:
    """Pads count as real."""

    def change(model: onnx.ModelProto) -> None:
        first = next(n for n in model.graph.node if "attention_mask" in n.input and n.op_type != "Shape")
        shape = helper.make_node("Shape", ["attention_mask"], ["fault.shape"], name="fault.shape")
        one = helper.make_tensor("v", onnx.TensorProto.INT64, [1], [1])
        ones = helper.make_node(
            "ConstantOfShape", ["fault.shape"], ["fault.ones"], name="fault.ones", value=one
        )
        insert_before(model, first, shape)
        insert_before(model, first, ones)
        for other in model.graph.node:
            for i, name in enumerate(other.input):
                if name == "attention_mask" and other.op_type != "Shape":
                    other.input[i] = "fault.ones"

    folder.edit(change)


def move_window(by: int) -> Callable[[Folder], None]:
    def plant(folder: Folder) -> None:
        def change(model: onnx.ModelProto) -> None:
            if folder.target == "ort":
                set_attribute(
                    node(model, "blocks.1.GroupQueryAttention_0"), "local_window_size", lambda w: w + by
                )
                return
            [greater] = nodes(model, "Greater")  # the key's position less the query's, above -window
            greater.input[1] = constant(model, value_of(model, greater.input[1]) - by)

        folder.edit(change)

    return plant


def drop_window(folder: Folder) -> None:
    move_window(1000)(folder)


def stale_row(folder: Folder) -> None:
    """Decode writes over the newest row of the cache instead of behind it."""

    def change(model: onnx.ModelProto) -> None:
        attention = node(model, "blocks.1.GroupQueryAttention_0")
        one = constant(model, [1], np.int32)
        less = helper.make_node("Sub", [attention.input[5], one], ["fault.lengths"], name="fault.lengths")
        relu = helper.make_node(
            "Max", ["fault.lengths", constant(model, [0], np.int32)], ["fault.kept"], name="fault.kept"
        )
        insert_before(model, attention, less)
        insert_before(model, attention, relu)
        attention.input[5] = "fault.kept"

    folder.edit(change, ("decode",))


def forget_oldest(folder: Folder) -> None:
    """The cache loses a row when a step is added to it."""

    def change(model: onnx.ModelProto) -> None:
        concat = next(n for n in nodes(model, "Concat", "blocks.1") if n.input[0] == "past_key_values.1.key")
        doubled = helper.make_node(
            "Mul", [concat.input[0], constant(model, 0.999, np.float32)], ["fault.past"], name="fault.past"
        )
        insert_before(model, concat, doubled)
        concat.input[0] = "fault.past"

    folder.edit(change, ("decode",))


def swap_cos_and_sin(folder: Folder) -> None:
    def change(model: onnx.ModelProto) -> None:
        if folder.target == "ort":
            attention = node(model, "blocks.1.GroupQueryAttention_0")
            attention.input[7], attention.input[8] = attention.input[8], attention.input[7]
            return
        for gather in nodes(model, "Gather"):
            if gather.input[0].startswith("rotary."):
                gather.input[0] = {"rotary.cos": "rotary.sin", "rotary.sin": "rotary.cos"}[gather.input[0]]

    folder.edit(change)


def drop_residual(folder: Folder) -> None:
    def change(model: onnx.ModelProto) -> None:
        if folder.target == "ort":
            skip = nodes(model, "SkipSimplifiedLayerNormalization", "blocks.1")[0]
            zero = helper.make_node("Sub", [skip.input[0], skip.input[0]], ["fault.zero"], name="fault.zero")
            insert_before(model, skip, zero)
            skip.input[0] = "fault.zero"
            return
        add = nodes(model, "Add", "blocks.1")[-1]
        add.input[0] = add.input[1]

    folder.edit(change)


def other_activation(folder: Folder) -> None:
    def change(model: onnx.ModelProto) -> None:
        if folder.target == "ort":
            set_attribute(nodes(model, "QuickGelu", "blocks.0")[0], "alpha", lambda _: 1.702)
            return
        nodes(model, "Sigmoid", "blocks.0")[0].op_type = "Tanh"

    folder.edit(change)


def swap_states(folder: Folder) -> None:
    """Layer 0's keys come back as layer 2's."""

    def change(model: onnx.ModelProto) -> None:
        names = {"present.0.key": "present.2.key", "present.2.key": "present.0.key"}
        for other in model.graph.node:
            for values in (other.input, other.output):
                for i, name in enumerate(values):
                    values[i] = names.get(name, name)

    folder.edit(change)


def causal_off_by_one(folder: Folder) -> None:
    folder.edit(lambda model: setattr(nodes(model, "LessOrEqual")[0], "op_type", "Less"), ("prefill",))


def wrong_last_logits(folder: Folder) -> None:
    """num_logits_to_keep counts one too few columns from the end, and wraps."""

    def change(model: onnx.ModelProto) -> None:
        cut = next(n for n in nodes(model, "Slice", "head"))
        cut.input[2] = constant(model, [-1])

    folder.edit(change, ("prefill",))


def drop_bias(folder: Folder) -> None:
    folder.weight("blocks.2.attention.qkv.bias", lambda array: array.fill(0))


def skip_last_norm(folder: Folder) -> None:
    folder.weight("norm.weight", lambda array: array.fill(1))


def wrong_softmax_axis(folder: Folder) -> None:
    folder.edit(lambda model: set_attribute(nodes(model, "Softmax", "blocks.2")[0], "axis", lambda _: 1))


FAULTS = [
    Fault("epsilon ten times too large", BOTH, scale_eps(10)),
    Fault("epsilon ten times too small", BOTH, scale_eps(0.1)),
    Fault("rotary theta 1 % off", BOTH, rotary_theta),
    Fault("attention scale 1 % off", BOTH, scale_scores),
    Fault(
        "key heads swapped", BOTH, swap_columns("blocks.1.attention.qkv.weight", slice(64, 80), slice(80, 96))
    ),
    Fault("heads swapped before the output projection", BOTH, swap_head_rows),
    Fault("gate and up swapped", BOTH, swap_columns("blocks.1.mlp.up.weight", slice(0, 96), slice(96, 192))),
    Fault("two tokens' vectors swapped", BOTH, swap_columns("embed.weight", slice(7, 8), slice(9, 10))),
    Fault("one weight changed by 0.01", BOTH, nudge("blocks.0.mlp.down.weight", (3, 5), 0.01)),
    Fault("one norm weight changed by 0.001", BOTH, nudge("blocks.2.mlp_norm.weight", (11,), 0.001)),
    Fault("one matrix rounded to half precision", BOTH, round_to_half),
    Fault("two layers' matrices swapped", BOTH, swap_layers),
    Fault("a bias dropped", BOTH, drop_bias),
    Fault("the last norm's weight dropped", BOTH, skip_last_norm),
    Fault("the traced length baked in", BOTH, bake_length),
    Fault("the padding mask dropped", BOTH, drop_mask),
    Fault("window one too wide", BOTH, move_window(1)),
    Fault("window one too narrow", BOTH, move_window(-1)),
    Fault("window dropped", BOTH, drop_window),
    Fault("positions off by one", BOTH, shift_rotary),
    Fault("rotation backwards", BOTH, rotate_backwards),
    Fault("cos and sin swapped", BOTH, swap_cos_and_sin),
    Fault("residual dropped", BOTH, drop_residual),
    Fault("another activation", BOTH, other_activation),
    Fault("two layers' caches swapped", BOTH, swap_states),
    Fault("only the last logits are wrong", BOTH, wrong_last_logits),
    Fault("decode overwrites the newest cache row", ("ort",), stale_row),
    Fault("decode reads a past that is 0.1 % off", ("portable",), forget_oldest),
    Fault("a token does not see itself", ("portable",), causal_off_by_one),
    Fault("softmax over another axis", ("portable",), wrong_softmax_axis),
]
