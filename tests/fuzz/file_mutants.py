"""Changes of a bundle's other files, signed again, and tricks with the folder itself, which no sum can cover."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fuzz.draft import Draft
from fuzz.extremes import extreme_array, extreme_json, json_text, shown, small_int

# Templates that go wrong in every way that Jinja knows.
_TEMPLATES = (
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
        draft.files[name] = _tokenizer(rng, draft)
    elif name == "chat_template.jinja":
        template = rng.choice(_TEMPLATES)
        draft.files[name] = template.encode("utf-8", "surrogatepass")
        draft.what.append(f"chat template {template[:60]!r}")
    elif name == "golden.npz":
        draft.files[name] = _golden(rng, draft)
    else:
        draft.files[name] = _weights(rng, draft)


def change_graph_bytes(rng: Random, draft: Draft) -> None:
    """Bytes of the graph itself: kept as a file beside the others, so that it is written as it is."""
    role = draft.role(rng)
    data = bytearray(draft.graphs.pop(role).SerializeToString(deterministic=True))
    draft.files[draft.manifest["graphs"][role]["file"]] = _damaged(rng, draft, data)
    draft.what[-1] = f"{role}: {draft.what[-1]}"


def _damaged(rng: Random, draft: Draft, data: bytearray) -> bytes:
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
    draft.what.append(f"bytes: {way}")
    return bytes(data)


def _tokenizer(rng: Random, draft: Draft) -> bytes:
    data = draft.files["tokenizer.json"]
    if rng.random() < 0.2:
        return _damaged(rng, draft, bytearray(data))
    content = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        path, holder, key = _field(rng, content)
        if rng.random() < 0.2:
            del holder[key]
            draft.what.append(f"tokenizer: {path} deleted")
        else:
            holder[key] = extreme_json(rng, holder[key])
            draft.what.append(f"tokenizer: {path} = {shown(holder[key])}")
    return json_text(content).encode()


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
        return _damaged(rng, draft, bytearray(draft.files["golden.npz"]))
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
        arrays[rng.choice(("x", "", "case.x", "other.budget", ".", "a/b"))] = arrays.pop(name)
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


# --- tricks with the folder ------------------------------------------------------------------------------


def trick(rng: Random, draft: Draft, folder: Path) -> None:
    """After the bundle was written: the folder is no longer what the manifest says."""
    names = sorted(path.name for path in folder.iterdir())
    way = rng.choice(_TRICKS)
    draft.what.append(f"folder: {way(rng, folder, folder / rng.choice(names))}")


def _missing(rng: Random, folder: Path, path: Path) -> str:
    path.unlink()
    return f"{path.name} is missing"


def _cut(rng: Random, folder: Path, path: Path) -> str:
    os.truncate(path, rng.choice((0, 1, path.stat().st_size // 2, max(path.stat().st_size - 1, 0))))
    return f"{path.name} cut to {path.stat().st_size} bytes"


def _sparse(rng: Random, folder: Path, path: Path) -> str:
    os.truncate(path, rng.choice((1 << 20, 1 << 31, 1 << 40)))
    return f"{path.name} made sparse, {path.stat().st_size} bytes"


def _pipe(rng: Random, folder: Path, path: Path) -> str:
    path.unlink()
    os.mkfifo(path)
    return f"{path.name} is a pipe"


def _directory(rng: Random, folder: Path, path: Path) -> str:
    path.unlink()
    path.mkdir()
    return f"{path.name} is a folder"


def _link(rng: Random, folder: Path, path: Path) -> str:
    target = rng.choice(("/etc/passwd", "/dev/zero", "/dev/full", "nothing", path.name, "inside", "outside"))
    if target in {"inside", "outside"}:
        place = (folder if target == "inside" else folder.parent) / f"moved-{path.name}"
        path.rename(place)
        target = str(place)
    else:
        path.unlink()
    path.symlink_to(target)
    return f"{path.name} is a link to {Path(target).name}"


def _hard_link(rng: Random, folder: Path, path: Path) -> str:
    other = rng.choice(sorted(folder.iterdir()))
    if other != path:
        path.unlink()
        path.hardlink_to(other)
    return f"{path.name} is a hard link to {other.name}"


def _more(rng: Random, folder: Path, path: Path) -> str:
    name = rng.choice(
        ("more", ".hidden", "pytorch_model.bin", "a" * 200, "\n", "é", "manifest.json.bak", "weights.bin ")
    )
    (folder / name).write_bytes(b"x")
    return f"{name!r} is there too"


def _swapped(rng: Random, folder: Path, path: Path) -> str:
    other = rng.choice(sorted(folder.iterdir()))
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)
    return f"{path.name} and {other.name} swapped"


def _unreadable_name(rng: Random, folder: Path, path: Path) -> str:
    path.rename(folder / os.fsdecode(b"\xff\xfe"))
    return f"{path.name} renamed to bytes that are no text"


def _flipped(rng: Random, folder: Path, path: Path) -> str:
    data = bytearray(path.read_bytes() or b"x")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"{path.name}: a bit flipped"


def _garbage(rng: Random, folder: Path, path: Path) -> str:
    path.write_bytes(
        rng.choice(
            (b"null", b"[]", b"{}", b"\xff" * 100, b"[" * 100_000, b"\xef\xbb\xbf{}", b'{"format": 3}')
        )
    )
    return f"{path.name}: other bytes"


_TRICKS: tuple[Callable[[Random, Path, Path], str], ...] = (
    _missing, _cut, _sparse, _pipe, _directory, _link, _link, _hard_link, _more, _swapped, _unreadable_name, _flipped, _garbage,
)  # fmt: skip


def huge_sizes(rng: Random, draft: Draft, folder: Path) -> None:
    """A file as large as the manifest says, and nearly all of it a hole."""
    name = rng.choice(sorted(draft.manifest["files"]))
    size = rng.choice((1 << 22, 1 << 28, 1 << 31, 1 << 40))
    os.truncate(folder / name, size)
    draft.manifest["files"][name]["size"] = size
    draft.what.append(f"folder: {name} is sparse, {size} bytes, as the manifest says")
