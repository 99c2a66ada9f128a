"""Opens whatever a user names as the source of an export: a folder of Hugging Face or of ours, or a GGUF file."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from .checkpoint import Checkpoint, CheckpointError
from .files import PICKLES, kind_of, pickle_error


def is_python_source(source: str) -> bool:
    """Whether this names a factory in a Python file, as in `path/to/file.py:factory`."""
    return re.fullmatch(r".+\.py:[^\W\d]\w*", source, re.DOTALL) is not None


def open_checkpoint(source: str) -> Checkpoint:
    """The checkpoint at a local path; no tensor is read yet."""
    path = Path(source)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"there is no file or folder {source!r}; give a local Hugging Face folder or a .gguf file"
        ) from error
    if stat.S_ISDIR(mode):
        return _open_folder(path)
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is a {kind_of(mode)}, wanted a Hugging Face folder or a .gguf file")
    if path.name.endswith(PICKLES):
        raise pickle_error(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} has no config; give the folder that holds it beside its config.json")
    return _open_file(path)


def _open_folder(path: Path) -> Checkpoint:
    from .huggingface import read_huggingface
    from .tfmx_folder import is_tfmx_folder, read_tfmx_folder

    if is_tfmx_folder(path):
        return read_tfmx_folder(path)
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").exists():
        raise CheckpointError(f"{path} is a folder of GGUF files; give one of them, such as {files[0]}")
    return read_huggingface(path)


def _open_file(path: Path) -> Checkpoint:
    from .gguf_file import read_gguf

    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF" and path.suffix != ".gguf":  # a cut or foreign .gguf gets the reader's own words
        raise CheckpointError(f"{path} is no GGUF file; give a Hugging Face folder or a .gguf file")
    return read_gguf(path)
