"""Writes the model that every engine is given, as a Hugging Face folder in float32.

    python benchmarks/peers/sources.py S|M|smollm2 FOLDER

S and M are random weights of a published shape: speed does not depend on the values, and no hub is needed. All three
have the tokenizer of SmolLM2, since some converters want one; token ids are what is measured with. Runs as a process of
its own, so that torch is not in the one that measures.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SEED = 20261116
# What the published config.json of SmolLM2-135M and Qwen2.5-0.5B say, but for M's context: 32,768 there.
SHAPES: dict[str, dict[str, Any]] = {
    "S": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5,
    },
    "M": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 8192, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
SHARED = {
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def write_source(name: str, folder: Path) -> None:
    checkpoint = _smollm2()
    if name == "smollm2":
        config = dict(checkpoint.huggingface_config)
        config["eos_token_id"] = config["eos_token_id"][0]  # a list is more than some converters take
        _write_model(folder, config, _huggingface_tensors(checkpoint))
    else:
        _write_model(folder, SHAPES[name] | SHARED, None)
    _write_tokenizer(folder, checkpoint)


def _smollm2() -> Any:
    """SmolLM2 as tfmx reads it: a checkpoint whose tensors are dequantised when they are read."""
    from tfmx.tfm_model.source import open_checkpoint

    spec = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "examples" / "fetch_smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return open_checkpoint(str(module.fetch()))


def _huggingface_tensors(checkpoint: Any) -> dict[str, Any]:
    """By the names of `LlamaForCausalLM`: the joined matrices are taken apart again."""
    mixer, mlp = checkpoint.config.mixer, checkpoint.config.mlp
    rows = [heads * mixer.head_dim for heads in (mixer.n_heads, mixer.n_kv_heads, mixer.n_kv_heads)]
    parts = {  # of ours: (theirs, rows of each)
        "attention_norm": (["input_layernorm"], None),
        "attention.qkv": (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], rows),
        "attention.out": (["self_attn.o_proj"], None),
        "mlp_norm": (["post_attention_layernorm"], None),
        "mlp.up": (["mlp.gate_proj", "mlp.up_proj"], [mlp.hidden, mlp.hidden]),
        "mlp.down": (["mlp.down_proj"], None),
    }
    tensors = {}
    for name, lazy in checkpoint.tensors.items():
        part = name.removesuffix(".weight")
        if not part.startswith("blocks."):
            tensors[{"embed": "model.embed_tokens", "norm": "model.norm"}[part] + ".weight"] = lazy.read()
            continue
        _, layer, part = part.split(".", 2)
        theirs, sizes = parts[part]
        values = lazy.read()
        pieces = [values] if sizes is None else values.split(sizes)
        for their, piece in zip(theirs, pieces, strict=True):
            tensors[f"model.layers.{layer}.{their}.weight"] = piece.contiguous()
    return tensors


def _write_model(folder: Path, values: Mapping[str, Any], tensors: Mapping[str, Any] | None) -> None:
    """With these tensors, or random ones."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = values["model_type"]
    config = AutoConfig.for_model(
        kind, **{key: value for key, value in values.items() if key != "model_type"}
    )
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if tensors is None:
        _fill_biases(model)
    else:
        missing, unexpected = model.load_state_dict(dict(tensors), strict=False)
        assert set(missing) <= {"lm_head.weight"}, missing  # it is tied
        assert not unexpected, unexpected
    model.save_pretrained(folder)
    file = (
        folder / "config.json"
    )  # transformers 4 looks for the base of the rotation here, and one peer has it
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "rope_theta": values["rope_theta"]}, indent=2)
    )


def _fill_biases(model: Any) -> None:
    """Zeros, as transformers starts with, could be left out by a clever converter."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.02)


def _write_tokenizer(folder: Path, checkpoint: Any) -> None:
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer_json, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
        "chat_template": checkpoint.chat_template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    write_source(sys.argv[1], Path(sys.argv[2]))
