"""The small files of a bundle that the runtime and other runtimes look for."""

from __future__ import annotations

import json

from ..tfm_model.checkpoint import Checkpoint


def downstream_texts(checkpoint: Checkpoint) -> dict[str, str]:
    """By name."""
    texts: dict[str, str] = {}
    if checkpoint.tokenizer_json is not None:
        texts["tokenizer.json"] = checkpoint.tokenizer_json
    if checkpoint.chat_template is not None:
        texts["chat_template.jinja"] = checkpoint.chat_template
    if checkpoint.huggingface_config is not None:
        texts["config.json"] = _json(checkpoint.huggingface_config)
    if checkpoint.config.kind == "encoder":
        return texts
    generation = checkpoint.generation
    defaults: dict[str, object] = {
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": list(generation.eos_token_ids) or None,
        "pad_token_id": generation.pad_token_id,
        "decoder_start_token_id": generation.decoder_start_token_id,
        **generation.sampling,
    }
    texts["generation_config.json"] = _json(
        {key: value for key, value in defaults.items() if value is not None}
    )
    return texts


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
