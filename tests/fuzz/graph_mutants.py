"""One edit of a graph: its nodes, what they read and give, attributes, constants, inputs, outputs and versions."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np
import onnx
from fuzz.attached import changed_attribute, make_attribute
from fuzz.draft import Draft
from fuzz.extremes import extreme_array, extreme_int, small_int
from fuzz.op_templates import templates
from onnx import helper, numpy_helper

Edit = Callable[[Random, onnx.ModelProto], str]
_ITEM_SIZES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2}
_DTYPES = (*_ITEM_SIZES, 0, 4, 5, 8, 11, 12, 13, 14, 16, 17, 21, 22, 999)
_ATTRIBUTES = (
    "axis",
    "axes",
    "to",
    "epsilon",
    "num_heads",
    "perm",
    "saturate",
    "keepdims",
    "value",
    "T",
    "_secret",
    "",
)


def edit_graph(rng: Random, draft: Draft) -> None:
    role = draft.role(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        edit = rng.choice(EDITS)
        draft.what.append(f"{role}: {edit(rng, draft.graphs[role])}")


def _node(rng: Random, model: onnx.ModelProto) -> onnx.NodeProto:
    return rng.choice(model.graph.node) if model.graph.node else model.graph.node.add(op_type="Identity")


def _values(model: onnx.ModelProto) -> list[str]:
    """Every value that the graph has, wherever it comes from."""
    graph = model.graph
    names = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
    return [*names, *(name for node in graph.node for name in node.output if name)] or ["x"]


def _title(node: onnx.NodeProto) -> str:
    return f"{node.op_type} giving {node.output[0] if node.output else 'nothing'}"


# --- nodes -----------------------------------------------------------------------------------------------


def delete_node(rng: Random, model: onnx.ModelProto) -> str:
    node = _node(rng, model)
    model.graph.node.remove(node)
    return f"{_title(node)} deleted"


def bypass_node(rng: Random, model: onnx.ModelProto) -> str:
    """What read its output reads its input."""
    node = _node(rng, model)
    title = _title(node)
    if node.input and node.output:
        first, gone = node.input[0], node.output[0]
        for other in model.graph.node:
            other.input[:] = [first if name == gone else name for name in other.input]
    return f"{title} bypassed"


def duplicate_node(rng: Random, model: onnx.ModelProto) -> str:
    node = _node(rng, model)
    model.graph.node.append(node)
    if rng.random() < 0.7:
        copied = model.graph.node[-1]
        copied.output[:] = [f"{name}_again" if name else "" for name in copied.output]
    return f"{_title(node)} twice"


def swap_nodes(rng: Random, model: onnx.ModelProto) -> str:
    nodes = model.graph.node
    i, j = rng.randrange(len(nodes)), rng.randrange(len(nodes))
    kept = onnx.NodeProto.FromString(nodes[i].SerializeToString())
    nodes[i].CopyFrom(nodes[j])
    nodes[j].CopyFrom(kept)
    return f"nodes {i} and {j} swapped"


def other_operator(rng: Random, model: onnx.ModelProto) -> str:
    node, template = _node(rng, model), rng.choice(templates())
    before = _title(node)
    node.op_type, node.domain = template.op, template.domain
    if rng.random() < 0.5:
        del node.attribute[:]
        node.attribute.extend(make_attribute(name, value) for name, value in template.attributes.items())
    return f"{before} becomes {template.name}"


def other_domain(rng: Random, model: onnx.ModelProto) -> str:
    node = _node(rng, model)
    node.domain = rng.choice(("", "ai.onnx", "com.microsoft", "ai.onnx.ml", "x"))
    return f"{_title(node)} in domain {node.domain!r}"


# --- what nodes read and give ----------------------------------------------------------------------------


def rewire(rng: Random, model: onnx.ModelProto) -> str:
    node = _node(rng, model)
    if not node.input:
        return f"{_title(node)}: no input"
    index = rng.randrange(len(node.input))
    node.input[index] = rng.choice((*_values(model), "nothing of this name"))
    return f"{_title(node)}: input {index} is {node.input[index]}"


def swap_inputs(rng: Random, model: onnx.ModelProto) -> str:
    node = _node(rng, model)
    names = list(node.input)
    rng.shuffle(names)
    node.input[:] = names
    return f"{_title(node)}: inputs shuffled"


def drop_input(rng: Random, model: onnx.ModelProto) -> str:
    node = _node(rng, model)
    if not node.input:
        return f"{_title(node)}: no input"
    index = rng.randrange(len(node.input))
    if rng.random() < 0.7:
        node.input[index] = ""
        return f"{_title(node)}: input {index} left out"
    del node.input[index:]
    return f"{_title(node)}: {index} inputs"


def more_inputs(rng: Random, model: onnx.ModelProto) -> str:
    node = _node(rng, model)
    node.input.extend([""] * rng.choice((0, 0, 1, 4, 100)))
    node.input.append(rng.choice(_values(model)))
    return f"{_title(node)}: {len(node.input)} inputs"


def change_outputs(rng: Random, model: onnx.ModelProto) -> str:
    node = _node(rng, model)
    title, way = _title(node), rng.choice(("drop", "blank", "more", "rename", "taken", "swap"))
    if way == "more":
        node.output.extend(f"extra_{i}" for i in range(rng.choice((1, 2, 5))))
    elif node.output:
        index = rng.randrange(len(node.output))
        if way == "drop":
            del node.output[index:]
        elif way == "swap":
            node.output[:] = list(node.output)[::-1]
        else:
            node.output[index] = {"blank": "", "rename": "renamed"}.get(way, rng.choice(_values(model)))
    return f"{title}: outputs {way}"


# --- attributes ------------------------------------------------------------------------------------------


def change_attribute(rng: Random, model: onnx.ModelProto) -> str:
    nodes = [node for node in model.graph.node if node.attribute]
    if not nodes:
        return "no attribute"
    node = rng.choice(nodes)
    attribute = rng.choice(node.attribute)
    if attribute.type == onnx.AttributeProto.TENSOR:
        return f"{_title(node)}: {attribute.name}: {_spoil_tensor(rng, attribute.t)}"
    value = changed_attribute(rng, _value_of(attribute))
    attribute.CopyFrom(make_attribute(attribute.name, value))
    return f"{_title(node)}: {attribute.name} = {str(value)[:60]!r}"


def _value_of(attribute: onnx.AttributeProto) -> int | float | str | list[int] | list[float] | list[str]:
    """Zero where the type, which may have been changed, is none that our graphs have."""
    kinds = onnx.AttributeProto
    if attribute.type == kinds.STRING:
        return attribute.s.decode("utf-8", "replace")
    if attribute.type == kinds.STRINGS:
        return [text.decode("utf-8", "replace") for text in attribute.strings]
    lists = {kinds.INTS: attribute.ints, kinds.FLOATS: attribute.floats}
    if attribute.type in lists:
        return list(lists[attribute.type])
    return attribute.f if attribute.type == kinds.FLOAT else attribute.i


def drop_attribute(rng: Random, model: onnx.ModelProto) -> str:
    nodes = [node for node in model.graph.node if node.attribute]
    if not nodes:
        return "no attribute"
    node = rng.choice(nodes)
    attribute = rng.choice(node.attribute)
    node.attribute.remove(attribute)
    return f"{_title(node)}: no {attribute.name}"


def more_attributes(rng: Random, model: onnx.ModelProto) -> str:
    """One of its own again, one of another operator, or one that nobody knows."""
    node = _node(rng, model)
    names = [attribute.name for attribute in node.attribute]
    others = list(rng.choice(templates()).attributes)
    name = rng.choice((*names, *others, *_ATTRIBUTES))
    value = changed_attribute(rng, rng.choice((0, 1.0, "x", [0, 1])))
    node.attribute.append(make_attribute(name, value))
    return f"{_title(node)}: {name!r} = {str(value)[:60]!r} added"


def untyped_attribute(rng: Random, model: onnx.ModelProto) -> str:
    """What the type says and what is filled in differ."""
    nodes = [node for node in model.graph.node if node.attribute]
    if not nodes:
        return "no attribute"
    node = rng.choice(nodes)
    attribute = rng.choice(node.attribute)
    attribute.type = rng.choice(tuple(range(15)))
    return f"{_title(node)}: {attribute.name} of type {attribute.type}"


# --- constants -------------------------------------------------------------------------------------------


def _spoil_tensor(rng: Random, tensor: onnx.TensorProto) -> str:
    """Consistently where it can be, so that the sizes still fit."""
    is_external = bool(tensor.external_data)
    way = rng.choice(("values", "values", "shape", "shape", "dtype", "dims", "size", "name"))
    if is_external:
        way = rng.choice(("shape", "dtype", "place", "place", "inline"))
    if way in {"values", "shape", "dtype", "inline"}:
        return _redrawn(rng, tensor, way)
    if way == "dims":
        if tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = extreme_int(rng)
        else:
            tensor.dims.append(extreme_int(rng))
        return f"{tensor.name} of dims {list(tensor.dims)}"
    if way == "size":
        tensor.raw_data = tensor.raw_data[: rng.choice((0, 1, max(len(tensor.raw_data) - 1, 0)))]
        return f"{tensor.name} of {len(tensor.raw_data)} bytes"
    if way == "place":
        entry = rng.choice(tensor.external_data)
        entry.value = rng.choice(
            ("0", "1", "-1", "", "x", str(2**63), "../weights.bin", "weights.bin\0", "1e3", "4", "999999999")
        )
        return f"{tensor.name}: {entry.key} = {entry.value!r}"
    before, tensor.name = tensor.name, rng.choice(("", "x", tensor.name + "_", "logits", "input_ids"))
    return f"{before} named {tensor.name!r}"


def _redrawn(rng: Random, tensor: onnx.TensorProto, way: str) -> str:
    """Other values, shape or type; of external ones the place stays, and its length follows."""
    name = tensor.name
    dims, kind = list(tensor.dims), tensor.data_type
    if tensor.external_data:
        if way == "dtype":
            kind = rng.choice(tuple(_ITEM_SIZES))
        elif way == "shape" or not dims:
            dims = _other_shape(rng, dims)
        size = math.prod(dims) * _ITEM_SIZES[kind]
        tensor.data_type, tensor.dims[:] = kind, dims
        for entry in tensor.external_data:
            entry.value = str(size) if entry.key == "length" else entry.value
        return f"{name} is {kind} {dims} in weights.bin"
    is_spoiled = tensor.HasField("raw_data") and len(tensor.raw_data) != math.prod(dims) * _ITEM_SIZES.get(
        kind, 0
    )
    if kind not in _ITEM_SIZES or is_spoiled or any(dim < 0 for dim in dims):  # by an edit before this one
        return f"{name} left as it is"
    array = numpy_helper.to_array(tensor)
    if way == "values":
        array = extreme_array(rng, array)
    elif way == "shape":
        shape = _other_shape(rng, dims)
        array = np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
    else:
        with np.errstate(all="ignore"):
            array = array.astype(helper.tensor_dtype_to_np_dtype(rng.choice(tuple(_ITEM_SIZES))))
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), name))
    return f"{name} is {array.dtype} {list(array.shape)} {str(array.reshape(-1)[:5].tolist())[:60]}"


def _other_shape(rng: Random, dims: list[int]) -> list[int]:
    shape = list(dims)
    way = rng.choice(("drop", "add", "zero", "one", "less", "more", "swap", "flat"))
    if way == "flat":
        return [math.prod(shape)]
    if way == "add" or not shape:
        shape.insert(rng.randrange(len(shape) + 1), rng.choice((1, 1, 2, 0)))
        return shape
    place = rng.randrange(len(shape))
    if way == "drop":
        del shape[place]
    elif way == "swap":
        rng.shuffle(shape)
    else:
        shape[place] = {"zero": 0, "one": 1, "less": shape[place] // 2}.get(way, shape[place] + 1)
    return shape


def change_constant(rng: Random, model: onnx.ModelProto) -> str:
    if not model.graph.initializer:
        return "no initializer"
    small = [tensor for tensor in model.graph.initializer if not tensor.external_data]
    tensors = small if small and rng.random() < 0.7 else list(model.graph.initializer)
    return _spoil_tensor(rng, rng.choice(tensors))


def delete_constant(rng: Random, model: onnx.ModelProto) -> str:
    if not model.graph.initializer:
        return "no initializer"
    tensor = rng.choice(model.graph.initializer)
    model.graph.initializer.remove(tensor)
    return f"{tensor.name} deleted"


def constant_for_input(rng: Random, model: onnx.ModelProto) -> str:
    """A default for one of the graph's inputs, or for a value that a node gives."""
    name = rng.choice(_values(model))
    shape = [rng.choice((0, 1, 2, 5)) for _ in range(rng.randrange(4))]
    dtype = rng.choice((np.float32, np.int64, np.float16))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, dtype), name))
    return f"{name} has an initializer of {shape}"


# --- inputs, outputs, versions ---------------------------------------------------------------------------


def _spoil_value(rng: Random, value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    if rng.random() < 0.4:
        tensor.elem_type = rng.choice(_DTYPES)
    elif tensor.shape.dim and rng.random() < 0.8:
        dim = rng.choice(tensor.shape.dim)
        if rng.random() < 0.7:
            dim.dim_value = small_int(rng) if rng.random() < 0.6 else extreme_int(rng)
        else:
            dim.dim_param = rng.choice(("", "batch_size", "other", "\0"))
    elif rng.random() < 0.5:
        tensor.shape.dim.add(dim_value=1)
    else:
        del tensor.shape.dim[-1:]
    return (
        f"{value.name} is {tensor.elem_type} {[dim.dim_param or dim.dim_value for dim in tensor.shape.dim]}"
    )


def change_value(rng: Random, model: onnx.ModelProto) -> str:
    graph = model.graph
    side = rng.choice((graph.input, graph.output))
    if not side:
        return "no input or output"
    value, way = rng.choice(side), rng.choice(("spoil", "spoil", "delete", "twice", "rename"))
    if way == "spoil":
        return _spoil_value(rng, value)
    if way == "delete":
        side.remove(value)
    elif way == "twice":
        side.append(value)
    else:
        value.name = rng.choice((*_values(model), "renamed"))
    return f"{value.name}: {way}"


def wrong_hint(rng: Random, model: onnx.ModelProto) -> str:
    """A value_info that contradicts the graph."""
    name = rng.choice(_values(model))
    shape = [small_int(rng) for _ in range(rng.randrange(5))]
    dtype = rng.choice(tuple(_ITEM_SIZES))
    model.graph.value_info.append(helper.make_tensor_value_info(name, dtype, shape))
    return f"value_info says that {name} is {dtype} {shape}"


def change_version(rng: Random, model: onnx.ModelProto) -> str:
    way = rng.choice(("opset", "opset", "opset", "opset", "ir", "more", "none"))
    if way == "ir":
        model.ir_version = rng.choice((0, 1, 3, 7, 10, 11, 13, 99, -1, 2**40))
        return f"ir_version {model.ir_version}"
    if way == "more":
        model.opset_import.append(
            helper.make_opsetid(rng.choice(("", "ai.onnx", "com.microsoft", "x", "ai.onnx.ml")), 1)
        )
    elif way == "none":
        del model.opset_import[rng.randrange(len(model.opset_import)) :]
    else:
        opset = rng.choice(model.opset_import or [model.opset_import.add()])
        opset.version = rng.choice((*range(17, 25), *range(17, 25), 0, 1, 7, 13, 16, 25, 99, -1, 2**40))
    return f"opsets {[(opset.domain, opset.version) for opset in model.opset_import]}"


def cast_type(rng: Random, model: onnx.ModelProto) -> str:
    """Casts choose what follows: to every type, with and without saturation."""
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    if not casts:
        return "no Cast"
    node = rng.choice(casts)
    to = rng.choice((*_ITEM_SIZES, *_DTYPES))
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("to", to))
    if rng.random() < 0.4:
        node.attribute.append(helper.make_attribute("saturate", rng.choice((0, 1, 2, -1))))
    return f"{_title(node)}: to {to}"


def damaged_constant_node(rng: Random, model: onnx.ModelProto) -> str:
    """A Constant in the place of an initializer, sometimes with two values or none."""
    if not model.graph.initializer:
        return "no initializer"
    tensor = rng.choice(model.graph.initializer)
    model.graph.initializer.remove(tensor)
    node = model.graph.node.add(op_type="Constant", output=[tensor.name])
    if rng.random() < 0.85:
        node.attribute.append(helper.make_attribute("value", tensor))
    if rng.random() < 0.3:
        node.attribute.append(helper.make_attribute("value_floats", [1.0, 2.0]))
    if rng.random() < 0.8:  # before what reads it
        nodes = [node, *list(model.graph.node)[:-1]]
        kept = [onnx.NodeProto.FromString(entry.SerializeToString()) for entry in nodes]
        del model.graph.node[:]
        model.graph.node.extend(kept)
    return f"{tensor.name} is a Constant"


EDITS: tuple[Edit, ...] = (
    delete_node, bypass_node, duplicate_node, swap_nodes, other_operator, other_operator, other_domain,
    rewire, rewire, swap_inputs, drop_input, drop_input, more_inputs, change_outputs, change_outputs,
    change_attribute, change_attribute, change_attribute, change_attribute, drop_attribute, more_attributes, untyped_attribute,
    change_constant, change_constant, change_constant, change_constant, change_constant, delete_constant, constant_for_input,
    change_value, wrong_hint, change_version, cast_type, damaged_constant_node,
)  # fmt: skip
