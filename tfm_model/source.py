"""Whatever a user names as the source of an export: a folder of Hugging Face or of ours, or a GGUF file.

`look_at_checkpoint` says without PyTorch, in milliseconds, what can be wrong with it.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from .checks import CheckpointError
from .config import ModelConfig
from .files import PICKLES, Folder, blamed_on, kind_of, pickle_error
from .huggingface_files import CONFIG, find_weights, read_config
from .tfmx_config import is_tfmx_config, parse_tfmx_config

if TYPE_CHECKING:
    from .checkpoint import Checkpoint


def is_python_source(source: str) -> bool:
    """Whether this names a factory in a Python file, as in `path/to/file.py:factory`."""
    return re.fullmatch(r".+\.py:[^\W\d]\w*", source, re.DOTALL) is not None


def open_checkpoint(source: str) -> Checkpoint:
    """The checkpoint at a local path; no tensor is read yet."""
    path = _existing(source)
    if not path.is_dir():
        _check_file(path)
        from .gguf_file import read_gguf

        return read_gguf(path)
    if _is_tfmx_folder(path):
        from .tfmx_folder import read_tfmx_folder

        return read_tfmx_folder(path)
    from .huggingface import read_huggingface

    return read_huggingface(path)


def look_at_checkpoint(source: str) -> ModelConfig | None:
    """The model's config, or an error; None for a GGUF file, of which only the first bytes are looked at."""
    path = _existing(source)
    if not path.is_dir():
        _check_file(path)
        return None
    folder = Folder(path)
    if not _is_tfmx_folder(path):
        config = read_config(folder)[1]
        find_weights(folder)
        return config
    with blamed_on(folder.path / CONFIG):
        return parse_tfmx_config(folder.json(CONFIG) or {})


def _existing(source: str) -> Path:
    path = Path(source)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"there is no file or folder {source!r}; give a local Hugging Face folder, a .gguf file, path/to/file.py:factory or preset:NAME"
        ) from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is a {kind_of(mode)}, wanted a Hugging Face folder or a .gguf file")
    return path


def _is_tfmx_folder(path: Path) -> bool:
    config = Folder(path).json(CONFIG)
    if config is None:
        files = sorted(path.glob("*.gguf"))
        if files:
            raise CheckpointError(f"{path} is a folder of GGUF files; give one of them, such as {files[0]}")
    return config is not None and is_tfmx_config(config)


def _check_file(path: Path) -> None:
    if path.name.endswith(PICKLES):
        raise pickle_error(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} has no config; give the folder that holds it beside its {CONFIG}")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if magic != b"GGUF" and path.suffix != ".gguf":  # a cut or foreign .gguf gets the reader's own words
        raise CheckpointError(f"{path} is no GGUF file; give a Hugging Face folder or a .gguf file")
