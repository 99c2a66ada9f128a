"""A bundle: the folder that export writes and the runtime opens.

Opening checks everything that onnxruntime does not: that each file is there, is a plain file and has the
size and sha256 that the manifest gives, that nothing else lies in the folder, and that the graphs contain
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
_SMALL_FILE = 1 << 30  # a graph or text file over this is not read into memory


class BundleNotFoundError(InputError):
    """The path given is no bundle at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A folder of which nothing is used unchecked: graphs and small files are the very bytes that were checked."""

    path: Path
    manifest: Manifest
    checked: bool  # whether sha256 sums are to be checked, each when its file is read or by `check_sums`
    _graphs: dict[str, tuple[bytes, GraphSummary]]  # those that were asked for

    @classmethod
    def look(cls, path: str | os.PathLike[str], *, check: bool = True) -> Bundle:
        """The manifest, and whether the folder has its files. The rest is checked when it is asked for."""
        folder = Path(path)
        manifest = _read_manifest(folder)
        _check_listing(folder, manifest)
        return cls(path=folder, manifest=manifest, checked=check, _graphs={})

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, check: bool = True) -> Bundle:
        """All is checked. `check=False` skips only the sha256 sums (0.7 s a GiB), not sizes, names or graphs."""
        bundle = cls.look(path, check=check)
        bundle.check_sums()
        for role in bundle.manifest.graphs:
            bundle.graph(role)
        return bundle

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
    if _plain_size(path) > _SMALL_FILE:
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


def _check_listing(folder: Path, manifest: Manifest) -> None:
    for name, info in manifest.files.items():
        path = folder / name
        if not os.path.lexists(path):
            raise BundleError(f"{path} is missing; copy the whole bundle or export it again")
        size = _plain_size(path)
        if size != info.size:
            raise BundleError(
                f"{path} has {size} bytes, the manifest says {info.size}; copy or export it again"
            )
    for name in sorted(entry.name for entry in folder.iterdir()):
        if name != MANIFEST and name not in manifest.files:
            raise BundleError(f"{folder / name} is not part of the bundle; remove it")


def _plain_size(path: Path) -> int:
    status = os.lstat(path)  # not stat: a link is refused, and a FIFO is never opened
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path} is not a plain file (links, folders and pipes are refused)")
    return status.st_size


def _read(path: Path, info: FileInfo, *, check: bool) -> bytes:
    if info.size > _SMALL_FILE:
        raise BundleError(f"{path} has {info.size} bytes, too large for a file of its kind")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != info.size or (check and hashlib.sha256(data).hexdigest() != info.sha256):
        raise BundleError(
            f"{path} was changed after the export (its sha256 differs); copy or export it again"
        )
    return data
