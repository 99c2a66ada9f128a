"""A product with a matrix before a transpose instead of behind it: what PyTorch's attention does to batch-first inputs, turned round.

Transpose (perm 1, 0, 2), then MatMul with a half-precision matrix ends onnxruntime 1.31 while it loads the graph (SIGSEGV; without
its optimiser MatmulTransposeFusion, or FuseFp16InitializerToFp32NodeTransformer, it does not). The matrix works on the last axis,
which the transpose leaves alone, so that either order gives the same numbers.
"""

from __future__ import annotations

import onnx_ir as ir

from .builder import Builder


def products_first(builder: Builder) -> None:
    turned: list[ir.Node] = []
    for node in builder.nodes:
        transpose = node.inputs[0].producer() if node.op_type == "MatMul" and node.inputs[0] else None
        if transpose is None or not _keeps_last_axis(transpose) or not _is_matrix(node.inputs[1]):
            turned.append(node)
            continue
        product = ir.node("MatMul", [transpose.inputs[0], node.inputs[1]])
        after = ir.node("Transpose", [product.outputs[0]], {"perm": _perm(transpose)})
        product.name, after.name = f"{node.name}.product", node.name
        [old], [new] = node.outputs, after.outputs
        product.outputs[0].name, new.name, new.type, new.shape = product.name, old.name, old.type, old.shape
        old.replace_all_uses_with(new)
        builder.outputs = [new if value is old else value for value in builder.outputs]
        turned += [product, after]
    builder.nodes = turned


def _keeps_last_axis(node: ir.Node) -> bool:
    perm = _perm(node)
    return bool(perm) and perm[-1] == len(perm) - 1


def _is_matrix(value: ir.Value | None) -> bool:
    """Of two axes: as it lies in the file, or computed and transposed."""
    if value is None:
        return False
    node = value.producer()
    return len(_perm(node)) == 2 if node is not None else value.shape is not None and len(value.shape) == 2


def _perm(node: ir.Node) -> list[int]:
    perm = node.attributes.get("perm") if node.op_type == "Transpose" else None
    return [] if perm is None else list(perm.as_ints())
