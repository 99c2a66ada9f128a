"""Opens the files of a checkpoint folder that somebody else wrote.

Nothing outside the folder is ever read: file names are bare, files are regular (a FIFO would hang, a device
would never end), and links are refused. The one exception is the cache of the Hugging Face hub, whose
snapshots consist of links: `snapshots/<revision>/<name>` -> `../../blobs/<hash>`, and only those.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .checks import CheckpointError, ConfigError
from .values import shown

TEXT_LIMIT = 64 * 2**20  # the largest tokenizer.json in use (Gemma 3) has 33 MB
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Folder:
    """A checkpoint folder, which remembers what was read from it."""

    def __init__(self, path: Path) -> None:
        try:
            self.path = path.resolve(strict=True)  # the folder itself may be a link, its content may not
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be opened: {_reason(error)}") from error
        self.used: list[Path] = []

    def find(self, name: str) -> Path | None:
        """Where the bytes of a file are, or None where there is none of that name."""
        if name in {"", ".", ".."} or any(character in name for character in "/\\\0"):
            raise CheckpointError(
                f"{self.path} refers to {shown(name)}, wanted a bare file name in that folder"
            )
        path = self.path / name
        try:
            mode = path.lstat().st_mode
            target = self._blob(path) if stat.S_ISLNK(mode) else path
            mode = target.lstat().st_mode
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be opened: {_reason(error)}") from error
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path} is a {kind_of(mode)}, wanted a regular file")
        if path not in self.used:
            self.used.append(path)
        return target

    def _blob(self, link: Path) -> Path:
        """What a link of the hub's cache points to; any other link is refused."""
        target = link.resolve(strict=True)
        blobs = self.path.parent.parent / "blobs"
        if self.path.parent.name != "snapshots" or target.parent != blobs:
            raise CheckpointError(
                f"{link} is a link to {target}, outside of a hub cache; copy the file in its place"
            )
        return target

    def text(self, name: str) -> str | None:
        path = self.find(name)
        if path is None:
            return None
        try:
            return read_limited(path, TEXT_LIMIT).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path / name} is not UTF-8 text (byte {error.start})") from error

    def json(self, name: str) -> dict[str, object] | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except RecursionError as error:
            raise CheckpointError(
                f"{self.path / name} is not JSON that can be read: nested too deeply"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{self.path / name} is not JSON: {_reason(error)}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path / name} holds a {type(value).__name__}, wanted a JSON object")
        return value

    def pickles(self) -> list[str]:
        """The names of the files that only running their author's code could read."""
        return sorted(entry.name for entry in os.scandir(self.path) if entry.name.endswith(PICKLES))


def read_limited(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes."""
    try:
        # Neither flag matters for a regular file; both matter if it became something else since it was checked.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is a {kind_of(status.st_mode)}, wanted a regular file")
            content = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {_reason(error)}") from error
    if len(content) > limit:
        raise CheckpointError(f"{path} has {status.st_size} bytes, more than the {limit} that are read")
    return content


@contextmanager
def blamed_on(path: Path) -> Iterator[None]:
    """Names the file in which a value stands that cannot be right."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def pickle_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle, and reading one can run its author's code; convert it to safetensors first"
    )


def kind_of(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200]
