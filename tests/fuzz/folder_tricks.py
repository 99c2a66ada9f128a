"""Tricks with a bundle's or checkpoint's folder, which no sum can cover: links, pipes, holes, what is missing or too much."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzz.draft import Draft


def trick(rng: Random, folder: Path) -> str:
    """After a bundle or checkpoint was written: the folder is no longer what it was."""
    names = sorted(path.name for path in folder.iterdir())
    way = rng.choice(_TRICKS)
    return f"folder: {way(rng, folder, folder / rng.choice(names))}"


def _missing(rng: Random, folder: Path, path: Path) -> str:
    path.unlink()
    return f"{path.name} is missing"


def _cut(rng: Random, folder: Path, path: Path) -> str:
    os.truncate(path, rng.choice((0, 1, path.stat().st_size // 2, max(path.stat().st_size - 1, 0))))
    return f"{path.name} cut to {path.stat().st_size} bytes"


def _sparse(rng: Random, folder: Path, path: Path) -> str:
    os.truncate(path, rng.choice((1 << 20, 1 << 31, 1 << 40)))
    return f"{path.name} made sparse, {path.stat().st_size} bytes"


def _pipe(rng: Random, folder: Path, path: Path) -> str:
    path.unlink()
    os.mkfifo(path)
    return f"{path.name} is a pipe"


def _directory(rng: Random, folder: Path, path: Path) -> str:
    path.unlink()
    path.mkdir()
    return f"{path.name} is a folder"


def _link(rng: Random, folder: Path, path: Path) -> str:
    target = rng.choice(("/etc/passwd", "/dev/zero", "/dev/full", "nothing", path.name, "inside", "outside"))
    if target in {"inside", "outside"}:
        place = (folder if target == "inside" else folder.parent) / f"moved-{path.name}"
        path.rename(place)
        target = str(place)
    else:
        path.unlink()
    path.symlink_to(target)
    return f"{path.name} is a link to {Path(target).name}"


def _hard_link(rng: Random, folder: Path, path: Path) -> str:
    other = rng.choice(sorted(folder.iterdir()))
    if other != path:
        path.unlink()
        path.hardlink_to(other)
    return f"{path.name} is a hard link to {other.name}"


def _more(rng: Random, folder: Path, path: Path) -> str:
    name = rng.choice(
        ("more", ".hidden", "pytorch_model.bin", "a" * 200, "\n", "é", "manifest.json.bak", "weights.bin ")
    )
    (folder / name).write_bytes(b"x")
    return f"{name!r} is there too"


def _swapped(rng: Random, folder: Path, path: Path) -> str:
    other = rng.choice(sorted(folder.iterdir()))
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)
    return f"{path.name} and {other.name} swapped"


def _unreadable_name(rng: Random, folder: Path, path: Path) -> str:
    path.rename(folder / os.fsdecode(b"\xff\xfe"))
    return f"{path.name} renamed to bytes that are no text"


def _flipped(rng: Random, folder: Path, path: Path) -> str:
    data = bytearray(path.read_bytes() or b"x")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"{path.name}: a bit flipped"


def _garbage(rng: Random, folder: Path, path: Path) -> str:
    path.write_bytes(
        rng.choice(
            (b"null", b"[]", b"{}", b"\xff" * 100, b"[" * 100_000, b"\xef\xbb\xbf{}", b'{"format": 3}')
        )
    )
    return f"{path.name}: other bytes"


_TRICKS: tuple[Callable[[Random, Path, Path], str], ...] = (
    _missing, _cut, _sparse, _pipe, _directory, _link, _link, _hard_link, _more, _swapped, _unreadable_name, _flipped, _garbage,
)  # fmt: skip


def huge_sizes(rng: Random, draft: Draft, folder: Path) -> None:
    """A file as large as the manifest says, and nearly all of it a hole."""
    name = rng.choice(sorted(draft.manifest["files"]))
    size = rng.choice((1 << 22, 1 << 28, 1 << 31, 1 << 40))
    os.truncate(folder / name, size)
    draft.manifest["files"][name]["size"] = size
    draft.what.append(f"folder: {name} is sparse, {size} bytes, as the manifest says")
