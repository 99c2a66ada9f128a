"""What one step of a graph reads and computes: the bytes of its weights, and the size of its matrix products.

From an audited graph's bytes, without the onnx package. A weight counts once however often it is used; a table from
which only rows are gathered (embedding, rotary positions) does not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .graph_audit import _ATTRIBUTE, _GRAPH, _ITEM_SIZES, _MODEL, _NODE, _TENSOR
from .wire import Message, read_message

_GATHERING = {"Gather", "GatherBlockQuantized", "GroupQueryAttention", "RotaryEmbedding", "Shape"}
_PRODUCTS = {"MatMul", "Gemm", "MatMulInteger"}
# what makes a matrix of codes into numbers: it stays something of the weights, until a Reshape says its shape
_UNPACKING = {
    "Add",
    "Cast",
    "Concat",
    "DequantizeLinear",
    "Floor",
    "Identity",
    "Mul",
    "Sub",
    "Transpose",
    "Unsqueeze",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    weight_bytes: int  # read in one step
    body: int  # multiplications and additions with weights for one position, but for the head's
    head: int  # the same of the last product, the one that gives the vocabulary


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    size: int  # bytes
    values: tuple[int, ...]  # of a short list of int64: a shape


def graph_costs(data: bytes, outputs: int) -> Costs:
    """`outputs`: how many numbers the graph's main output has for a position."""
    model = read_message(memoryview(data), _MODEL, "the model")
    graph = read_message(model.views("graph")[0], _GRAPH, "the graph")
    tensors = dict(_read_tensor(view) for view in graph.views("initializer"))
    nodes = [read_message(view, _NODE, "a node") for view in graph.views("node")]
    read: set[str] = set()
    shapes = {
        name: tensor.shape for name, tensor in tensors.items()
    }  # of what is computed from weights alone
    products: list[tuple[int, ...]] = []
    for node in nodes:
        op, inputs = node.text("op_type"), node.texts("input")
        if op not in _GATHERING:
            read.update(inputs)
        if op == "MatMulNBits":
            products.append(_block_shape(node))
        elif op in _PRODUCTS and len(shapes.get(inputs[1], ())) == 2:
            products.append(shapes[inputs[1]])
        elif op == "LSTM":
            products += [shapes[name] for name in inputs[1:3] if name in shapes]
        elif op == "Reshape" and inputs[0] in shapes and inputs[1] in tensors:
            shapes[node.texts("output")[0]] = tensors[inputs[1]].values
        elif op in _UNPACKING and inputs[0] in shapes:
            shapes[node.texts("output")[0]] = shapes[inputs[0]]
    sizes = [2 * math.prod(shape) for shape in products]
    heads = [place for place, shape in enumerate(products) if outputs in shape]
    head = sizes.pop(heads[-1]) if heads else 0
    weight_bytes = sum(tensor.size for name, tensor in tensors.items() if name in read)
    return Costs(weight_bytes=weight_bytes, body=sum(sizes), head=head)


def _read_tensor(view: memoryview) -> tuple[str, _Tensor]:
    tensor = read_message(view, _TENSOR, "a tensor")
    shape = tuple(tensor.numbers("dims"))
    values = tuple(tensor.numbers("int64_data"))
    if tensor.number("data_type") == 7 and tensor.has("raw_data"):
        values = tuple(tensor.views("raw_data")[0].cast("q"))
    size = math.prod(shape) * _ITEM_SIZES[tensor.number("data_type")]
    return tensor.text("name"), _Tensor(shape, size, values)


def _block_shape(node: Message) -> tuple[int, int]:
    """Of MatMulNBits, whose weight is packed."""
    attributes = [read_message(view, _ATTRIBUTE, "an attribute") for view in node.views("attribute")]
    found = {attribute.text("name"): attribute.number("i") for attribute in attributes}
    return found["K"], found["N"]
