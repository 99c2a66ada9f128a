"""An ONNX file → plain records, without the onnx package. What the exporter does not write is refused."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from ..manifest import WEIGHTS
from ..ops import OPSETS
from ..wire import Message, Schema, WireError, read_message

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
    7: ("floats", "floats"), 8: ("ints", "ints"), 9: ("strings", "texts"), 13: ("doc_string", "text"),
    20: ("type", "int"),
}  # fmt: skip
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

DTYPES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16"}
_ITEM_SIZES = {"float32": 4, "uint8": 1, "int8": 1, "int32": 4, "int64": 8, "bool": 1, "float16": 2}
_LISTS = dict.fromkeys(_ITEM_SIZES, "int32_data") | {"float32": "float_data", "int64": "int64_data"}
_DATA = ("raw_data", "float_data", "int32_data", "int64_data")
_EXTERNAL = 1  # TensorProto.DataLocation
_KINDS = {
    "f": 1,
    "i": 2,
    "s": 3,
    "t": 4,
    "floats": 6,
    "ints": 7,
    "strings": 8,
}  # AttributeProto.AttributeType
_FEW = 64  # integers: a longer constant is no shape, and need not be known

_Type = tuple[str, tuple[int | str, ...]]
AttributeValue = int | float | bytes | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | memoryview


class Tensor(NamedTuple):
    """A constant of the graph."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes
    offset: int | None  # in the weights file; None: it lies in the graph
    integers: tuple[int, ...] | None  # its values, if it is a short list of whole numbers in the graph


class Node(NamedTuple):
    name: str
    op: str  # "MatMul", "com.microsoft.MatMulNBits"
    inputs: list[str]
    outputs: list[str]
    attributes: tuple[bytes, ...]


class Graph(NamedTuple):
    opsets: dict[str, int]
    tensors: list[Tensor]
    nodes: list[Node]
    inputs: list[Declared]
    outputs: list[Declared]
    repeated: list[Declared]  # value_info: what is said of values once more


class Declared(NamedTuple):
    """An input or output as the graph has it."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


# What the exporter writes (`export/builder.py`). Below 4, inputs with a default are no inputs to onnxruntime.
_IR_VERSIONS = range(8, 13)


def read_graph(data: bytes) -> Graph:
    model = read_message(memoryview(data), _MODEL, "the model")
    if model.number("ir_version") not in _IR_VERSIONS:
        raise WireError(f"its ir_version is {model.number('ir_version')}")
    opsets = _read_opsets(model)
    if not model.has("graph"):
        raise WireError("it has no graph")
    graph = read_message(model.views("graph")[0], _GRAPH, "the graph")
    types: dict[bytes, _Type] = {}
    return Graph(
        opsets=opsets,
        tensors=[read_tensor(view) for view in graph.views("initializer")],
        nodes=[_read_node(view) for view in graph.views("node")],
        inputs=[_read_value(view, types) for view in graph.views("input")],
        outputs=[_read_value(view, types) for view in graph.views("output")],
        repeated=[_read_value(view, types) for view in graph.views("value_info")],
    )


def _read_opsets(model: Message) -> dict[str, int]:
    opsets: dict[str, int] = {}
    for view in model.views("opset_import"):
        opset = read_message(view, _OPSET, "an opset")
        domain, version = opset.text("domain"), opset.number("version")
        domain = "" if domain == "ai.onnx" else domain
        if domain not in OPSETS or version not in OPSETS[domain] or domain in opsets:
            raise WireError(f"it imports opset {domain or 'ai.onnx'} {version}")
        opsets[domain] = version
    return opsets


def _read_node(view: memoryview) -> Node:
    node = read_message(view, _NODE, "a node")
    domain, op = node.text("domain"), node.text("op_type")
    return Node(
        node.text("name"),
        op if domain in {"", "ai.onnx"} else f"{domain}.{op}",
        node.texts("input"),
        node.texts("output"),
        tuple(map(bytes, node.views("attribute"))),
    )


def read_attribute(data: bytes) -> tuple[str, AttributeValue]:
    """The name and the one value that its type says it has."""
    attribute = read_message(memoryview(data), _ATTRIBUTE, "an attribute")
    name = attribute.text("name")
    kinds = [kind for kind in _KINDS if attribute.has(kind)]
    kind = kinds[0] if kinds else "ints"  # an empty list is not written
    if len(kinds) > 1 or attribute.number("type") != _KINDS[kind]:
        raise WireError(
            f"attribute {name!r} holds {' and '.join(kinds) or 'nothing'}, not what its type says"
        )
    match kind:
        case "i":
            return name, attribute.number("i")
        case "f":
            return name, attribute.floats("f")[0]
        case "ints":
            return name, tuple(attribute.numbers("ints"))
        case "floats":
            return name, tuple(attribute.floats("floats"))
        case "strings":
            return name, tuple(attribute.texts("strings"))
        case _:
            [value] = attribute.views(kind)
            return name, bytes(value) if kind == "s" else value


def read_tensor(view: memoryview) -> Tensor:
    tensor = read_message(view, _TENSOR, "a tensor")
    name, shape = tensor.text("name"), tuple(tensor.numbers("dims"))
    dtype = DTYPES.get(tensor.number("data_type"))
    if dtype is None:
        raise WireError(f"tensor {name!r} has the data type {tensor.number('data_type')}")
    if len(shape) > 8 or any(not 0 <= dim < 2**40 for dim in shape):
        raise WireError(f"tensor {name!r} has the shape {list(shape)}")
    if sum(tensor.has(kind) for kind in _DATA) > 1:
        raise WireError(f"tensor {name!r} has its values twice")
    count, offset = math.prod(shape), None
    size = count * _ITEM_SIZES[dtype]
    if tensor.number("data_location") == _EXTERNAL or tensor.has("external_data"):
        offset = _read_place(tensor, name, size)
        if offset % _ITEM_SIZES[dtype]:
            raise WireError(f"tensor {name!r} of {dtype} begins at byte {offset} of {WEIGHTS}")
    elif tensor.has("raw_data"):
        if len(tensor.views("raw_data")[0]) != size:
            raise WireError(
                f"tensor {name!r} of shape {list(shape)} has {len(tensor.views('raw_data')[0])} bytes"
            )
    elif len(tensor.values.get(_LISTS[dtype], ())) != count:
        raise WireError(f"tensor {name!r} of shape {list(shape)} has another number of values")
    few = dtype in {"int32", "int64"} and offset is None and count <= _FEW
    return Tensor(name, dtype, shape, size, offset, _integers(tensor, dtype) if few else None)


def _integers(tensor: Message, dtype: str) -> tuple[int, ...]:
    if not tensor.has("raw_data"):
        return tuple(tensor.numbers(f"{dtype}_data"))
    [raw] = tensor.views("raw_data")
    return struct.unpack(f"<{len(raw) // _ITEM_SIZES[dtype]}{'q' if dtype == 'int64' else 'i'}", raw)


def _read_place(tensor: Message, name: str, size: int) -> int:
    """Where the weights file holds it."""
    entries: dict[str, str] = {}
    for view in tensor.views("external_data"):
        entry = read_message(view, _ENTRY, "external data")
        entries[entry.text("key")] = entry.text("value")
    if tensor.number("data_location") != _EXTERNAL or entries.keys() - {"location", "offset", "length"}:
        raise WireError(f"tensor {name!r} has external data with {sorted(entries)}")
    if entries.get("location") != WEIGHTS:
        raise WireError(f"tensor {name!r} lies in {entries.get('location')!r}, not in {WEIGHTS}")
    if any(tensor.has(kind) for kind in _DATA):
        raise WireError(f"tensor {name!r} lies in the graph too, not in {WEIGHTS} alone")
    offset, length = _number(entries.get("offset", "0")), _number(entries.get("length", ""))
    if offset is None or length != size:
        raise WireError(f"tensor {name!r} lies outside {WEIGHTS} or has another size there")
    return offset


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _read_value(view: memoryview, types: dict[bytes, _Type]) -> Declared:
    """`types`: those that were read already, by their bytes. Many weights have the same."""
    value = read_message(view, _VALUE, "an input or output")
    name, [data] = value.text("name"), [bytes(part) for part in value.views("type")] or [b""]
    if data not in types:
        types[data] = _read_type(data, name)
    return Declared(name, *types[data])


def _read_type(data: bytes, name: str) -> _Type:
    tensor_type = None
    for part in read_message(memoryview(data), _TYPE, "a type").views("tensor_type"):
        tensor_type = read_message(part, _TENSOR_TYPE, "a tensor type")
    if tensor_type is None or not tensor_type.has("shape"):
        raise WireError(f"{name!r} has no tensor type with a shape")
    shape: list[int | str] = []
    for part in read_message(tensor_type.views("shape")[0], _SHAPE, "a shape").views("dim"):
        dim = read_message(part, _DIM, "a dimension")
        if dim.has("param") and dim.has("value"):
            raise WireError(f"{name!r} has a dimension with a name and a number")
        shape.append(dim.text("param") if dim.has("param") else dim.number("value"))
    return DTYPES.get(tensor_type.number("elem_type"), "another type"), tuple(shape)
