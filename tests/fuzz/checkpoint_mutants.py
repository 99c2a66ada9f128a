"""Mutant number N of a seed among checkpoints: a changed file of one of the tiny checkpoints, and the export of it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random

from fuzz import file_mutants, folder_tricks
from fuzz.checkpoint_bases import Files
from fuzz.extremes import DEEP, extreme_float, extreme_int, extreme_json, json_text, shown, small_int
from fuzz.gguf_bytes import LIST, TEXT, GgufFile, Value, read_gguf
from fuzz.mutant import Mutant

# what follows `tfmx export SOURCE -o OUT --no-verify`, the first most often
_OPTIONS: tuple[tuple[str, ...], ...] = (
    *[()] * 6,
    ("--target", "portable"),
    ("--dtype", "fp16"),
    ("--quant", "int4", "--quant-block", "16", "--quant-round", "nearest"),
    ("--quant", "int8", "--quant-block", "16", "--quant-round", "search"),
    ("--max-context", "32"),
)
_CONFIGS = ("config.json", "config.json", "config.json", "generation_config.json", "tokenizer_config.json")


def kind_of(seed: int, index: int, bases: dict[str, Files]) -> str:
    return _draw(seed, index, bases)[0]


def make_mutant(seed: int, index: int, bases: dict[str, Files], place: Path) -> Mutant:
    """Write it to `place`, a folder that does not exist yet."""
    kind, base, rng = _draw(seed, index, bases)
    files = dict(bases[base])
    change = {
        "config": _config,
        "weights": _weights,
        "tokenizer": _tokenizer,
        "GGUF": _gguf,
        "folder": _nothing,
    }[kind]
    what = [change(rng, files)]
    place.mkdir()
    for name, data in files.items():
        (place / name).write_bytes(data)
    source = source_of(place)
    if kind == "folder":
        what = [folder_tricks.trick(rng, place)]
    out = place.with_name("exported")
    export = ("export", str(source), "-o", str(out), "--no-verify", *rng.choice(_OPTIONS))
    return Mutant(kind, base, "; ".join(what), (export,))


def source_of(folder: Path) -> Path:
    """What `tfmx export` is given."""
    return folder / "model.gguf" if (folder / "model.gguf").exists() else folder


def _draw(seed: int, index: int, bases: dict[str, Files]) -> tuple[str, str, Random]:
    rng = Random(f"checkpoint {seed}:{index}")
    base = rng.choice(list(bases))
    if rng.random() < 0.08:
        return "folder", base, rng
    if "model.gguf" in bases[base]:
        return "GGUF", base, rng
    return rng.choice(("config", "config", "weights", "tokenizer")), base, rng


def _nothing(rng: Random, files: Files) -> str:
    return "nothing"


# --- JSON ------------------------------------------------------------------------------------------------


def _config(rng: Random, files: Files) -> str:
    name = rng.choice([name for name in _CONFIGS if name in files])
    return f"{name}: {_changed_json(rng, files, name)}"


def _tokenizer(rng: Random, files: Files) -> str:
    name = rng.choice(
        [name for name in ("tokenizer.json", "tokenizer.json", "chat_template.jinja") if name in files]
    )
    if name == "chat_template.jinja":
        template = rng.choice(file_mutants.TEMPLATES)
        files[name] = template.encode("utf-8", "surrogatepass")
        return f"chat template {template[:60]!r}"
    return f"{name}: {_changed_json(rng, files, name)}"


def _changed_json(rng: Random, files: Files, name: str) -> str:
    change = file_mutants.damaged if rng.random() < 0.1 else file_mutants.changed_json
    files[name], what = change(rng, files[name])
    return what


# --- safetensors -----------------------------------------------------------------------------------------


def _weights(rng: Random, files: Files) -> str:
    names = [name for name in files if name.endswith((".safetensors", ".safetensors.index.json"))]
    name = rng.choice(names)
    if name.endswith(".json"):
        return f"{name}: {_changed_json(rng, files, name)}"
    way = rng.random()
    if way < 0.15:
        files[name], what = file_mutants.damaged(rng, files[name])
    elif way < 0.25:
        files[name], what = _longer_head(rng, files[name])
    else:
        files[name], what = _changed_head(rng, files[name])
    return f"{name}: {what}"


def _changed_head(rng: Random, data: bytes) -> tuple[bytes, str]:
    (size,) = struct.unpack_from("<Q", data)
    head, tensors = json.loads(data[8 : 8 + size]), data[8 + size :]
    name = rng.choice([name for name in head if name != "__metadata__"])
    entry = head[name]
    way = rng.choice(("dtype", "shape", "offsets", "delete", "rename", "field", "twice", "more", "values"))
    if way == "dtype":
        entry["dtype"] = rng.choice(
            ("F16", "BF16", "F64", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "x", "", None, 1)
        )
    elif way == "shape" and entry["shape"]:
        place = rng.randrange(len(entry["shape"]))
        entry["shape"] = rng.choice(
            (
                entry["shape"][::-1],
                [*entry["shape"], 1],
                [],
                [extreme_int(rng)],
                [0],
                DEEP,
                _put(entry["shape"], place, extreme_int(rng)),
            )
        )
    elif way == "offsets":
        start, end = entry["data_offsets"]
        entry["data_offsets"] = rng.choice(
            (
                [end, start],
                [start, end + 4],
                [start + 1, end + 1],
                [-4, end],
                [start],
                [0, 2**63],
                [0.5, end],
                None,
                [start, start],
            )
        )
    elif way == "delete":
        del head[name]
    elif way == "rename":
        head[rng.choice(("", "x", "model.norm.weight.1", name + "\0", "a" * 5000, "__metadata__"))] = (
            head.pop(name)
        )
    elif way == "field":
        entry[rng.choice(("x", "dtype", "shape", "data_offsets"))] = extreme_json(rng, [0, 1])
    elif way == "twice":
        head[f"{name}.again"] = dict(entry)
    elif way == "more":
        head["__metadata__"] = rng.choice(({"format": "tf"}, {"format": None}, [], "x", {"x": 1}, DEEP))
    else:
        start, end = (value if isinstance(value, int) else 0 for value in entry["data_offsets"])
        value = struct.pack("<f", extreme_float(rng))
        tensors = tensors[:start] + value * ((end - start) // 4) + tensors[end:]
    text = json_text(head).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + tensors, f"{name}: {way}"


def _put(values: list[int], place: int, value: int) -> list[int]:
    return [*values[:place], value, *values[place + 1 :]]


def _longer_head(rng: Random, data: bytes) -> tuple[bytes, str]:
    size = rng.choice((0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1, len(data)))
    return struct.pack("<Q", size) + data[8:], f"head of {size} bytes"


# --- GGUF ------------------------------------------------------------------------------------------------


def _gguf(rng: Random, files: Files) -> str:
    if rng.random() < 0.1:
        files["model.gguf"], what = file_mutants.damaged(rng, files["model.gguf"])
        return what
    file = read_gguf(files["model.gguf"])
    what = rng.choice(
        (_gguf_value, _gguf_value, _gguf_value, _gguf_value, _gguf_tensor, _gguf_tensor, _gguf_head)
    )(rng, file)
    files["model.gguf"] = file.to_bytes()
    return what


def _gguf_head(rng: Random, file: GgufFile) -> str:
    way = rng.choice(("version", "values", "tensors", "data"))
    if way == "version":
        file.version = rng.choice((0, 1, 2, 4, 2**24 * 3, 2**32 - 1))
    elif way == "data":
        file.data = file.data[: rng.randrange(len(file.data))]
    elif way == "values":
        file.more_values = rng.choice((1, -1, 2**20, 2**40, 2**63))
    else:
        file.more_tensors = rng.choice((1, -1, 2**20, 2**40, 2**63))
    return f"head: {way}"


def _gguf_value(rng: Random, file: GgufFile) -> str:
    value = rng.choice(file.values)
    way = rng.choice(("value", "value", "value", "kind", "delete", "twice", "key", "count", "other"))
    if way == "value":
        _change_value(rng, value)
    elif way == "kind":
        value.kind = rng.choice((*range(13), 13, 99))
    elif way == "delete":
        file.values.remove(value)
    elif way == "twice":
        file.values.append(value)
    elif way == "key":
        value.key = rng.choice((b"", b"\xff", b"x" * 100_000, b"general.architecture", value.key + b"\0"))
    elif way == "count":
        value.count = rng.choice((0, 1, 2**20, 2**40, 2**63))
    else:
        other = rng.choice(file.values)
        value.kind, value.items, value.value = other.kind, other.items, other.value
    return f"{value.key.decode('utf-8', 'replace')[:50]}: {way} {value.kind} {shown(value.value)[:60]}"


def _change_value(rng: Random, value: Value) -> None:
    now = value.value
    if isinstance(now, bool):
        value.value = not now
    elif isinstance(now, int):
        value.value = small_int(rng) if rng.random() < 0.5 else extreme_int(rng, now)
    elif isinstance(now, float):
        value.value = extreme_float(rng)
    elif isinstance(now, bytes):
        value.value = rng.choice((b"", b"\xff\xfe", b"x" * 1000, b"llama", b"qwen2", b"gpt2", b"bert", now + b"x",
                                  *(template.encode("utf-8", "replace") for template in file_mutants.TEMPLATES[:8])))  # fmt: skip
    elif isinstance(now, list) and now:
        place = rng.randrange(len(now))
        items = [*now]
        way = rng.choice(("item", "item", "short", "long", "empty", "same", "items"))
        if way == "item":
            items[place] = (
                rng.choice((b"", b"\xff", b"a b c", now[0]))
                if isinstance(now[0], bytes)
                else extreme_int(rng)
            )
        elif way == "same":
            items = [now[0]] * len(now)
        elif way == "items":
            value.items = rng.choice((TEXT, LIST, 4, 5, 6, 7, 99))
        else:
            items = {"short": now[:-1], "long": [*now, now[0]]}.get(way, [])
        value.value = items


def _gguf_tensor(rng: Random, file: GgufFile) -> str:
    entry = rng.choice(file.tensors)
    way = rng.choice(("dims", "dims", "kind", "offset", "name", "delete", "twice", "swap"))
    if way == "dims" and entry.dims:
        place = rng.randrange(len(entry.dims))
        entry.dims = rng.choice(
            (
                entry.dims[::-1],
                [*entry.dims, 1],
                [],
                [1] * 9,
                _put(entry.dims, place, small_int(rng)),
                _put(entry.dims, place, extreme_int(rng)),
            )
        )
    elif way == "kind":
        entry.kind = rng.choice((*range(31), 39, 99, 2**32 - 1))
    elif way == "offset":
        entry.offset = rng.choice((0, 1, entry.offset + 32, 2**20, 2**40, 2**63, 2**64 - 32))
    elif way == "name":
        entry.name = rng.choice(
            (
                b"",
                b"\xff",
                b"x",
                b"blk.99.attn_q.weight",
                b"blk.-1.attn_q.weight",
                b"rope_freqs.weight",
                b"output.weight",
            )
        )
    elif way == "delete":
        file.tensors.remove(entry)
    elif way == "twice":
        file.tensors.append(entry)
    else:
        other = rng.choice(file.tensors)
        entry.dims, other.dims = other.dims, entry.dims
    return f"{entry.name.decode('utf-8', 'replace')[:40]}: {way} {entry.dims} {entry.kind} {entry.offset}"
