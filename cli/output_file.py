"""Files that a command writes: the suffix says what they hold, and they appear whole or not at all."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import click

from .. import InputError, TfmxError


class OutputFileError(TfmxError):
    """A file cannot be written."""


class OutputPlaceError(InputError):
    """There is no folder for a file."""


def check_place(name: str, suffixes: tuple[str, ...], option: str = "--out") -> Path:
    """The path that an option names, refused before any work is done if it cannot be it."""
    path = Path(name)
    if path.suffix.lower() not in suffixes:
        raise click.UsageError(f"{option} is {name!r}; wanted a name that ends in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise OutputPlaceError(f"{option} {name}: there is no folder {path.parent}")
    if path.is_dir():
        raise OutputPlaceError(f"{option} {name} is a folder")
    return path


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the path, then rename: whoever looks sees the old file or the whole new one."""
    hidden = path.with_name(
        f".tfmx-{secrets.token_hex(8)}"
    )  # no longer than a name may be, whatever path's is
    try:
        with hidden.open("xb") as file:
            write(file)
        hidden.replace(path)
    except OSError as error:
        raise OutputFileError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # it was moved, or could not be made: the error above says why
            hidden.unlink()
