"""Checkpoints that are broken or lie: refused with one line, nothing executed, nothing outside read, no hang."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FAMILIES, change_config, refused, save_tiny

from tfmx.tfm_model.checkpoint import CheckpointError
from tfmx.tfm_model.files import TEXT_LIMIT
from tfmx.tfm_model.huggingface import read_huggingface
from tfmx.tfm_model.source import open_checkpoint

pytestmark = pytest.mark.timeout(60)  # a hang is what some of these files are made for


@pytest.fixture
def folder(tmp_path) -> Path:
    save_tiny(tmp_path / "model", "llama")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path) -> Path:
    save_tiny(tmp_path / "sharded", "llama", shard="50KB")
    return tmp_path / "sharded"


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_not_opened(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(folder / "ran")))
    for source in (folder, folder / name):
        assert f"{name} is a pickle" in refused(source)
        assert "convert it to safetensors" in refused(source)
    assert not (folder / "ran").exists()


def test_a_pickle_beside_safetensors_is_left_alone(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "ran")))
    checkpoint = read_huggingface(folder)
    assert "pytorch_model.bin" not in {path.name for path in checkpoint.files}
    assert not (folder / "ran").exists()


def test_a_pickle_named_safetensors_is_no_safetensors(folder):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(folder / "ran")))
    assert "model.safetensors is not a whole safetensors file" in refused(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\0.safetensors", "..\\x.safetensors"]
)  # fmt: skip
def test_shards_are_bare_names(sharded, name):
    load = load_file(next(sharded.glob("*.safetensors")))
    save_file(load, sharded.parent / "outside.safetensors")
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    message = refused(sharded)
    assert "wanted a bare file name" in message or "wanted a .safetensors file" in message


@pytest.mark.parametrize("weight_map", [None, [], "x", {"a": 1}, {"a": None}])
def test_an_index_without_a_map_is_refused(sharded, weight_map):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "has no weight_map" in refused(sharded)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"]
)
def test_links_are_refused(folder, tmp_path, name):
    target = tmp_path / "elsewhere"
    if (folder / name).exists():
        (folder / name).rename(target)
    else:
        target.write_text("{}")
    (folder / name).symlink_to(target)
    assert f"{name} is a link to {target}, outside of a hub cache" in refused(folder)


def test_a_link_to_itself_is_refused(folder):
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    assert "tokenizer.json cannot be opened" in refused(folder)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_only_regular_files_are_opened(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert f"{name} is a FIFO, wanted a regular file" in refused(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"{name} is a folder, wanted a regular file" in refused(folder)


def test_a_fifo_as_shard_or_source_does_not_hang(sharded, tmp_path):
    shard = next(sharded.glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    assert "is a FIFO, wanted a regular file" in refused(sharded)
    os.mkfifo(tmp_path / "model.gguf")
    assert "is a FIFO, wanted a Hugging Face folder or a .gguf file" in refused(tmp_path / "model.gguf")
    assert "is a device, wanted" in refused(Path("/dev/zero"))


def hub_cache(root: Path, folder: Path) -> Path:
    """The folder as the hub's client stores it: links to blobs that are named by their hash."""
    snapshot, blobs = root / "models--a--b" / "snapshots" / "0123abcd", root / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"blob{number}")
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / f"blob{number}")
    return snapshot


def test_the_links_of_a_hub_cache_are_followed(tmp_path, folder):
    expected = {name: tensor.read() for name, tensor in read_huggingface(folder).tensors.items()}
    checkpoint = read_huggingface(hub_cache(tmp_path / "hub", folder))
    assert all((tensor.read() == expected[name]).all() for name, tensor in checkpoint.tensors.items())
    assert {path.name for path in checkpoint.files} >= {"config.json", "model.safetensors"}


def test_a_folder_that_only_looks_like_a_hub_cache_is_none(tmp_path, folder):
    snapshot = hub_cache(tmp_path / "hub", folder)
    snapshot.parent.rename(snapshot.parent.with_name("versions"))
    assert "outside of a hub cache" in refused(snapshot.parent.with_name("versions") / snapshot.name)


@pytest.mark.parametrize(
    "target", ["outside", "other model", "other name", "missing", "blob is a link", "blobs is a link"]
)
def test_other_links_in_a_hub_cache_are_refused(tmp_path, folder, target):
    snapshot = hub_cache(tmp_path / "hub", folder)
    root = snapshot.parent.parent
    (tmp_path / "outside").mkdir()
    blob = (snapshot / "config.json").resolve()
    if target == "blobs is a link":
        (root / "blobs").rename(tmp_path / "outside" / "blobs")
        (root / "blobs").symlink_to(tmp_path / "outside" / "blobs")
    elif target == "blob is a link":
        blob.rename(tmp_path / "outside" / "config.json")
        blob.symlink_to(tmp_path / "outside" / "config.json")
    else:
        places = {
            "outside": tmp_path / "outside" / "config.json",
            "other model": root.parent / "models--c--d" / "blobs" / "x",
            "other name": root / "refs" / "x",
            "missing": root / "blobs" / "missing",
        }
        place = places[target]
        if target != "missing":
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(blob.read_bytes())
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(place)
    message = refused(snapshot)
    assert ("has no config.json" if target == "missing" else "outside of a hub cache") in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "config.json is not JSON"),
        (b"{", "config.json is not JSON"),
        (b"[1]", "config.json holds a list, wanted a JSON object"),
        (b"null", "config.json holds a NoneType"),
        (b"\xff\xfe{}", "config.json is not UTF-8 text (byte 0)"),
        (b"[" * 100_000, "config.json is not JSON that can be read: nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "config.json is not JSON"),
        (b'{"model_type": "\\u001b[31m\\nllama"}', "has model_type '\\x1b[31m\\nllama'"),
        (b'{"model_type": "' + b"x" * 10**6 + b'"}', "has model_type 'xxx"),
        (b'{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps is nan"),
        (b'{"model_type": "llama", "rope_theta": 0}', "rope_theta is 0"),
        (b'{"model_type": "llama", "num_hidden_layers": 1000000000}', "num_hidden_layers is 1000000000"),
        (b'{"model_type": "mistral", "num_hidden_layers": 1000000000}', "num_hidden_layers is 1000000000"),
        (b'{"model_type": "llama", "num_key_value_heads": 5}', "must be a multiple of n_kv_heads (5)"),
    ],
)  # fmt: skip
def test_a_config_that_is_broken_or_absurd_is_refused(folder, text, words):
    (folder / "config.json").write_bytes(text)
    message = refused(folder)
    assert words in message
    assert "config.json" in message


WRONG = [
    None, True, 0, -1, 3, 0.5, 1e308, float("nan"), 10**400, 2**63, "", "x", "yarn", [], [None], [[]], {}, {"a": 1},
    ["sliding_attention"] * 3, {"rope_type": "llama3"}, {"type": "dynamic", "factor": 2}, [{"name": [], "template": 3}],
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_anywhere_is_refused_or_read(tmp_path, family):
    """Every key of every JSON file with every kind of value: nothing but a CheckpointError comes of it."""
    save_tiny(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"rope_scaling": None, "sliding_window": None, "layer_types": None, "quantization_config": None}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    cases = [("config.json", config | {key: value}) for key in config for value in WRONG]
    cases += [
        ("config.json", config | {"rope_parameters": rope | {key: value}}) for key in rope for value in WRONG
    ]
    for key in (
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "temperature",
        "top_k",
        "do_sample",
        "repetition_penalty",
    ):
        cases += [("generation_config.json", {"do_sample": True, key: value}) for value in WRONG]
    cases += [("tokenizer_config.json", {"chat_template": value}) for value in WRONG]
    messages = []
    for name, content in cases:
        (tmp_path / name).write_text(json.dumps(content))
        try:
            open_checkpoint(str(tmp_path))
        except CheckpointError as error:
            messages.append(str(error))
        (tmp_path / name).write_text(json.dumps(config if name == "config.json" else {}))
    assert len(messages) > len(cases) / 4
    assert all(message.isprintable() and len(message) < 700 for message in messages)


def test_a_text_that_is_too_large_is_not_read(folder):
    with (folder / "config.json").open("r+b") as file:
        file.truncate(TEXT_LIMIT + 1)  # sparse: no space is used
    assert "more than the 67108864 that are read" in refused(folder)


@pytest.mark.parametrize("size", [0, 4, 8, 100, 5000, -1])
def test_safetensors_that_are_cut_short_are_refused(folder, size):
    path = folder / "model.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    assert "model.safetensors is not a whole safetensors file" in refused(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 8]}}).encode(),
        json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 256]}}).encode(),
        json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [2**63, 2**63 + 256]}}).encode(),
        json.dumps({"model.norm.weight": {"dtype": "Q9", "shape": [64], "data_offsets": [0, 256]}}).encode(),
    ],
)  # fmt: skip
def test_safetensors_that_lie_are_refused(folder, header):
    content = len(header).to_bytes(8, "little") + header + bytes(256)
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors is not a whole safetensors file" in refused(folder)


def test_weights_that_change_after_opening_are_noticed(folder):
    checkpoint = read_huggingface(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        checkpoint.tensors["norm.weight"].read()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        checkpoint.tensors["norm.weight"].read()


def test_names_in_the_weights_cannot_write_to_the_terminal(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["\x1b]0;owned\x07\n" + "x" * 5000] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert "has no place in this model" in refused(folder)


def test_a_folder_without_anything_useful_says_what_it_lacks(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refused(folder)
    change_config(folder, model_type="bert")
    assert "has model_type 'bert', supported are llama, mistral, qwen2, qwen3" in refused(folder)


def test_files_of_other_kinds_are_refused_by_what_to_give_instead(tmp_path, folder):
    assert "give the folder that holds it" in refused(folder / "model.safetensors")
    (tmp_path / "model.onnx").write_bytes(b"x")
    assert "is no GGUF file; give a Hugging Face folder or a .gguf file" in refused(tmp_path / "model.onnx")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a.gguf").touch()
    assert "is a folder of GGUF files; give one of them" in refused(tmp_path / "ggufs")
    assert "a.gguf" in refused(tmp_path / "ggufs" / "a.gguf")
