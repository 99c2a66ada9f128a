"""Looks through an ONNX graph, without the onnx package, before onnxruntime sees it.

Only what the exporter writes gets past: known operators and opsets, no functions, no subgraphs, no training
parts, weights only from `weights.bin` and within its size, inputs and outputs as the manifest has them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from .manifest import WEIGHTS, BundleError, GraphInfo, TensorInfo
from .ops import OPS, OPSETS
from .wire import Message, Schema, WireError, read_message

# field number: (name, kind); onnx.proto's fields that are absent here are refused
_ENTRY: Schema = {1: ("key", "text"), 2: ("value", "text")}
_MODEL: Schema = {
    1: ("ir_version", "int"), 2: ("producer_name", "text"), 3: ("producer_version", "text"), 4: ("domain", "text"),
    5: ("model_version", "int"), 6: ("doc_string", "text"), 7: ("graph", "message"),
    8: ("opset_import", "messages"), 14: ("metadata_props", "messages"),
}  # fmt: skip
_OPSET: Schema = {1: ("domain", "text"), 2: ("version", "int")}
_GRAPH: Schema = {
    1: ("node", "messages"), 2: ("name", "text"), 5: ("initializer", "messages"), 10: ("doc_string", "text"),
    11: ("input", "messages"), 12: ("output", "messages"), 13: ("value_info", "messages"),
    16: ("metadata_props", "messages"),
}  # fmt: skip
_NODE: Schema = {
    1: ("input", "texts"), 2: ("output", "texts"), 3: ("name", "text"), 4: ("op_type", "text"),
    5: ("attribute", "messages"), 6: ("doc_string", "text"), 7: ("domain", "text"),
    9: ("metadata_props", "messages"),
}  # fmt: skip
_ATTRIBUTE: Schema = {
    1: ("name", "text"), 2: ("f", "float"), 3: ("i", "int"), 4: ("s", "bytes"), 5: ("t", "message"),
    7: ("floats", "floats"), 8: ("ints", "ints"), 13: ("doc_string", "text"), 20: ("type", "int"),
}  # fmt: skip
_LSTM_ATTRIBUTE: Schema = {**_ATTRIBUTE, 9: ("strings", "texts")}  # the one operator that has names in a list
_LSTM_ACTIVATIONS = {"Sigmoid", "Tanh"}
_TENSOR: Schema = {
    1: ("dims", "ints"), 2: ("data_type", "int"), 4: ("float_data", "floats"), 5: ("int32_data", "ints"),
    7: ("int64_data", "ints"), 8: ("name", "text"), 9: ("raw_data", "bytes"), 12: ("doc_string", "text"),
    13: ("external_data", "messages"), 14: ("data_location", "int"),
}  # fmt: skip
_VALUE: Schema = {
    1: ("name", "text"),
    2: ("type", "message"),
    3: ("doc_string", "text"),
    4: ("metadata_props", "messages"),
}
_TYPE: Schema = {1: ("tensor_type", "message"), 6: ("denotation", "text")}
_TENSOR_TYPE: Schema = {1: ("elem_type", "int"), 2: ("shape", "message")}
_SHAPE: Schema = {1: ("dim", "messages")}
_DIM: Schema = {1: ("value", "int"), 2: ("param", "text"), 3: ("denotation", "text")}

_ITEM_SIZES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2}  # float, uint8, int8, int32, int64, bool, float16
_DTYPES = {1: "float32", 3: "int8", 6: "int32", 7: "int64", 10: "float16"}
_EXTERNAL = 1  # TensorProto.DataLocation
_INT_LIMIT = 2**31  # attributes beyond it have crashed onnxruntime, and none of ours comes near
# how many constant inputs, from the second on, a session may copy, pre-packed
_PACKED_OPS = {"Conv": 1, "MatMul": 1, "Gemm": 1, "MatMulNBits": 1, "LSTM": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSummary:
    """What the audit counted, for `tfmx inspect`."""

    ops: dict[str, int]  # "MatMul" or "com.microsoft.QuickGelu": how often
    opsets: dict[str, int]
    initializer_bytes: int
    packable_bytes: int  # weights of matrix products: a session that pre-packs holds them once more


def audit_graph(data: bytes, info: GraphInfo, weights_size: int) -> GraphSummary:
    """Refuse (BundleError) a graph that the exporter would not have written."""
    try:
        return _audit_model(memoryview(data), info, weights_size)
    except WireError as error:
        raise BundleError(f"{info.file} is not one of our graphs: {error}") from error


def _audit_model(data: memoryview, info: GraphInfo, weights_size: int) -> GraphSummary:
    model = read_message(data, _MODEL, "the model")
    opsets = _audit_opsets(model)
    if not model.has("graph"):
        raise WireError("it has no graph")
    graph = read_message(model.views("graph")[0], _GRAPH, "the graph")
    sizes: dict[str, int] = {}
    for view in graph.views("initializer"):
        name, size = _audit_tensor(view, weights_size)
        if name in sizes:
            raise WireError(f"two initializers are named {name!r}")
        sizes[name] = size
    ops: Counter[str] = Counter()
    packable: set[str] = set()
    for view in graph.views("node"):
        node = read_message(view, _NODE, "a node")
        ops[_audit_node(node, opsets, weights_size)] += 1
        packable.update(node.texts("input")[1 : 1 + _PACKED_OPS.get(node.text("op_type"), 0)])
    _audit_values(graph, "input", info.inputs)
    _audit_values(graph, "output", info.outputs)
    return GraphSummary(
        ops=dict(sorted(ops.items())),
        opsets=opsets,
        initializer_bytes=sum(sizes.values()),
        packable_bytes=sum(sizes.get(name, 0) for name in packable),
    )


def _audit_opsets(model: Message) -> dict[str, int]:
    opsets: dict[str, int] = {}
    for view in model.views("opset_import"):
        opset = read_message(view, _OPSET, "an opset")
        domain, version = opset.text("domain"), opset.number("version")
        domain = "" if domain == "ai.onnx" else domain
        if domain not in OPSETS or version not in OPSETS[domain] or domain in opsets:
            raise WireError(f"it imports opset {domain or 'ai.onnx'} {version}")
        opsets[domain] = version
    return opsets


def _audit_node(node: Message, opsets: dict[str, int], weights_size: int) -> str:
    domain, op = node.text("domain"), node.text("op_type")
    domain = "" if domain == "ai.onnx" else domain
    name = f"{domain}.{op}" if domain else op
    if op not in OPS.get(domain, ()):
        raise WireError(f"it uses the operator {name!r}")
    if domain not in opsets:
        raise WireError(f"it uses {name} without importing its opset")
    for view in node.views("attribute"):
        schema = _LSTM_ATTRIBUTE if name == "LSTM" else _ATTRIBUTE
        attribute = read_message(view, schema, f"an attribute of {name}")
        if not _LSTM_ACTIVATIONS.issuperset(attribute.texts("strings")):
            raise WireError(
                f"{name} has the attribute {attribute.text('name')} = {attribute.texts('strings')}"
            )
        for number in attribute.numbers("i") + attribute.numbers("ints"):
            if not -_INT_LIMIT <= number <= _INT_LIMIT:
                raise WireError(f"{name} has the attribute {attribute.text('name')} = {number}")
        if any(math.isnan(number) for number in attribute.floats("f") + attribute.floats("floats")):
            raise WireError(f"{name} has the attribute {attribute.text('name')} = NaN")
        for tensor in attribute.views("t"):
            _audit_tensor(tensor, weights_size)
    return name


def _audit_tensor(view: memoryview, weights_size: int) -> tuple[str, int]:
    tensor = read_message(view, _TENSOR, "a tensor")
    name, dims = tensor.text("name"), tensor.numbers("dims")
    item_size = _ITEM_SIZES.get(tensor.number("data_type"))
    if item_size is None:
        raise WireError(f"tensor {name!r} has the data type {tensor.number('data_type')}")
    if any(not 0 <= dim < 2**40 for dim in dims):
        raise WireError(f"tensor {name!r} has the shape {dims}")
    count = math.prod(dims)
    if tensor.number("data_location") == _EXTERNAL or tensor.has("external_data"):
        _audit_external(tensor, name, count * item_size, weights_size)
    elif tensor.has("raw_data"):
        if len(tensor.views("raw_data")[0]) != count * item_size:
            raise WireError(f"tensor {name!r} of shape {dims} has {len(tensor.views('raw_data')[0])} bytes")
    elif max(len(tensor.values.get(f"{kind}_data", ())) for kind in ("float", "int32", "int64")) != count:
        raise WireError(f"tensor {name!r} of shape {dims} has another number of values")
    return name, count * item_size


def _audit_external(tensor: Message, name: str, size: int, weights_size: int) -> None:
    entries: dict[str, str] = {}
    for view in tensor.views("external_data"):
        entry = read_message(view, _ENTRY, "external data")
        entries[entry.text("key")] = entry.text("value")
    if tensor.number("data_location") != _EXTERNAL or entries.keys() - {"location", "offset", "length"}:
        raise WireError(f"tensor {name!r} has external data with {sorted(entries)}")
    if tensor.has("raw_data") or entries.get("location") != WEIGHTS:
        raise WireError(f"tensor {name!r} lies in {entries.get('location')!r}, not in {WEIGHTS}")
    offset, length = _number(entries.get("offset", "0")), _number(entries.get("length", ""))
    if offset is None or length != size or offset + size > weights_size:
        raise WireError(f"tensor {name!r} lies outside {WEIGHTS} or has another size there")


def _audit_values(graph: Message, side: str, expected: tuple[TensorInfo, ...]) -> None:
    found = [_read_value(view) for view in graph.views(side)]
    wanted = [(tensor.name, tensor.dtype, tensor.shape) for tensor in expected]
    for entry in found:
        if entry not in wanted:
            raise WireError(
                f"its {side} {entry[0]!r} ({entry[1]}, {list(entry[2])}) is not as the manifest says"
            )
    if sorted(map(str, found)) != sorted(map(str, wanted)):
        raise WireError(f"its {side}s are not those of the manifest")


def _read_value(view: memoryview) -> tuple[str, str, tuple[int | str, ...]]:
    value = read_message(view, _VALUE, "an input or output")
    tensor_type = None
    for kind in value.views("type"):
        for part in read_message(kind, _TYPE, "a type").views("tensor_type"):
            tensor_type = read_message(part, _TENSOR_TYPE, "a tensor type")
    if tensor_type is None or not tensor_type.has("shape"):
        raise WireError(f"{value.text('name')!r} has no tensor type with a shape")
    shape: list[int | str] = []
    for part in read_message(tensor_type.views("shape")[0], _SHAPE, "a shape").views("dim"):
        dim = read_message(part, _DIM, "a dimension")
        shape.append(dim.text("param") if dim.has("param") else dim.number("value"))
    return value.text("name"), _DTYPES.get(tensor_type.number("elem_type"), "another type"), tuple(shape)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
