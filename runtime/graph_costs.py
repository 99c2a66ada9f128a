"""What one step of a graph reads and computes: the bytes of its weights, and the size of its matrix products.

From an audited graph's bytes, without the onnx package. A weight counts once however often it is used; a table from
which only rows are gathered (embedding, rotary positions) does not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .audit.reading import Node, read_attribute, read_graph

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


def graph_costs(data: bytes, outputs: int) -> Costs:
    """`outputs`: how many numbers the graph's main output has for a position."""
    graph = read_graph(data)
    tensors = {tensor.name: tensor for tensor in graph.tensors}
    read: set[str] = set()
    shapes = {
        name: tensor.shape for name, tensor in tensors.items()
    }  # of what is computed from weights alone
    products: list[tuple[int, ...]] = []
    for node in graph.nodes:
        op, inputs = node.op.rpartition(".")[2], node.inputs
        if op not in _GATHERING:
            read.update(inputs)
        if op == "MatMulNBits":
            products.append(_block_shape(node))
        elif op in _PRODUCTS and len(shapes.get(inputs[1], ())) == 2:
            products.append(shapes[inputs[1]])
        elif op == "LSTM":
            products += [shapes[name] for name in inputs[1:3] if name in shapes]
        elif op == "Reshape" and inputs[0] in shapes and inputs[1] in tensors:
            shapes[node.outputs[0]] = tensors[inputs[1]].integers or ()
        elif op in _UNPACKING and inputs[0] in shapes:
            shapes[node.outputs[0]] = shapes[inputs[0]]
    sizes = [2 * math.prod(shape) for shape in products]
    heads = [place for place, shape in enumerate(products) if outputs in shape]
    head = sizes.pop(heads[-1]) if heads else 0
    weight_bytes = sum(tensor.size for name, tensor in tensors.items() if name in read)
    return Costs(weight_bytes=weight_bytes, body=sum(sizes), head=head)


def _block_shape(node: Node) -> tuple[int, int]:
    """Of MatMulNBits, whose weight is packed."""
    found = dict(map(read_attribute, node.attributes))
    K, N = found["K"], found["N"]
    assert isinstance(K, int)
    assert isinstance(N, int)
    return K, N
