"""What can be said about SOURCE and its options before PyTorch is loaded, in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

from .. import InputError
from ..runtime.manifest import DIGEST_KEY, MANIFEST
from ..tfm_model.checks import CheckpointError
from ..tfm_model.config import ModelConfig
from ..tfm_model.presets import PRESET, PRESETS, preset_config
from ..tfm_model.source import is_python_source, look_at_checkpoint
from .factories import check_factory
from .fitting import fitted
from .shown_layers import Layers

# Sources that are no file, by the kind that manifests give.
_FOLDERS = {"huggingface": "a Hugging Face folder", "tfmx": "a folder of `save_model`", "preset": "a preset"}


class IsBundleError(InputError):
    """A bundle stands where the source of one was wanted."""


def check_source(source: str, max_context: int | None, attentions: Layers) -> ModelConfig | None:
    """The config as it will be exported, where the source tells it without PyTorch: not Python files, nor GGUF."""
    if source.startswith(PRESET):
        return fitted(preset_config(source), max_context, attentions)
    if is_python_source(source) or source.endswith((".py", ".py:")):
        file, _, factory = source.rpartition(".py")
        check_factory(Path(f"{file}.py"), factory.removeprefix(":"))
        return None
    _refuse_bundle(Path(source))
    try:
        config = look_at_checkpoint(source)
    except CheckpointError as error:
        if source in PRESETS and not Path(source).exists():
            raise CheckpointError(f"{error}; the preset of that name is {PRESET}{source}") from error
        raise
    return None if config is None else fitted(config, max_context, attentions)


def _refuse_bundle(path: Path) -> None:
    """What the runtime opens has a manifest of ours, whole or damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes()) if (path / MANIFEST).is_file() else {}
        if DIGEST_KEY not in manifest:
            return
        source = manifest["source"]
        made_of = _FOLDERS.get(source["kind"]) or ", ".join(source["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return
    raise IsBundleError(
        f"{path} is a bundle already, exported from {made_of}; give that source, or use the bundle with `tfmx run {path}`"
    )
