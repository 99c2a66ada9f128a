"""Changes of manifest.json alone, and of manifest and graphs together, so that the two still agree."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

import onnx
from fuzz.draft import Draft
from fuzz.extremes import TEXTS, extreme_int, extreme_json, shown, small_int

_Place = tuple[Any, Any]  # a dictionary or list, and a key of it
_ONNX_TYPES = {"float32": 1, "float16": 10, "int64": 7, "int32": 6, "int8": 3}


def change_fields(rng: Random, draft: Draft) -> None:
    """Fields by themselves: `draft.sign` must have run, or it would put sizes and sums right again."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        draft.what.append(_change_field(rng, draft.manifest))


def _change_field(rng: Random, manifest: dict[str, Any]) -> str:
    path, (holder, key) = rng.choice(list(_places(manifest, "")))
    way = rng.choice(("value", "value", "value", "value", "value", "delete", "add", "copy", "twice"))
    if way == "value":
        holder[key] = extreme_json(rng, holder[key])
        return f"{path} = {shown(holder[key])}"
    if way == "delete":
        del holder[key]
        return f"{path} deleted"
    if way == "add" and isinstance(holder, dict):
        name = rng.choice(("x", *TEXTS, *holder))
        holder[name] = copy.deepcopy(holder[key])
        return f"{path} also as {name[:30]!r}"
    if way == "twice" and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
        return f"{path} twice"
    other, (from_holder, from_key) = rng.choice(list(_places(manifest, "")))
    holder[key] = copy.deepcopy(from_holder[from_key])
    return f"{path} as {other}"


def _places(value: Any, path: str) -> Iterator[tuple[str, _Place]]:
    """Every field at any depth, with where it is."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, part in items:
        place = f"{path}.{key}" if path else str(key)
        yield place, (value, key)
        yield from _places(part, place)


# --- consistent changes ----------------------------------------------------------------------------------


def change_together(rng: Random, draft: Draft) -> None:
    """A tensor of a graph, the state or a size gets another shape, type or name everywhere."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        draft.what.append(
            rng.choice((_tensor, _tensor, _tensor, _sizes, _sizes, _state, _swapped_graphs))(rng, draft)
        )


def _tensor(rng: Random, draft: Draft) -> str:
    role = draft.role(rng)
    side = rng.choice(("inputs", "outputs"))
    entries = draft.manifest["graphs"][role][side]
    if not entries:
        return "no tensor"
    entry = rng.choice(entries)
    name = entry["name"]
    changed = _changed_tensor(rng, entry)
    for other in draft.graphs if rng.random() < 0.7 else [role]:
        for own_side in ("inputs", "outputs"):
            _apply(draft, other, own_side, name, changed)
    for state in draft.manifest["state"] if isinstance(draft.manifest["state"], list) else []:
        if state["past"] == name:
            state.update(past=changed["name"], dtype=changed["dtype"], shape=changed["shape"])
        if state["present"] == name:
            state.update(present=changed["name"], dtype=changed["dtype"])
    return f"{role}: {name} is {changed['name']!r} {changed['dtype']} {changed['shape']}"


def _changed_tensor(rng: Random, entry: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(entry)
    shape, way = found["shape"], rng.choice(("dim", "dim", "dim", "dtype", "name", "rank+", "rank-"))
    if way == "dtype":
        found["dtype"] = rng.choice(list(_ONNX_TYPES))
    elif way == "name":
        found["name"] = rng.choice(
            (
                "renamed",
                "attention_mask",
                "position_ids",
                "num_logits_to_keep",
                "attentions.0",
                "attentions.99",
            )
        )
    elif way == "rank+" or not shape:
        shape.insert(rng.randrange(len(shape) + 1), rng.choice((1, 0, 2, "more")))
    elif way == "rank-":
        del shape[rng.randrange(len(shape))]
    else:
        place = rng.randrange(len(shape))
        now = shape[place] if isinstance(shape[place], int) else 1
        size = rng.choice((small_int(rng), now + 1, now * 2, 2**31 - 1, 2**20))
        shape[place] = (
            max(size, 0)
            if rng.random() < 0.7
            else rng.choice(("other", "batch_size", "past_sequence_length"))
        )
    return found


def _apply(draft: Draft, role: str, side: str, name: str, changed: dict[str, Any]) -> None:
    """In the manifest's entry, the graph's declaration and every node."""
    for entry in draft.manifest["graphs"][role][side]:
        if entry["name"] == name:
            entry.update(copy.deepcopy(changed))
    graph = draft.graphs[role].graph
    for value in graph.input if side == "inputs" else graph.output:
        if value.name == name:
            _declare(value, changed)
    if changed["name"] != name:
        for node in graph.node:
            node.input[:] = [changed["name"] if value == name else value for value in node.input]
            node.output[:] = [changed["name"] if value == name else value for value in node.output]


def _declare(value: onnx.ValueInfoProto, changed: dict[str, Any]) -> None:
    value.name = changed["name"]
    tensor = value.type.tensor_type
    tensor.elem_type = _ONNX_TYPES[changed["dtype"]]
    del tensor.shape.dim[:]
    for dim in changed["shape"]:
        if isinstance(dim, str):
            tensor.shape.dim.add(dim_param=dim)
        else:
            tensor.shape.dim.add(dim_value=dim)


def _sizes(rng: Random, draft: Draft) -> str:
    """Lengths, vocabularies, classes and pixels: where a size stands twice, both are changed."""
    manifest = draft.manifest
    inputs = manifest["inputs"]
    size = rng.choice((1, 2, 3, 1000, 2**20, 2**31 - 1, extreme_int(rng)))
    way = rng.choice(("context", "length", "vocabulary", "outputs", "features", "image", "dtype", "tokens"))
    if way in {"context", "length"}:
        manifest["max_context"] = size
        inputs["length"] = size if way == "length" else min(inputs["length"], size)
    elif way == "vocabulary" and inputs["vocab_size"] is not None:
        inputs["vocab_size"] = size
    elif way == "outputs":
        _resize_output(draft, size)
    elif way == "features" and inputs["features"] is not None:
        inputs["features"] = size
        _resize_input(draft, [size])
    elif way == "image" and inputs["image"] is not None:
        inputs["image"][rng.randrange(3)] = size
        inputs["mean"] = (inputs["mean"] * 4)[: max(min(inputs["image"][0], 12), 0)]
        inputs["std"] = (inputs["std"] * 4)[: max(min(inputs["image"][0], 12), 0)]
        _resize_input(draft, inputs["image"])
    elif way == "dtype":
        manifest["dtype"] = "fp16" if manifest["dtype"] == "fp32" else "fp32"
    else:
        names = ("bos_token_id", "pad_token_id", "decoder_start_token_id")
        manifest["generation"][rng.choice(names)] = rng.choice((0, 1, 95, None))
        manifest["generation"]["eos_token_ids"] = rng.choice(([], [0], list(range(50))))
    return f"{way} {size}"


def _resize_output(draft: Draft, size: int) -> None:
    outputs = draft.manifest["outputs"]
    outputs["size"] = size
    if draft.manifest["vocab_size"] is not None:
        draft.manifest["vocab_size"] = size
    if outputs["labels"] is not None:
        outputs["labels"] = [str(index) for index in range(min(max(size, 0), 5000))]
    for role, graph in draft.manifest["graphs"].items():
        for entry in graph["outputs"]:
            if entry["name"] == outputs["name"]:
                _apply(
                    draft, role, "outputs", entry["name"], {**entry, "shape": [*entry["shape"][:-1], size]}
                )


def _resize_input(draft: Draft, tail: list[int]) -> None:
    for role, graph in draft.manifest["graphs"].items():
        for entry in graph["inputs"]:
            if entry["name"] in {"input_features", "pixel_values"}:
                shape = [*entry["shape"][: -len(tail)], *(max(size, 0) for size in tail)]
                _apply(draft, role, "inputs", entry["name"], {**entry, "shape": shape})


def _state(rng: Random, draft: Draft) -> str:
    """A state of another growth, left out, twice, or with its tensors swapped."""
    states = draft.manifest["state"]
    if not states:
        return "no state"
    way, state = rng.choice(("growth", "growths", "delete", "twice", "swap")), rng.choice(states)
    if way == "delete":
        states.remove(state)
    elif way == "twice":
        states.append(copy.deepcopy(state))
    elif way == "swap":
        state["past"] = rng.choice(states)["past"]
    else:
        growth = rng.choice(("append", "capacity", "constant", "fixed"))
        for entry in states if way == "growths" else [state]:
            entry["growth"] = growth
    return f"state {state['past']}: {way} {state['growth']}"


def _swapped_graphs(rng: Random, draft: Draft) -> str:
    """A role gets another role's graph, or all roles one file."""
    one, other = draft.role(rng), draft.role(rng)
    graphs = draft.manifest["graphs"]
    if rng.random() < 0.5:
        draft.graphs[one] = draft.graphs[other]
        graphs[one] = {**copy.deepcopy(graphs[other]), "file": graphs[one]["file"]}
    else:
        graphs[one]["file"] = graphs[other]["file"]
    return f"{one} is {other}"
