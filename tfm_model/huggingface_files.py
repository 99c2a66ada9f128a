"""What a Hugging Face folder must have, told without PyTorch: a config that is understood, and weights that are no pickle."""

from __future__ import annotations

from pathlib import Path

from .checks import CheckpointError
from .config import ModelConfig
from .files import Folder, blamed_on, pickle_error
from .huggingface_config import parse_config
from .values import Values

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(folder: Folder) -> tuple[Values, ModelConfig]:
    """config.json as it is, and what it means."""
    raw = folder.json(CONFIG)
    if raw is None:
        raise CheckpointError(f"{folder.path} has no {CONFIG}; is it a Hugging Face model folder?")
    with blamed_on(folder.path / CONFIG):
        return raw, parse_config(raw)


def find_weights(folder: Folder) -> Path | None:
    """The file of all tensors; None where an index says which shard has which."""
    whole = folder.find(WEIGHTS)
    if whole is not None or folder.find(INDEX) is not None:
        return whole
    pickles = folder.pickles()
    if pickles:
        raise pickle_error(folder.path / pickles[0])
    raise CheckpointError(f"{folder.path} has neither {WEIGHTS} nor {INDEX}")
