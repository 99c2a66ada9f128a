"""Reads a Hugging Face folder: config.json, safetensors, tokenizer, generation defaults, chat template.

Nothing but data is read: no pickle, no code, no file outside of the folder, nothing from the network.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .checkpoint import Checkpoint, CheckpointError, GenerationDefaults, LazyTensor
from .config import ModelConfig
from .files import Folder, blamed_on
from .generation_defaults import generation_defaults
from .huggingface_config import DEFAULTS, family_of
from .huggingface_files import INDEX, find_weights, read_config
from .parameters import HUGGINGFACE_NAMES, decoder_parameters
from .safetensors_file import lazy_tensors
from .tokenizer_json import check_tokenizer
from .values import Values, shown

# Frequencies that early releases of transformers stored although they follow from the config.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def read_huggingface(path: Path) -> Checkpoint:
    folder = Folder(path)
    raw, config = read_config(folder)
    stored = _stored_tensors(folder)
    if config.head.tied:
        _drop_copied_head(stored)
    return Checkpoint(
        kind="huggingface",
        config=config,
        tensors=decoder_parameters(config, stored, HUGGINGFACE_NAMES),
        generation=_generation(folder, raw, config),
        tokenizer_json=_tokenizer(folder),
        chat_template=_chat_template(folder),
        huggingface_config=raw,
        files=tuple(folder.used),  # evaluated last, when it has seen them all
    )


def _stored_tensors(folder: Folder) -> dict[str, LazyTensor]:
    whole = find_weights(folder)
    if whole is not None:
        return lazy_tensors(whole, skip=_is_derived)
    index = folder.json(INDEX)
    assert index is not None, "find_weights has seen it"
    return _sharded_tensors(folder, index)


def _sharded_tensors(folder: Folder, index: Values) -> dict[str, LazyTensor]:
    """The tensors of all shards; the index and the shards must say the same."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{folder.path / INDEX} has no weight_map from tensor to file")
    shards: dict[str, dict[str, LazyTensor]] = {}
    for name in dict.fromkeys(weight_map.values()):
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder.path / INDEX} refers to {shown(name)}, wanted a .safetensors file"
            )
        path = folder.find(name)
        if path is None:
            raise CheckpointError(
                f"{folder.path / INDEX} refers to {shown(name)}, which is not in the folder"
            )
        shards[name] = lazy_tensors(path, skip=_is_derived)
    for tensor, name in weight_map.items():
        if tensor not in shards[name] and not _is_derived(tensor):
            raise CheckpointError(
                f"{folder.path / INDEX} says that {name} holds {shown(tensor)}, but it does not"
            )
    for name, tensors in shards.items():
        for tensor in tensors:
            if weight_map.get(tensor) != name:
                raise CheckpointError(
                    f"{folder.path / name} holds {shown(tensor)}, which {INDEX} does not say"
                )
    return {tensor: shards[name][tensor] for tensor, name in weight_map.items() if not _is_derived(tensor)}


def _is_derived(name: str) -> bool:
    return _DERIVED.fullmatch(name) is not None


def _drop_copied_head(stored: dict[str, LazyTensor]) -> None:
    """A head stored although it is tied must be the embedding.

    Where the two differ, transformers 4 takes the embedding for both and transformers 5 keeps them apart:
    nobody can say which model was meant.
    """
    head = stored.pop("lm_head.weight", None)
    embedding = stored.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return
    if head.shape != embedding.shape or not torch.equal(head.read(), embedding.read()):
        raise CheckpointError(
            "lm_head.weight is not model.embed_tokens.weight, but config.json says that they are tied; "
            "remove the tensor or set tie_word_embeddings to false"
        )


def _generation(folder: Folder, raw: Values, config: ModelConfig) -> GenerationDefaults:
    name = "generation_config.json"
    given = folder.json(name) or {}
    values = {**DEFAULTS[family_of(raw)], **raw}
    ids = {key: values[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with blamed_on(folder.path / (name if given else "config.json")):
        return generation_defaults(
            {**ids, **{key: value for key, value in given.items() if value is not None}}, config
        )


def _tokenizer(folder: Folder) -> str | None:
    text = folder.text("tokenizer.json")
    if text is not None:
        check_tokenizer(text, str(folder.path / "tokenizer.json"))
    return text


def _chat_template(folder: Folder) -> str | None:
    """The file of its own wins, as in transformers; of several templates the one named default is meant."""
    text = folder.text("chat_template.jinja")
    if text is not None:
        return text
    template = (folder.json("tokenizer_config.json") or {}).get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder.path / 'tokenizer_config.json'}: chat_template is {shown(template)}, wanted a text"
        )
    return template
