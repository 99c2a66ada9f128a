"""Small seeded models of the supported families, saved by transformers itself, and the same as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tfmx.tfm_model.checkpoint import CheckpointError
from tfmx.tfm_model.source import open_checkpoint

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TINY = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip


def tiny_model(family: str, **overrides: object) -> PreTrainedModel:
    """A model whose every parameter is random: norms and biases too, which transformers starts at 1 and 0."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**TINY, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if parameter.dim() == 1 else 0.0))
    return model.eval()


def save_tiny(folder: Path, family: str, *, shard: str = "5GB", **overrides: object) -> PreTrainedModel:
    model = tiny_model(family, **overrides)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(source: Path) -> str:
    """The line with which a source is refused."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(source))
    message = str(caught.value)
    assert message.isprintable(), "one line, and nothing that a terminal obeys"
    assert len(message) < 700
    return message


GGUF_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of a Hugging Face model."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{GGUF_PARTS['.'.join(part)]}.{kind}"


def permuted(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp's converter orders them for llama models."""
    return (
        rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    matrices: Type = Type.F32,
    metadata: dict[str, object] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    skip: tuple[str, ...] = (),
) -> None:
    """Write a model as llama.cpp's converter does; `metadata` overrides or (None) removes keys."""
    config = model.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    values = gguf_metadata(model, architecture) | (metadata or {})
    writer = gguf.GGUFWriter(path, str(values.pop("general.architecture", architecture)))  # a key of its own
    for key, value in values.items():
        _add(writer, key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if gguf_name(name) in skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        array = tensor.float().numpy()
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            array = permuted(array, heads[part])
        add_tensor(writer, gguf_name(name), np.ascontiguousarray(array), matrices)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array, raw_dtype=getattr(array, "type_", None))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_metadata(model: PreTrainedModel, architecture: str) -> dict[str, object]:
    config = model.config
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.head_dim,
    }
    return {f"{architecture}.{key}": value for key, value in own.items()}


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, matrices: Type) -> None:
    """Norms and biases stay F32, as in every file of llama.cpp."""
    if array.ndim == 1 or matrices == Type.F32:
        writer.add_tensor(name, array.astype(np.float32))
    elif matrices == Type.F16:
        writer.add_tensor(name, array.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, matrices), raw_dtype=matrices)


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
