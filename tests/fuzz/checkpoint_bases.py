"""The checkpoints that mutants are made from, tiny: Hugging Face folders, GGUF files and a folder of our own.

Written once, as the bundles are: transformers alone takes seconds to import.
"""

from __future__ import annotations

import json
from pathlib import Path

TOKENS = 264  # byte-level letters, special tokens, and a few that are not used
_SMALL = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
          "bos_token_id": 256, "eos_token_id": 257}  # fmt: skip

Files = dict[str, bytes]


def write_checkpoints(folder: Path) -> None:
    from gguf import GGMLQuantizationType as Type

    for name, family, shard in (
        ("llama", "llama", "5GB"),
        ("qwen3", "qwen3", "5GB"),
        ("shards", "llama", "20KB"),
    ):
        _write_huggingface(folder / name, family, shard)
    _write_gguf(folder / "gguf", Type.F32)
    _write_gguf(folder / "gguf, Q4_1", Type.Q4_1)
    _write_ours(folder / "tfmx folder")


def read_checkpoints(folder: Path) -> dict[str, Files]:
    return {
        place.name: {path.name: path.read_bytes() for path in sorted(place.iterdir())}
        for place in sorted(folder.iterdir())
    }


def _write_huggingface(folder: Path, family: str, shard: str) -> None:
    import tiny_bundle
    from tiny_checkpoints import save_tiny

    save_tiny(folder, family, shard=shard, **_SMALL)
    (folder / "tokenizer.json").write_text(tiny_bundle.tiny_tokenizer().to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(tiny_bundle.CHAT_TEMPLATE, encoding="utf-8")
    special = {
        "content": "</s>",
        "special": True,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    config = {
        "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": tiny_bundle.CHAT_TEMPLATE,
        "added_tokens_decoder": {"257": special}, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _write_gguf(folder: Path, matrices: int) -> None:
    import tiny_bundle
    from gguf import GGMLQuantizationType
    from tiny_checkpoints import tiny_model, write_gguf

    vocabulary = sorted(
        tiny_bundle.tiny_tokenizer().get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]
    )
    tokens = [token for token, _ in vocabulary]
    tokens += [f"<unused{index}>" for index in range(TOKENS - 1 - len(tokens))] + [
        "ab"
    ]  # what the one merge makes
    own = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": [1] * 256 + [3] * (TOKENS - 257) + [1], "merges": ["a b"],
        "bos_token_id": 256, "eos_token_id": 257, "add_bos_token": True, "chat_template": tiny_bundle.CHAT_TEMPLATE,
    }  # fmt: skip
    metadata = {
        f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": value for key, value in own.items()
    }
    folder.mkdir(parents=True)
    write_gguf(
        folder / "model.gguf",
        tiny_model("llama", **_SMALL),
        matrices=GGMLQuantizationType(matrices),
        metadata=metadata,
    )


def _write_ours(folder: Path) -> None:
    import tiny_bundle

    from tfmx.tfm_model.presets import preset_model
    from tfmx.tfm_model.tfmx_folder import save_model

    save_model(preset_model("pre-norm"), folder, tokenizer_json=tiny_bundle.tiny_tokenizer().to_str())
