"""Other contents for a bundle's files, signed again; JSON and templates also for checkpoints."""

from __future__ import annotations

import io
import json
import struct
from random import Random
from typing import Any

import numpy as np
from fuzz.draft import Draft
from fuzz.extremes import extreme_array, extreme_json, json_text, shown, small_int

# Templates that go wrong in every way that Jinja knows.
TEMPLATES = (
    "", "{{", "{% for m in messages %}", "{{ messages[99].content }}", "{{ messages.x.y }}", "{% raw %}",
    "{% for i in range(10**9) %}{{ i }}{% endfor %}", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**9 }}", "{{ ''.__class__.__mro__ }}", "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('no\\nline') }}", "{% include 'x' %}", "{{ 10**10**10 }}",
    "{{ messages | tojson }}", "\ud800", "{{ strftime_now('%Y') }}", "{{ messages|sort(attribute='x') }}", "a" * 100_000, "{{ '%s' % () }}",
    "{{ bos_token * 100000 }}", "{% if x is y %}{% endif %}", "{{ messages[0]['content'] }}", "{# ", "{{ 1/0 }}", "\0", "{{ [[]]*999999999 }}",
    "{{ '%0999999999d' % 1 }}", "{{ 'x'.center(999999999) }}", "{{ cycler }}{{ lipsum(n=10000) }}", "(" * 500 + "{{" + "(" * 500 + ")" * 500 + "}}",
)  # fmt: skip


def change_content(rng: Random, draft: Draft) -> None:
    """One of the files gets other bytes; which, decides how."""
    names = sorted({*draft.files} & {"tokenizer.json", "chat_template.jinja", "golden.npz", "weights.bin"})
    name = rng.choice((*names, *([n for n in names if n == "tokenizer.json"] * 2), "a graph"))
    if name == "a graph":
        change_graph_bytes(rng, draft)
    elif name == "tokenizer.json":
        change = damaged if rng.random() < 0.2 else changed_json
        draft.files[name], what = change(rng, draft.files[name])
        draft.what.append(f"tokenizer: {what}")
    elif name == "chat_template.jinja":
        template = rng.choice(TEMPLATES)
        draft.files[name] = template.encode("utf-8", "surrogatepass")
        draft.what.append(f"chat template {template[:60]!r}")
    elif name == "golden.npz":
        draft.files[name] = _golden(rng, draft)
    else:
        draft.files[name] = _weights(rng, draft)


def change_graph_bytes(rng: Random, draft: Draft) -> None:
    """Bytes of the graph itself: kept as a file beside the others, so that it is written as it is."""
    role = draft.role(rng)
    data = draft.graphs.pop(role).SerializeToString(deterministic=True)
    draft.files[draft.manifest["graphs"][role]["file"]], what = damaged(rng, data)
    draft.what.append(f"{role}: {what}")


def damaged(rng: Random, given: bytes) -> tuple[bytes, str]:
    """Other bytes, and what was done to them."""
    data = bytearray(given or b"x")
    way = rng.choice(("flip", "flip", "cut", "empty", "insert", "again"))
    if way == "flip":
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif way == "insert":
        place = rng.randrange(len(data))
        data[place:place] = rng.randbytes(rng.choice((1, 8, 1000)))
    elif way == "again":
        data += bytes(data)
    else:
        del data[0 if way == "empty" else rng.randrange(len(data)) :]
    return bytes(data), f"bytes: {way}"


def changed_json(rng: Random, data: bytes) -> tuple[bytes, str]:
    """A field or a few, anywhere in it."""
    content, what = json.loads(data), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path, holder, key = _field(rng, content)
        if rng.random() < 0.15:
            del holder[key]
            what.append(f"{path} deleted")
        else:
            holder[key] = _text_too(rng, holder[key])
            what.append(f"{path} = {shown(holder[key])}")
    return json_text(content).encode("utf-8", "surrogatepass"), ", ".join(what)


def _text_too(rng: Random, now: Any) -> Any:
    """A chat template stands in JSON as well."""
    is_long = isinstance(now, str) and len(now) > 60
    return rng.choice((*TEMPLATES, extreme_json(rng, now))) if is_long else extreme_json(rng, now)


def _field(rng: Random, value: Any) -> tuple[str, Any, Any]:
    """A field at a random depth; going down step by step, so that a vocabulary does not drown the rest."""
    path = ""
    while True:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        path += f".{key}"
        if not isinstance(value[key], dict | list) or not value[key] or rng.random() < 0.3:
            return path, value, key
        value = value[key]


def _golden(rng: Random, draft: Draft) -> bytes:
    if rng.random() < 0.2:
        data, what = damaged(rng, draft.files["golden.npz"])
        draft.what.append(f"golden: {what}")
        return data
    with np.load(io.BytesIO(draft.files["golden.npz"])) as file:
        arrays = dict(file)
    name = rng.choice(list(arrays))
    array = arrays[name]
    way = rng.choice(("values", "values", "shape", "dtype", "delete", "name", "empty", "objects"))
    if way == "values":
        arrays[name] = extreme_array(rng, array)
    elif way == "shape":
        shape = list(array.shape) or [1]
        shape[rng.randrange(len(shape))] = max(small_int(rng), 0)
        arrays[name] = np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
    elif way == "dtype":
        with np.errstate(all="ignore"):
            arrays[name] = array.astype(
                rng.choice((np.float16, np.int8, np.bool_, np.complex64, "S5", "U5", np.uint64, "M8[s]"))
            )
    elif way == "delete":
        del arrays[name]
    elif way == "name":
        arrays[rng.choice(("x", "", "case.x", "other.budget", "case.spread", ".", "a/b"))] = arrays.pop(name)
    elif way == "empty":
        arrays[name] = np.zeros((0, *array.shape[1:]), array.dtype)
    else:
        arrays[name] = np.asarray([{}, None], object)
    draft.what.append(f"golden {name}: {way}")
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _weights(rng: Random, draft: Draft) -> bytes:
    data = bytearray(draft.files["weights.bin"])
    way = rng.choice(("cut", "longer", "nan", "noise", "empty"))
    if way == "cut":
        del data[rng.randrange(len(data)) :]
    elif way == "longer":
        data += bytes(rng.choice((1, 4096)))
    elif way == "empty":
        data.clear()
    else:
        for _ in range(rng.choice((1, 10, 100))):
            place = rng.randrange(0, max(len(data) - 4, 1), 4)
            data[place : place + 4] = struct.pack("<f", float("nan")) if way == "nan" else rng.randbytes(4)
    draft.what.append(f"weights: {way}")
    return bytes(data)
