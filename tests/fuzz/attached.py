"""Attaches an operator to a graph, mostly with something wrong about it, so that what it computes reaches the output.

Its inputs are constants, or constants plus a zero that depends on what the bundle is given: the first are computed when
onnxruntime loads the graph, the second when it runs. The sum of all that comes out, with NaN and infinity taken out, is added to
the graph's main output: memory that nobody wrote then shows as an output that differs.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import onnx
from fuzz.draft import Draft
from fuzz.extremes import FLOATS, extreme_array, extreme_float, extreme_int, small_int
from fuzz.op_templates import TYPES, Template, templates
from onnx import TensorProto, helper, numpy_helper

from tfmx.runtime.audit.contracts import OPS

_MOST = 1e4  # what comes out is clipped to it, so that the output stays finite
_PLAIN = 0.1  # share of nodes that are left valid
_LIVE, _LIVE_SIZES = 0.6, 0.05  # share of inputs that depend on what is given
_REFUSED = 0.07  # weight of an operator that no bundle may have
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16}


def attach_operator(rng: Random, draft: Draft) -> None:
    role = draft.role(rng)
    template = rng.choices(templates(), [_weight(template) for template in templates()])[0].drawn(rng)
    chances = [_LIVE_SIZES if _chooses(text) else _LIVE for text in template.inputs]
    changes = (
        [] if rng.random() < _PLAIN else [_spoil(rng, template) for _ in range(rng.choice((1, 1, 2, 3)))]
    )
    live = [rng.random() < chance for chance in chances]
    attach(draft.graphs[role], template, live, main_output(draft, role))
    what = f" ({', '.join(changes)})" if changes else ""
    draft.what.append(
        f"{role}: {template.name} attached{what}, live inputs {[i for i, on in enumerate(live) if on]}"
    )


def _weight(template: Template) -> float:
    """The more an operator takes, the more can be wrong about it; those that are refused by their name come seldom."""
    allowed = 1 if template.op in OPS.get(template.domain, ()) else _REFUSED
    return allowed * (1 + len(template.attributes) + len(template.inputs) // 2)


def _chooses(text: str) -> bool:
    """Sizes, axes, codes: what an operator wants to know beforehand."""
    return text[0] in "qu" or (text[0] in "in" and text[1:2] in "=@")


def main_output(draft: Draft, role: str) -> str:
    names = [value.name for value in draft.graphs[role].graph.output]
    return next(
        (name for name in names if name in {"logits", "values", "embedding", "last_hidden_state"}), names[0]
    )


def attach(model: onnx.ModelProto, template: Template, live: list[bool], output: str) -> None:
    """`output` gets the sum of the new node's outputs; `live` says which inputs depend on the graph's."""
    graph, nodes = model.graph, []
    prefix = f"attached{len(graph.node)}"
    _import_opset(model, template)
    nodes += _zeros(graph, prefix) if any(live) else []
    inputs = []
    for index, array in enumerate(template.arrays):
        name = f"{prefix}_in{index}" if array is not None else ""
        inputs.append(name)
        if array is None:
            continue
        on = live[index] if index < len(live) else False
        graph.initializer.append(numpy_helper.from_array(array, f"{name}_constant" if on else name))
        nodes += _revived(prefix, name, array.dtype) if on else []
    outputs = [f"{prefix}_out{index}" for index in range(template.outputs)]
    nodes.append(_node(template, inputs, outputs))
    sums = []
    for name in outputs:
        nodes += _summed(graph, name)
        sums.append(f"{name}_sum")
    for node in graph.node:
        node.output[:] = [f"{output}_without" if name == output else name for name in node.output]
        node.input[:] = [f"{output}_without" if name == output else name for name in node.input]
    nodes.append(helper.make_node("Sum", [f"{output}_without", *sums], [output]))
    graph.node.extend(nodes)


def _node(template: Template, inputs: list[str], outputs: list[str]) -> onnx.NodeProto:
    node = helper.make_node(template.op, inputs, outputs, domain=template.domain)
    for name, value in template.attributes.items():
        node.attribute.append(make_attribute(name, value))
    return node


def make_attribute(name: str, value: Any) -> onnx.AttributeProto:
    """Also of values that onnx's own helper refuses."""
    if isinstance(value, list) and not value:
        return onnx.AttributeProto(name=name, type=onnx.AttributeProto.INTS)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = 2**63 - 1
    return helper.make_attribute(name, value)


def _import_opset(model: onnx.ModelProto, template: Template) -> None:
    versions = {opset.domain: opset for opset in model.opset_import}
    versions[""].version = max(versions[""].version, template.opset)
    if template.domain and template.domain not in versions:
        model.opset_import.append(helper.make_opsetid(template.domain, 1))


def _zeros(graph: onnx.GraphProto, prefix: str) -> list[onnx.NodeProto]:
    """A float zero that onnxruntime cannot know before it runs: an input's largest number less itself."""
    given = graph.input[0].name
    names = [f"{prefix}_{part}" for part in ("float", "largest", "zero")]
    return [
        helper.make_node("Cast", [given], names[:1], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", names[:1], names[1:2], keepdims=0),
        helper.make_node("Sub", [names[1], names[1]], names[2:]),
    ]


def _revived(prefix: str, name: str, dtype: np.dtype) -> list[onnx.NodeProto]:
    """The constant, plus that zero in its type; types that cannot be added pass through int32."""
    to = helper.np_dtype_to_tensor_dtype(dtype)
    if dtype in (np.float32, np.int64, np.int32):
        return [
            helper.make_node("Cast", [f"{prefix}_zero"], [f"{name}_zero"], to=to),
            helper.make_node("Add", [f"{name}_constant", f"{name}_zero"], [name]),
        ]
    wide = TensorProto.FLOAT if dtype == np.float16 else TensorProto.INT32
    return [
        helper.make_node("Cast", [f"{prefix}_zero"], [f"{name}_zero"], to=wide),
        helper.make_node("Cast", [f"{name}_constant"], [f"{name}_wide"], to=wide),
        helper.make_node("Add", [f"{name}_wide", f"{name}_zero"], [f"{name}_added"]),
        helper.make_node("Cast", [f"{name}_added"], [name], to=to),
    ]


def _summed(graph: onnx.GraphProto, name: str) -> list[onnx.NodeProto]:
    limits = {"zero": 0.0, "low": -_MOST, "high": _MOST}
    for part, value in limits.items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), f"{name}_{part}"))
    return [
        helper.make_node("Cast", [name], [f"{name}_float"], to=TensorProto.FLOAT),
        helper.make_node("IsNaN", [f"{name}_float"], [f"{name}_nan"]),
        helper.make_node("Where", [f"{name}_nan", f"{name}_zero", f"{name}_float"], [f"{name}_numbers"]),
        helper.make_node("Clip", [f"{name}_numbers", f"{name}_low", f"{name}_high"], [f"{name}_clipped"]),
        helper.make_node("ReduceSum", [f"{name}_clipped"], [f"{name}_sum"], keepdims=0),
    ]


# --- what may be wrong about it --------------------------------------------------------------------------


def _spoil(rng: Random, template: Template) -> str:
    ways = [_outputs]
    if _filled(template):
        ways += [
            _shape,
            _shape,
            _shape,
            _values,
            _values,
            _absent,
            _dtype,
            _more_inputs,
            _fewer_inputs,
            _same_twice,
        ]
    if template.attributes:
        ways += [_attribute] * 4 + [_no_attribute]
    return rng.choice(ways)(rng, template)


def _filled(template: Template) -> list[int]:
    return [index for index, array in enumerate(template.arrays) if array is not None]


def _shape(rng: Random, template: Template) -> str:
    index = rng.choice(_filled(template))
    array = template.arrays[index]
    assert array is not None
    shape = list(array.shape)
    place = rng.randrange(len(shape)) if shape else 0
    way = rng.choice(("zero", "one", "more", "less", "large", "rank+", "rank-", "empty"))
    if way == "rank+" or not shape:
        shape.insert(place, rng.choice((1, 1, 2, 0)))
    elif way == "rank-":
        del shape[place]
    elif way == "empty":
        shape = [0] * len(shape)
    else:
        shape[place] = {
            "zero": 0,
            "one": 1,
            "more": shape[place] + 1,
            "less": max(shape[place] - 1, 0),
            "large": 70,
        }[way]
    template.arrays[index] = np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
    return f"input {index} of shape {shape}"


def _values(rng: Random, template: Template) -> str:
    index = rng.choice(_filled(template))
    array = template.arrays[index]
    assert array is not None
    template.arrays[index] = extreme_array(rng, array)
    return f"input {index} = {str(template.arrays[index].reshape(-1)[:6].tolist())[:70]}"


def _opposites(rng: Random, template: Template) -> str:
    """Whole numbers whose quotient, product or difference cannot be held: the smallest, and -1."""
    smallest = rng.choice(_filled(template))
    for index in _filled(template):
        array = template.arrays[index]
        if array is not None and array.dtype.kind == "i" and array.size < 100:
            value = np.iinfo(array.dtype).min if index == smallest else -1
            template.arrays[index] = np.full_like(array, value)
    return f"input {smallest} the smallest, the others -1"


def _absent(rng: Random, template: Template) -> str:
    index = rng.choice(_filled(template))
    template.arrays[index] = None
    return f"input {index} left out"


def _dtype(rng: Random, template: Template) -> str:
    index = rng.choice(_filled(template))
    array = template.arrays[index]
    assert array is not None
    letter = rng.choice("fhinqub")
    with np.errstate(all="ignore"):
        template.arrays[index] = array.astype(TYPES[letter])
    return f"input {index} of type {TYPES[letter].__name__}"


def _more_inputs(rng: Random, template: Template) -> str:
    known = [array for array in template.arrays if array is not None]
    extra = rng.choice(
        [*known, np.zeros((), np.float32), np.asarray([1], np.int64), np.zeros((0,), np.float32)]
    )
    for _ in range(rng.choice((0, 0, 1, 3))):
        template.arrays.append(None)
    template.arrays.append(extra)
    return f"an input {len(template.arrays) - 1} of {extra.dtype} {list(extra.shape)}"


def _fewer_inputs(rng: Random, template: Template) -> str:
    del template.arrays[rng.randrange(len(template.arrays)) :]
    return f"{len(template.arrays)} inputs"


def _same_twice(rng: Random, template: Template) -> str:
    one, other = rng.choice(_filled(template)), rng.choice(_filled(template))
    template.arrays[one] = template.arrays[other]
    return f"input {one} as input {other}"


def _attribute(rng: Random, template: Template) -> str:
    name = rng.choice(list(template.attributes))
    template.attributes[name] = changed_attribute(rng, template.attributes[name])
    return f"{name} = {str(template.attributes[name])[:60]!r}"


def changed_attribute(rng: Random, now: Any) -> Any:
    """Mostly of the same type."""
    if rng.random() < 0.1:
        return rng.choice((0, 1.0, "x", [0], [1.0], -1, []))
    if isinstance(now, int):
        return small_int(rng) if rng.random() < 0.6 else extreme_int(rng, now)
    if isinstance(now, float):
        return extreme_float(rng) if rng.random() < 0.8 else rng.choice(FLOATS) * 7
    if isinstance(now, str):
        return rng.choice(("", "x", "none", "add", "mul", "max", "min", "constant", "reflect", "edge", "wrap", "linear",
                           "circular", "LEFT", "NOTSET", "reverse", "bidirectional", "PER_CHANNEL", "NONE", now * 2,
                           "ij->", "...", "ii,ij->j", "bij,bjk->bik,", "aaaa,aaaa->a", "bij->bij", "zij,zjk->zikq"))  # fmt: skip
    if isinstance(now, list) and now and isinstance(now[0], str):
        return rng.choice((now[:-1], now * 3, [*now[:-1], "Affine"], [""] * len(now), []))
    if isinstance(now, list):
        values = list(now)
        way = rng.choice(("value", "value", "short", "long", "empty", "twice"))
        if way == "value" and values:
            values[rng.randrange(len(values))] = small_int(rng) if rng.random() < 0.7 else extreme_int(rng)
            return values
        return {"short": values[:-1], "long": [*values, 0], "twice": values * 2}.get(way, [])
    return 0


def _no_attribute(rng: Random, template: Template) -> str:
    name = rng.choice(list(template.attributes))
    del template.attributes[name]
    return f"no {name}"


def _outputs(rng: Random, template: Template) -> str:
    template.outputs = rng.choice((1, 2, 3, 4, 7))
    return f"{template.outputs} outputs"
