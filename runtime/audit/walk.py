"""Walks a graph in its order: every node by its contract, every value with its dtype and shape.

What thirty layers have in common is looked at once: a node's outputs follow from its operator, its attributes and what
its inputs are, so they are remembered by these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..manifest import WEIGHTS, GraphInfo
from ..wire import WireError
from .contract import (
    Call,
    Contract,
    ContractError,
    Value,
    check_attributes,
    check_inputs,
    check_outputs,
    show,
)
from .contracts import contract_of
from .dims import Dim
from .given import input_values
from .reading import Declared, Graph, Node, Tensor, read_attribute

_ATTENTION = "com.microsoft.GroupQueryAttention"
_TURNING = frozenset(
    {"Transpose", "Identity", "Cast", "MatMul"}
)  # the optimiser looks through the two in the middle
_MOST_AXES = 8  # ours have six
_Key = tuple[str, tuple[bytes, ...], tuple[int, ...], int]


class Walk:
    def __init__(self, graph: Graph, info: GraphInfo, longest: int) -> None:
        self._graph, self._info, self._longest = graph, info, longest
        self._opset = graph.opsets.get("", 0)
        self._known: dict[Value, int] = {}  # each kind of value by a number: what is compared for every node
        self._kinds: list[Value] = []
        self._places: dict[str, int] = {"": -1}  # of each name
        self._done: dict[_Key, tuple[int, ...]] = {}
        self._turned: set[str] = set()  # values that `_check_turned` looks for
        self._attributes: dict[tuple[str, tuple[bytes, ...]], tuple[Contract, dict[str, Any]]] = {}

    def check(self) -> None:
        values, symbols = input_values(self._info, self._longest)
        for name, value in values.items():
            self._define(name, value)
        for tensor in self._graph.tensors:
            self._add_constant(tensor, values)
        self._check_repeated()
        for node in self._graph.nodes:
            try:
                self._add_node(node)
            except (ContractError, WireError) as error:
                raise WireError(f"node {node.name} ({node.op}): {error}") from error
        for declared in self._graph.outputs:
            self._check_output(declared, symbols)

    def _define(self, name: str, value: Value) -> None:
        if name in self._places:
            raise WireError(f"two values are named {name!r}")
        self._places[name] = self._place(value)

    def _place(self, value: Value) -> int:
        place = self._known.get(value)
        if place is None:
            place = self._known[value] = len(self._kinds)
            self._kinds.append(value)
        return place

    def _add_constant(self, tensor: Tensor, inputs: dict[str, Value]) -> None:
        integers = tensor.integers if len(tensor.shape) <= 1 else None
        given = inputs.get(tensor.name)
        if given is None:
            self._define(tensor.name, Value(tensor.dtype, tensor.shape, integers, is_constant=True))
        elif (given.dtype, given.shape, ()) != (tensor.dtype, tensor.shape, tensor.shape):
            raise WireError(f"the default of its input {tensor.name!r} has another dtype or shape")

    def _check_repeated(self) -> None:
        """onnxruntime plans memory by what a graph says of its values: it may say it of constants, and rightly."""
        constants = {tensor.name: (tensor.dtype, tensor.shape) for tensor in self._graph.tensors}
        for name, dtype, shape in self._graph.repeated:
            if constants.get(name) != (dtype, shape):
                raise WireError(f"it says that {name!r} is {dtype} {list(shape)}, which is no constant of it")

    def _add_node(self, node: Node) -> None:
        places = self._places
        try:
            inputs = tuple([places[name] for name in node.inputs])
        except KeyError as error:
            raise ContractError(f"input {error} is not computed before it") from error
        key = (node.op, node.attributes, inputs, len(node.outputs))
        made = self._done.get(key)
        if made is None or "" in node.outputs:
            made = self._done[key] = self._outputs(node, inputs)
        for name, place in zip(node.outputs, made, strict=True):
            if name in places and name:
                raise ContractError(f"output {name!r} is a value already")
            places[name] = place if name else -1
        if node.op == _ATTENTION:
            self._check_cache(node)
        elif node.op in _TURNING:
            self._check_turned(node)

    def _outputs(self, node: Node, inputs: Sequence[int]) -> tuple[int, ...]:
        """What a node of these inputs gives, by its contract."""
        contract, attributes = self._contract(node)
        values = [None if place < 0 else self._kinds[place] for place in inputs]
        bound = check_inputs(contract, values)
        dtypes = check_outputs(contract, node.outputs, bound, attributes)
        made = contract.rule(Call(self._opset, values, attributes, len(node.outputs)))
        for result in made:
            if len(result.shape) > _MOST_AXES:
                raise ContractError(f"{len(result.shape)} dimensions, wanted at most {_MOST_AXES}")
        return tuple(
            self._place(Value(dtype, result.shape, result.elements if dtype in {"int64", "int32"} else None))
            for dtype, result in zip(dtypes, made, strict=False)
        )

    def _contract(self, node: Node) -> tuple[Contract, dict[str, Any]]:
        key = node.op, node.attributes
        if key not in self._attributes:
            contract = contract_of(node.op, self._opset)
            if contract is None:
                raise ContractError(f"no operator of ours at opset {self._opset}")
            found: dict[str, Any] = {}
            for data in node.attributes:
                name, value = read_attribute(data)
                if name in found:
                    raise ContractError(f"the attribute {name} twice")
                found[name] = value
            self._attributes[key] = contract, check_attributes(contract, found)
        return self._attributes[key]

    def _check_cache(self, node: Node) -> None:
        """Its cache is bound to the runtime's buffers; one of onnxruntime's own would have slots that nobody wrote."""
        inputs = {tensor.name for tensor in self._info.inputs}
        outputs = {tensor.name for tensor in self._info.outputs}
        if not (inputs.issuperset(node.inputs[3:5]) and outputs.issuperset(node.outputs[1:3])):
            raise ContractError("its cache is no input and output of the graph, wanted the runtime's buffers")

    def _check_turned(self, node: Node) -> None:
        """A half-precision product with a constant behind a transpose that moves the first axis further back ends onnxruntime 1.31
        while it loads the graph (of all orders of 2 to 4 axes these two: 1, ..., 0, last and 1, ..., last, 0)."""
        if node.op == "MatMul":
            values = [self._kinds[self._places[name]] for name in node.inputs]
            is_half = values[0].dtype == "float16" and any(value.is_constant for value in values)
            if is_half and not self._turned.isdisjoint(node.inputs):
                raise ContractError(
                    "a product of a constant in float16 and what Transpose moved the first axis of, wanted the product first"
                )
            return
        if node.op != "Transpose":
            turns = self._turned.issuperset(node.inputs)
        else:
            perm = tuple(self._contract(node)[1]["perm"])
            n = len(perm)
            turns = n > 2 and perm in {(*range(1, n - 1), 0, n - 1), (*range(1, n), 0)}
        if turns:
            self._turned.update(node.outputs)

    def _check_output(self, declared: Declared, symbols: dict[str, Dim]) -> None:
        place = self._places.get(declared.name, -1)
        if place < 0:
            raise WireError(f"its output {declared.name!r} is not computed")
        found = self._kinds[place]
        fits = found.dtype == declared.dtype and len(found.shape) == len(declared.shape)
        if fits:
            for dim, wanted in zip(found.shape, declared.shape, strict=True):
                # a symbol that no input has stands for what the graph makes of it
                fits &= (
                    dim == symbols[wanted] if wanted in symbols else isinstance(wanted, str) or dim == wanted
                )
        if not fits:
            raise WireError(
                f"its output {declared.name!r} is {found.dtype} {show(found.shape)}, "
                f"declared as {declared.dtype} {list(declared.shape)}"
            )


def check_places(tensors: Sequence[Tensor], weights_size: int) -> None:
    """Each lies in the file; two have the same bytes or none in common."""
    placed = sorted(
        (tensor.offset, tensor.size, tensor.name) for tensor in tensors if tensor.offset is not None
    )
    before = (0, 0, "")
    for place in placed:
        offset, size, name = place
        if offset + size > weights_size:
            raise WireError(f"tensor {name!r} lies outside {WEIGHTS} or has another size there")
        if offset < before[0] + before[1] and (offset, size) != before[:2]:
            raise WireError(f"tensors {before[2]!r} and {name!r} overlap in {WEIGHTS}")
        before = place
