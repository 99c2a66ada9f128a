"""A model of the built-in family as a folder: config.json, model.safetensors, and what generation needs.

`save_model` is for after training; `tfmx export FOLDER -o OUT` reads it back.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from ..strict_json import encode
from .checkpoint import Checkpoint, CheckpointError, CheckpointKind, GenerationDefaults, LazyTensor
from .config import ModelConfig
from .files import Folder, blamed_on
from .safetensors_file import lazy_tensors
from .tfmx_config import MODEL_TYPE, decoded, parse_tfmx_config
from .transformer import Transformer

_CONFIG, _WEIGHTS, _TOKENIZER, _GENERATION = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "generation_config.json",
)


def save_model(
    model: Transformer,
    folder: Path,
    *,
    tokenizer_json: str | None = None,
    generation: GenerationDefaults | None = None,
) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in stored_weights(model).items()},
        folder / _WEIGHTS,
    )
    if tokenizer_json is not None:
        (folder / _TOKENIZER).write_text(tokenizer_json, encoding="utf-8")
    (folder / _GENERATION).write_text(_json(encode(generation or GenerationDefaults())))
    (folder / _CONFIG).write_text(_json({"model_type": MODEL_TYPE, **encode(model.config)}))


def read_tfmx_folder(path: Path) -> Checkpoint:
    folder = Folder(path)
    raw = folder.json(_CONFIG)
    assert raw is not None, "source.py has read it"
    with blamed_on(folder.path / _CONFIG):
        config = parse_tfmx_config(raw)
    with blamed_on(folder.path / _GENERATION):
        generation = decoded(GenerationDefaults, folder.json(_GENERATION) or encode(GenerationDefaults()))
    weights = folder.find(_WEIGHTS)
    if weights is None:
        raise CheckpointError(f"{folder.path} has no {_WEIGHTS} beside its {_CONFIG}")
    tensors = lazy_tensors(weights, skip=lambda _: False)
    _check_names(weights, config, tensors)
    return Checkpoint(
        kind="tfmx",
        config=config,
        tensors=tensors,
        generation=generation,
        tokenizer_json=folder.text(_TOKENIZER),
        files=tuple(folder.used),  # evaluated last, when it has seen them all
    )


def model_checkpoint(
    model: Transformer,
    kind: CheckpointKind,
    files: tuple[Path, ...],
    generation: GenerationDefaults,
    tokenizer_json: str | None,
) -> Checkpoint:
    """A model in memory."""
    tensors = {
        name: LazyTensor(name, tuple(tensor.shape), tensor.detach)
        for name, tensor in stored_weights(model).items()
    }
    return Checkpoint(
        kind=kind, files=files, config=model.config, tensors=tensors, generation=generation,
        tokenizer_json=tokenizer_json,
    )  # fmt: skip


def stored_weights(model: Transformer) -> dict[str, Tensor]:
    """Parameters, and the buffers that belong to the model (random directions).

    A head that the config ties is not among them; what a model shares on its own account is there under each name.
    """
    tied = {"head.weight"} if model.config.head.tied else set()
    named = model.named_parameters(remove_duplicate=False)
    weights = {name: parameter.detach() for name, parameter in named if name not in tied}
    kept = model.state_dict()
    return weights | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _check_names(path: Path, config: ModelConfig, tensors: dict[str, LazyTensor]) -> None:
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in stored_weights(Transformer(config)).items()}
    for name, shape in wanted.items():
        if name not in tensors:
            raise CheckpointError(f"{path} has no tensor {name}, which the config asks for")
        if tensors[name].shape != shape:
            raise CheckpointError(f"{path}: {name} has the shape {tensors[name].shape}, wanted {shape}")
    for name in tensors:
        if name not in wanted:
            raise CheckpointError(f"{path} has a tensor {name}, which the config does not know")


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
