"""An ONNX graph under construction: nodes in order, small constants once each, weights by name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

Attribute = int | float | str | Sequence[int] | Sequence[str]
_REDUCTIONS = frozenset(
    {"ReduceMax", "ReduceMean", "ReduceMin"}
)  # ReduceSum took its axes as an input earlier


class Builder:
    def __init__(self, name: str, opset: int) -> None:
        self.name, self.opset = name, opset
        self.scope = ""  # stands before the names of new nodes, so that a profile tells the layer
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.weights: dict[str, ir.Value] = {}
        self.constants: dict[str, ir.Value] = {}
        self._counts: dict[str, int] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> None:
        if (
            value in self.outputs or value.producer() is None
        ):  # one value cannot be two outputs, nor an input one
            value = self.op("Identity", value)
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self.outputs.append(value)

    def weight(self, name: str, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
        """A tensor that will lie in the weights file; asked for again, the same value."""
        if name not in self.weights:
            self.weights[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        return self.weights[name]

    def const(self, value: object, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        return self.const_tensor(np.asarray(value, dtype=dtype.numpy()))

    def const_tensor(self, array: np.ndarray) -> ir.Value:
        key = f"{array.dtype}.{array.shape}.{hashlib.sha256(array.tobytes()).hexdigest()}"
        if key not in self.constants:
            name = f"const.{len(self.constants)}"
            tensor = ir.Tensor(array, name=name)
            self.constants[key] = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
            )
        return self.constants[key]

    def op(
        self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Attribute
    ) -> ir.Value:
        return self.ops(op_type, *inputs, n_outputs=1, domain=domain, **attributes)[0]

    def ops(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        n_outputs: int,
        domain: str = "",
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        trimmed = list(inputs)
        while trimmed and trimmed[-1] is None:
            trimmed.pop()
        if (
            self.opset < 18 and op_type in _REDUCTIONS and len(trimmed) == 2
        ):  # the axes were an attribute then
            axes = trimmed.pop()
            assert axes is not None
            assert axes.const_value is not None
            attributes["axes"] = axes.const_value.numpy().tolist()
            attributes.pop("noop_with_empty_axes", None)  # came with the input
        node = ir.node(op_type, trimmed, attributes, domain=domain, num_outputs=n_outputs)
        return self.add(node)

    def add(self, node: ir.Node) -> Sequence[ir.Value]:
        name = f"{self.scope}.{node.op_type}" if self.scope else node.op_type
        self._counts[name] = count = self._counts.get(name, -1) + 1
        node.name = f"{name}_{count}"
        for index, output in enumerate(node.outputs):
            output.name = node.name if len(node.outputs) == 1 else f"{node.name}.{index}"
        self.nodes.append(node)
        return node.outputs

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """The length of an axis as int64 (1,)."""
        return self.op("Gather", self.op("Shape", value), self.const([axis]))

    def slice(self, value: ir.Value, start: ir.Value, end: ir.Value, axis: int) -> ir.Value:
        return self.op("Slice", value, start, end, self.const([axis]))

    def _used(self) -> tuple[list[ir.Node], set[ir.Value]]:
        used, alive = set(self.outputs), []
        for node in reversed(self.nodes):
            if any(output in used for output in node.outputs):
                alive.append(node)
                used.update(value for value in node.inputs if value is not None)
        return alive[::-1], used

    def drop_unused(self, names: Sequence[str]) -> None:
        """Inputs of these names that nothing reads."""
        _, used = self._used()
        self.inputs = [value for value in self.inputs if value in used or value.name not in names]

    def model(self) -> ir.Model:
        """What the outputs need of it."""
        nodes, used = self._used()
        known = [*self.constants.values(), *self.weights.values()]
        defaults = [value for value in self.inputs if value.const_value is not None]
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=nodes,
            initializers=[*defaults, *(value for value in known if value in used)],
            opset_imports={"": self.opset, **{node.domain: 1 for node in nodes if node.domain}},
            name=self.name,
        )
        return ir.Model(graph, ir_version=_ir_version(self.opset), producer_name="tfmx")


def serialised(model: ir.Model) -> bytes:
    """The file; the same bytes for the same graph."""
    content: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return content


def _ir_version(opset: int) -> int:
    """The oldest file version that may hold the opset, for the sake of old readers."""
    if opset <= 18:
        return 8
    return {19: 9, 20: 9, 21: 10, 22: 10, 23: 11}.get(opset, 12)
