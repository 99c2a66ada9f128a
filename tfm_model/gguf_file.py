"""Reads a GGUF file, the format of llama.cpp: config, tensors, tokenizer and chat template in one.

Its metadata is written as the `config.json` that the model had before it was converted, which other runtimes
want anyway, and that is parsed like any other: one way to a ModelConfig, one place where values are checked.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from pathlib import Path

from .checkpoint import Checkpoint, CheckpointError, LazyTensor
from .checks import ConfigError
from .config import ModelConfig
from .files import blamed_on, kind_of
from .generation_defaults import generation_defaults
from .gguf_header import GgufHeader, GgufTensor, read_header
from .gguf_rope import rope_values
from .gguf_tensors import lazy_tensor, unpermuted
from .gguf_tokenizer import token_ids, tokenizer_json
from .huggingface_config import parse_config
from .parameters import GGUF_NAMES, decoder_parameters
from .values import Values, number, shown, string, whole

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # mistral is called llama

_DIVISORS = "rope_freqs.weight"  # of the rotary frequencies, in Llama 3.1 and later
_PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")

# Metadata (after the architecture's name) that changes the forward pass, and the values with which it does not.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "use_parallel_residual": (False,),
}


def read_gguf(source: Path) -> Checkpoint:
    path = _regular_file(source)
    header = read_header(path)
    with blamed_on(source):
        raw = _as_huggingface(path, header)
        config = parse_config(raw)
        return Checkpoint(
            kind="gguf",
            files=(source.absolute(),),
            config=config,
            tensors=decoder_parameters(config, _stored(path, header, config), GGUF_NAMES),
            generation=generation_defaults(raw, config),
            tokenizer_json=tokenizer_json(header.metadata, str(source)),
            chat_template=_text_or_none(header.metadata, "tokenizer.chat_template"),
            huggingface_config=raw,
        )


def _regular_file(source: Path) -> Path:
    """Where the bytes are: the user may point at a link, as the hub's cache consists of them."""
    try:
        path = source.resolve(strict=True)
        mode = path.stat().st_mode
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{source} cannot be opened: {error}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{source} is a {kind_of(mode)}, wanted a GGUF file")
    return path


def _as_huggingface(path: Path, header: GgufHeader) -> dict[str, object]:
    """The config.json that this file's metadata amounts to."""
    metadata, tensors = header.metadata, header.tensors
    if metadata.get("split.count", 0) not in (0, 1):
        raise ConfigError("is one part of several; merge them with llama-gguf-split --merge")
    architecture = string(metadata, "general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ConfigError(f"architecture is {shown(architecture)}, supported are {', '.join(_ARCHITECTURES)}")
    own = {
        key.removeprefix(f"{architecture}."): metadata[key]
        for key in metadata
        if key.startswith(f"{architecture}.")
    }
    _refuse_unsupported(own)
    family = "mistral" if architecture == "llama" and own.get("attention.sliding_window") else architecture
    divisors = tensors.get(_DIVISORS)
    n_heads, width = _same_in_all_layers(own, "attention.head_count"), whole(own, "embedding_length")
    head_dim = whole(own, "attention.key_length", width // n_heads)
    if whole(own, "attention.value_length", width // n_heads) != head_dim:
        raise ConfigError("attention.key_length and attention.value_length differ, which is not supported")
    return {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": _vocab_size(own, header),
        "hidden_size": width,
        "intermediate_size": _same_in_all_layers(own, "feed_forward_length"),
        "num_hidden_layers": whole(own, "block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": _same_in_all_layers(own, "attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": whole(own, "context_length"),
        "rms_norm_eps": number(own, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        **rope_values(own, head_dim, None if divisors is None else lazy_tensor(path, divisors)),
        **_family_values(family, own, tensors),
        **token_ids(metadata),
    }


def _family_values(family: str, own: Values, tensors: Mapping[str, GgufTensor]) -> dict[str, object]:
    if family == "mistral":
        return {"sliding_window": whole(own, "attention.sliding_window")}
    if family == "qwen2":
        return {"use_sliding_window": False}
    bias: dict[str, object] = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    return bias | (
        {"mlp_bias": "blk.0.ffn_up.bias" in tensors} if family == "llama" else {"use_sliding_window": False}
    )


def _refuse_unsupported(own: Values) -> None:
    for key, accepted in _ONLY.items():
        if key in own and own[key] not in accepted:
            raise ConfigError(f"{key} is {shown(own[key])}, which is not supported")


def _same_in_all_layers(own: Values, key: str, missing: int | None = None) -> int:
    """A number that newer files may give for each layer."""
    value = own.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ConfigError(f"{key} is {shown(value)}, wanted the same in all layers")
        return whole({key: value[0]}, key)
    return whole(own, key, missing)


def _vocab_size(own: Values, header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("tensor token_embd.weight is missing")
    rows = embedding.shape[0]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if whole(own, "vocab_size", rows) != rows or (isinstance(tokens, list) and len(tokens) > rows):
        raise ConfigError(f"tensor token_embd.weight has {rows} rows, fewer or more than the vocabulary")
    return rows


def _stored(path: Path, header: GgufHeader, config: ModelConfig) -> dict[str, LazyTensor]:
    stored = {name: lazy_tensor(path, tensor) for name, tensor in header.tensors.items() if name != _DIVISORS}
    if header.metadata["general.architecture"] == "llama":
        heads = {"q": config.attention.n_heads, "k": config.attention.n_kv_heads}
        for name, tensor in stored.items():
            if match := _PERMUTED.fullmatch(name):
                stored[name] = unpermuted(tensor, heads[match[1]])
    return stored


def _text_or_none(metadata: Values, key: str) -> str | None:
    return None if metadata.get(key) is None else string(metadata, key)
