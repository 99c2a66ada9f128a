"""A bundle: the folder that export writes and the runtime opens.

Opening checks everything that onnxruntime does not: that each file is there, is a plain file and has the
size and sha256 that the manifest gives, that nothing else that could be read lies in the folder, and that the graphs contain
only what the exporter emits. The graphs are kept as the bytes that were checked; the weights are mapped by
onnxruntime from their path, so replace a bundle by renaming a new folder over it, never by writing into it.
`open` does all of it; `look` leaves to the caller what it does not need, or does beside other work.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from .. import InputError
from .graph_audit import GraphSummary, audit_graph
from .manifest import (
    FORMAT,
    MANIFEST,
    WEIGHTS,
    BundleError,
    FileInfo,
    GenerationInfo,
    GraphInfo,
    InputInfo,
    Manifest,
    OutputInfo,
    QuantInfo,
    SourceInfo,
    StateInfo,
    TensorInfo,
)
from .unlisted import is_ignored

__all__ = [
    "FORMAT",
    "MANIFEST",
    "WEIGHTS",
    "Bundle",
    "BundleError",
    "BundleNotFoundError",
    "FileInfo",
    "GenerationInfo",
    "GraphInfo",
    "InputInfo",
    "Manifest",
    "OutputInfo",
    "QuantInfo",
    "SourceInfo",
    "StateInfo",
    "TensorInfo",
    "file_info",
]

_BLOCK = 1 << 18  # bytes hashed at a time: they stay in the cache, and a longer buffer takes time to be made
_LARGEST_MANIFEST = (
    16 << 20
)  # bytes; SmolLM2's has 0.2 MB, and as objects JSON takes up to 25 times as much memory
_SMALL_FILES = 1 << 30  # of all files but the weights together: they are read into memory
_HOLES_FROM = 1 << 30  # bytes: 0.7 s of sums
_PADDING = 16 << 20  # of the weights: less than 4096 bytes a tensor


class BundleNotFoundError(InputError):
    """The path given is no bundle at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A folder of which nothing is used unchecked: graphs and small files are the very bytes that were checked."""

    path: Path
    manifest: Manifest
    unlisted: tuple[str, ...]  # names beside the manifest's that nothing reads
    checked: bool  # whether sha256 sums are to be checked, each when its file is read or by `check_sums`
    _graphs: dict[str, tuple[bytes, GraphSummary]]  # those that were asked for

    @classmethod
    def look(cls, path: str | os.PathLike[str], *, check: bool = True) -> Bundle:
        """The manifest, and whether the folder has its files. The rest is checked when it is asked for."""
        folder = Path(path)
        manifest = _read_manifest(folder)
        unlisted = _check_listing(folder, manifest)
        return cls(path=folder, manifest=manifest, unlisted=unlisted, checked=check, _graphs={})

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, check: bool = True) -> Bundle:
        """All is checked. `check=False` skips only the sha256 sums (0.7 s a GiB), not sizes, names or graphs."""
        bundle = cls.look(path, check=check)
        for role in bundle.manifest.graphs:
            bundle.graph(role)
        bundle.check_weights_size()
        bundle.check_sums()
        return bundle

    def check_weights_size(self) -> None:
        """Refuse weights that no graph asks for before a byte of them is read: a file of 1 TB costs nothing to make.

        The graphs that were audited already are asked first; the others only if they do not explain the size.
        """
        weights = self.manifest.files.get(WEIGHTS)
        if weights is None:
            return
        found = 0
        for role in sorted(self.manifest.graphs, key=lambda role: role not in self._graphs):
            found += self.summary(role).initializer_bytes
            if weights.size <= found + _PADDING:
                return
        raise BundleError(
            f"{self.path / WEIGHTS} has {weights.size:,} bytes, but the graphs' tensors take {found:,}; "
            "copy or export it again"
        )

    def check_sums(self) -> None:
        """Every file's sha256, unless the bundle was opened with `check=False`."""
        for name, info in self.manifest.files.items() if self.checked else ():
            if file_info(self.path / name).sha256 != info.sha256:
                raise BundleError(
                    f"{self.path / name} was changed after the export (its sha256 differs); copy or export it again"
                )

    def graph(self, role: str) -> bytes:
        """An audited graph: "encode", "prefill", "decode", "select" or "sample"."""
        return self._audited(role)[0]

    def summary(self, role: str) -> GraphSummary:
        return self._audited(role)[1]

    def _audited(self, role: str) -> tuple[bytes, GraphSummary]:
        if role not in self._graphs:
            graph, weights = self.manifest.graphs[role], self.manifest.files.get(WEIGHTS)
            data = _read(self.path / graph.file, self.manifest.files[graph.file], check=self.checked)
            self._graphs[role] = (
                data,
                audit_graph(data, graph, weights.size if weights else 0, self.manifest.longest),
            )
        return self._graphs[role]

    def read(self, name: str) -> bytes | None:
        """One of the small files, e.g. `tokenizer.json`; None when the bundle has none."""
        info = self.manifest.files.get(name)
        return None if info is None else _read(self.path / name, info, check=self.checked)


def file_info(path: Path) -> FileInfo:
    """Size and sha256 of a file, read once, in blocks."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            block = bytearray(_BLOCK)
            while count := file.readinto(block):
                digest.update(memoryview(block)[:count])
                size += count
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    return FileInfo(size=size, sha256=digest.hexdigest())


def _read_manifest(folder: Path) -> Manifest:
    if not folder.exists():
        raise BundleNotFoundError(
            f"{folder} does not exist; `tfmx export SOURCE -o {folder}` makes a bundle there"
        )
    if not folder.is_dir():
        raise BundleNotFoundError(f"{folder} is not a folder; give the folder that `tfmx export` wrote")
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise BundleNotFoundError(f"{folder} has no {MANIFEST}, so it is no bundle; `tfmx export` writes one")
    if _plain_size(path) > _LARGEST_MANIFEST:
        raise BundleError(f"{path} is too large to be a manifest")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return Manifest.from_bytes(data)
    except BundleError as error:
        raise BundleError(
            f"{folder}{os.sep}{error}" if str(error).startswith(MANIFEST) else f"{path}: {error}"
        ) from error


def _check_listing(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """The files are those of the manifest, by name, kind and size (nothing is read yet); and the names of those that nothing reads."""
    small = {name: info.size for name, info in manifest.files.items() if name != WEIGHTS}
    if sum(small.values()) > _SMALL_FILES:
        name = max(small, key=lambda name: small[name])
        raise BundleError(
            f"{folder / name} has {small[name]:,} bytes; the files beside {WEIGHTS} may have {_SMALL_FILES:,} together"
        )
    for name, info in manifest.files.items():
        path = folder / name
        if not os.path.lexists(path):
            raise BundleError(f"{path} is missing; copy the whole bundle or export it again")
        size = _plain_size(path)
        if size != info.size:
            raise BundleError(
                f"{path} has {size} bytes, the manifest says {info.size}; copy or export it again"
            )
        _check_no_hole(path)
    with os.scandir(folder) as entries:
        others = [entry for entry in entries if entry.name != MANIFEST and entry.name not in manifest.files]
        foreign = sorted(entry.name for entry in others if not is_ignored(entry))
    if foreign:
        raise BundleError(f"{folder / foreign[0]} is not part of the bundle; remove it")
    return tuple(sorted(entry.name for entry in others))


def _check_no_hole(path: Path) -> None:
    """A file of 1 TB with nothing in it takes no room, is made in no time, and would be summed for half an hour.

    A copy that was broken off may look the same. Half, since a file system may compress; Windows does not say.
    """
    status = os.lstat(path)
    on_disk = 512 * getattr(status, "st_blocks", status.st_size)
    if status.st_size > _HOLES_FROM and on_disk < status.st_size // 2:
        raise BundleError(
            f"{path} says {status.st_size:,} bytes, of which {on_disk:,} are on the disk; copy or export it again"
        )


def _plain_size(path: Path) -> int:
    status = os.lstat(path)  # not stat: a link is refused, and a FIFO is never opened
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path} is not a plain file (links, folders and pipes are refused)")
    return status.st_size


def _read(path: Path, info: FileInfo, *, check: bool) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != info.size or (check and hashlib.sha256(data).hexdigest() != info.sha256):
        raise BundleError(
            f"{path} was changed after the export (its sha256 differs); copy or export it again"
        )
    return data
