"""Looks through an ONNX graph, without the onnx package, before onnxruntime sees it.

Only what the exporter writes gets past: operators by their contracts (`audit/contracts.py`), each value of a dtype and a
shape that are known before anything runs, no functions, no subgraphs, no training parts, weights only from `weights.bin`
and within its size, inputs and outputs as the manifest has them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .audit.contracts import CONTRACTS
from .audit.reading import Declared, Graph, Node, read_graph
from .audit.walk import Walk, check_places
from .manifest import BundleError, GraphInfo, TensorInfo
from .wire import WireError

# how many constant inputs, from the second on, a session may copy, pre-packed
_PACKED_OPS = {"Conv": 1, "MatMul": 1, "Gemm": 1, "com.microsoft.MatMulNBits": 1, "LSTM": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSummary:
    """What the audit counted, for `tfmx inspect`."""

    ops: dict[str, int]  # "MatMul" or "com.microsoft.QuickGelu": how often
    opsets: dict[str, int]
    initializer_bytes: int
    packable_bytes: int  # weights of matrix products: a session that pre-packs holds them once more


def audit_graph(data: bytes, info: GraphInfo, weights_size: int, longest: int) -> GraphSummary:
    """Refuse (BundleError) a graph that the exporter would not have written.

    `longest`: of the sequences that the runtime feeds it, with what is cached.
    """
    try:
        graph = read_graph(data)
        _check_names(graph)
        check_places(graph.tensors, weights_size)
        _check_values(graph.inputs, "input", info.inputs)
        _check_values(graph.outputs, "output", info.outputs)
        Walk(graph, info, longest).check()
        return _summary(graph)
    except WireError as error:
        raise BundleError(f"{info.file} is not one of our graphs: {error}") from error


def _check_names(graph: Graph) -> None:
    names = Counter(tensor.name for tensor in graph.tensors)
    for name, count in names.items():
        if count > 1:
            raise WireError(f"two initializers are named {name!r}")
    for node in graph.nodes:
        _check_operator(node, graph.opsets)


def _check_operator(node: Node, opsets: dict[str, int]) -> None:
    domain, _, _ = node.op.rpartition(".")
    if node.op not in CONTRACTS:
        raise WireError(f"it uses the operator {node.op!r}")
    if domain not in opsets:
        raise WireError(f"it uses {node.op} without importing its opset")


def _check_values(found: list[Declared], side: str, expected: tuple[TensorInfo, ...]) -> None:
    wanted = [Declared(tensor.name, tensor.dtype, tensor.shape) for tensor in expected]
    for entry in found:
        if entry not in wanted:
            raise WireError(
                f"its {side} {entry.name!r} ({entry.dtype}, {list(entry.shape)}) is not as the manifest says"
            )
    if sorted(map(str, found)) != sorted(map(str, wanted)):
        raise WireError(f"its {side}s are not those of the manifest")


def _summary(graph: Graph) -> GraphSummary:
    sizes = {tensor.name: tensor.size for tensor in graph.tensors}
    packable = {name for node in graph.nodes for name in node.inputs[1 : 1 + _PACKED_OPS.get(node.op, 0)]}
    return GraphSummary(
        ops=dict(sorted(Counter(node.op for node in graph.nodes).items())),
        opsets=graph.opsets,
        initializer_bytes=sum(sizes.values()),
        packable_bytes=sum(sizes.get(name, 0) for name in packable),
    )
