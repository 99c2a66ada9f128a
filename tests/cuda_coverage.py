"""Says, without a GPU, which nodes of a graph onnxruntime's CUDA provider could not run.

The facts are onnxruntime's own table of kernels (data/cuda_kernels.json, made by make_cuda_kernels.py); the
rules are those of its source at the same commit, each named below. What the table cannot tell: for a row with
several type variables, whether every combination of their types exists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto

FACTS = json.loads((Path(__file__).parent / "data" / "cuda_kernels.json").read_text(encoding="utf-8"))

# Operators without a CUDA kernel that still cost nothing there: Constant nodes become initializers while the
# graph is loaded (core/graph/graph.cc).
FOLDED_AT_LOAD = frozenset({"ai.onnx::Constant"})

# InputMemoryType(OrtMemTypeCPUInput, i) and OutputMemoryType(OrtMemTypeCPUInput, 0) of the kernels in
# core/providers/cuda and contrib_ops/cuda: what a CUDA kernel reads from, or leaves in, the host's memory.
HOST_OUTPUTS = frozenset({"ai.onnx::Shape", "ai.onnx::Size"})
_SECOND = (
    "CumSum", "Expand", "Reshape", "Split", "Squeeze", "Tile", "TopK", "Trilu", "Unsqueeze",
    "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
)  # fmt: skip
HOST_INPUTS: dict[str, frozenset[int]] = {
    **{f"ai.onnx::{op}": frozenset({1}) for op in _SECOND},
    "ai.onnx::ConstantOfShape": frozenset({0}),
    "ai.onnx::Range": frozenset({0, 1, 2}),
    "ai.onnx::OneHot": frozenset({1, 2}),
    "ai.onnx::MatMulInteger": frozenset({2, 3}),
    "ai.onnx::Pad": frozenset({1, 2, 3}),
    "ai.onnx::Slice": frozenset({1, 2, 3, 4}),
    "com.microsoft::GroupQueryAttention": frozenset({6}),
    "com.microsoft::MultiHeadAttention": frozenset({8}),
}
SMALL_INITIALIZER = 100  # elements: kSmallInitializerThreshold in core/framework/fallback_cpu_capability.cc


@dataclass(frozen=True, slots=True)
class Operator:
    """A node's operator as its opset defines it: type variables ("T") or fixed types ("tensor(int64)")."""

    name: str  # "ai.onnx::Add"
    since: int
    inputs: tuple[str, ...]  # one for each input of the node
    outputs: tuple[str, ...]
    parameters: dict[str, str]  # name → type variable; kernels may constrain either
    allowed: dict[str, list[str]]  # type variable → types, where onnx defines the operator


@dataclass(frozen=True, slots=True)
class TypedNode:
    node: NodeProto
    operator: Operator
    types: dict[str, str]  # type variable → "float16"

    def __str__(self) -> str:
        types = ", ".join(f"{variable}={dtype}" for variable, dtype in sorted(self.types.items()))
        return f"{self.operator.name} (since {self.operator.since}) with {types}"


def missing_cuda_kernels(model: onnx.ModelProto) -> list[str]:
    """The distinct operators, with version and types, that CUDA has no kernel for; empty when it can run all."""
    return sorted({str(typed) for typed in typed_nodes(model) if not has_cuda_kernel(typed)})


def has_cuda_kernel(typed: TypedNode) -> bool:
    name = typed.operator.name
    if name in FOLDED_AT_LOAD:
        return True
    if name in {"ai.onnx::ArgMax", "ai.onnx::ArgMin"} and attribute(typed.node, "select_last_index"):
        return False  # ArgMaxOrArgMinNeedFallbackToCPU in core/providers/cuda/cuda_execution_provider.cc
    return any(_fits(typed, kernel) for kernel in FACTS["kernels"].get(name, ()))


def _fits(typed: TypedNode, kernel: dict) -> bool:
    """VerifyVersion in core/framework/kernel_registry.cc: an open end serves just the version it starts with."""
    first, last = kernel["since"]
    since = typed.operator.since
    if since != first and (last is None or not first <= since <= last):
        return False
    parameters = typed.operator.parameters
    for constraint, types in kernel["types"].items():
        used = typed.types.get(parameters.get(constraint, constraint))
        if used is not None and used not in types:
            return False
    return True


# --- types -----------------------------------------------------------------------------------------------


def typed_nodes(model: onnx.ModelProto) -> Iterator[TypedNode]:
    """The nodes in order, their types carried forward from the graph's inputs and weights."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    graph = model.graph
    dtypes = {value.name: _dtype_name(value.type.tensor_type.elem_type) for value in graph.input}
    dtypes |= {tensor.name: _dtype_name(tensor.data_type) for tensor in graph.initializer}
    for node in graph.node:
        operator = find_operator(node, opsets)
        types: dict[str, str] = {}
        for name, variable in zip(node.input, operator.inputs, strict=True):
            if name:
                types.setdefault(variable, dtypes[name])
        for name, variable in zip(node.output, operator.outputs, strict=True):
            if name:
                if variable not in types:
                    types[variable] = _output_type(node, operator, variable)
                dtypes[name] = types[variable]
        yield TypedNode(node, operator, {v: t for v, t in types.items() if not v.startswith("tensor(")})


def find_operator(node: NodeProto, opsets: dict[str, int]) -> Operator:
    name = f"{node.domain or 'ai.onnx'}::{node.op_type}"
    if node.domain in {"", "ai.onnx"} and onnx.defs.has(node.op_type, opsets[""]):
        schema = onnx.defs.get_schema(node.op_type, opsets[""])
        return Operator(
            name,
            schema.since_version,
            _repeat_last([parameter.type_str for parameter in schema.inputs], len(node.input)),
            _repeat_last([parameter.type_str for parameter in schema.outputs], len(node.output)),
            {parameter.name: parameter.type_str for parameter in (*schema.inputs, *schema.outputs)},
            {entry.type_param_str: list(entry.allowed_type_strs) for entry in schema.type_constraints},
        )
    # Operators that only onnxruntime knows have one version; the facts hold their parameters.
    # One that is not even there has no CUDA kernel: its types are left open.
    parameters = FACTS["signatures"].get(name, {"inputs": ["?"], "outputs": ["?"]})
    inputs = _repeat_last(parameters["inputs"], len(node.input))
    return Operator(name, 1, inputs, _repeat_last(parameters["outputs"], len(node.output)), {}, {})


def _repeat_last(kinds: Sequence[str], count: int) -> tuple[str, ...]:
    """A variadic operator's last parameter stands for all that follow."""
    return tuple(kinds[min(i, len(kinds) - 1)] for i in range(count))


def _output_type(node: NodeProto, operator: Operator, variable: str) -> str:
    """The type of an output that no input decides."""
    if variable.startswith("tensor("):
        return variable[len("tensor(") : -1]
    for name in ("to", "dtype", "output_dtype"):
        if attribute(node, name):
            return _dtype_name(attribute(node, name))
    if node.op_type in {"Constant", "ConstantOfShape"}:
        value = attribute(node, "value")
        return _dtype_name(value.data_type) if value is not None else "float"
    if len(operator.allowed.get(variable, ())) == 1:  # a comparison's bool
        return operator.allowed[variable][0][len("tensor(") : -1]
    raise ValueError(f"cannot tell the type {variable} of {operator.name} ({node.name}); teach _output_type")


def attribute(node: NodeProto, name: str) -> object:
    return next(
        (onnx.helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), None
    )


def _dtype_name(code: int) -> str:
    return TensorProto.DataType.Name(code).lower()


# --- where nodes run -------------------------------------------------------------------------------------


def cpu_by_design(model: onnx.ModelProto) -> list[TypedNode]:
    """Nodes that have a CUDA kernel and that onnxruntime still leaves to the CPU: arithmetic on shapes.

    GetCpuPreferredNodes in core/framework/fallback_cpu_capability.cc: starting from what CUDA kernels leave in
    the host's memory, a node whose every input is there (or is a small initializer, or a graph input) and is
    not read there by its CUDA kernel anyway.
    """
    graph = model.graph
    free = {tensor.name for tensor in graph.initializer if prod(tensor.dims) <= SMALL_INITIALIZER}
    free |= {value.name for value in graph.input}
    on_host: set[str] = set()
    found = []
    for typed in typed_nodes(model):
        inputs = [name for name in typed.node.input if name]
        if typed.operator.name in HOST_OUTPUTS:
            on_host.update(typed.node.output)
        elif any(name in on_host for name in inputs):
            if not has_cuda_kernel(typed):  # missing: the CPU takes it, and what follows may follow there
                on_host.update(typed.node.output)
            elif all(name in on_host or name in free for name in inputs) and not _stays(typed, on_host):
                on_host.update(typed.node.output)
                found.append(typed)
    return found


def _stays(typed: TypedNode, on_host: set[str]) -> bool:
    reads = HOST_INPUTS.get(typed.operator.name, frozenset())
    is_read_there = any(name in on_host and i in reads for i, name in enumerate(typed.node.input))
    return is_read_there or "float16" in typed.types.values()


def device_reads(model: onnx.ModelProto) -> list[str]:
    """Inputs that a CUDA kernel wants in the host's memory but that the GPU computes: each one stalls it."""
    graph = model.graph
    on_host = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    for typed in cpu_by_design(model):
        on_host.update(typed.node.output)
    found = []
    for typed in typed_nodes(model):
        if typed.operator.name in HOST_OUTPUTS:
            on_host.update(typed.node.output)
        inputs = dict(enumerate(typed.node.input))
        read = [inputs.get(i, "") for i in sorted(HOST_INPUTS.get(typed.operator.name, ()))]
        found += [f"{typed.node.name} reads {name}" for name in read if name and name not in on_host]
    return found
