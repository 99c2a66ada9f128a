"""Bundles appear whole or not at all.

Everything is written into a hidden folder beside the target, flushed, and moved into place by one rename (or
one exchange with the old bundle). A killed export leaves that hidden folder; the next export to the same
place removes it. Folders that a live export still writes to are locked, and left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import InputError, TfmxError
from ..runtime.manifest import DIGEST_KEY, MANIFEST

if sys.platform != "win32":
    import fcntl


_BEFORE = "-before"


class PublishError(TfmxError):
    """The bundle could not be written."""


class TargetError(InputError):
    """The folder that was named cannot become a bundle."""


@contextlib.contextmanager
def published(out: Path) -> Iterator[Path]:
    """A folder to write the bundle into; it takes its place at `out` when the block ends without an error."""
    check_target(out)
    parent = out.absolute().parent
    folder, lock = parent / f"{_prefix(out.name)}{secrets.token_hex(8)}", None
    try:  # before anything is made: Ctrl-C may come at any moment
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(parent, out.name)
            lock = _made_and_locked(folder)
        except OSError as error:
            raise PublishError(f"cannot write to {parent}: {error.strerror}") from error
        yield folder
        _flush(folder)
        check_target(out)  # files may have come while the export ran
        folder.chmod(0o777 & ~_umask())  # until now only its owner could read it
        _move_into_place(folder, out.absolute())
    except OSError as error:
        place = f" ({Path(error.filename).name})" if isinstance(error.filename, str) else ""
        message = f"cannot write the bundle {out}: {error.strerror or error}{place}; nothing was changed"
        raise PublishError(message) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what is there now: a failed attempt, or the bundle before
        if lock is not None:
            os.close(lock)


def check_target(out: Path) -> None:
    """Whether a bundle may be put there."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise TargetError(f"{out} exists and is not a folder; choose another -o")
    foreign = _foreign_files(out) if out.is_dir() else []
    if foreign:  # also what a bundle may lie beside, such as a README: it would be gone
        raise TargetError(
            f"{out} holds files that are not a tfmx bundle ({foreign[0]}{', ...' if foreign[1:] else ''}); "
            "choose another -o or empty it"
        )

    _check_parent(out.absolute())


def _check_parent(out: Path) -> None:
    """The folder that it is made in, or the first above it that is there."""
    parent = next(folder for folder in out.parents if os.path.lexists(folder))
    if not parent.is_dir():
        raise PublishError(f"cannot write to {out.parent}: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PublishError(f"cannot write to {out.parent}: {parent} may not be written to")


def _foreign_files(out: Path) -> list[str]:
    """What no export of ours has listed: of a folder that is no bundle (whole or damaged), all."""
    names = {path.name for path in out.iterdir()}
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
        return sorted(names - {MANIFEST, *manifest["files"]}) if DIGEST_KEY in manifest else sorted(names)
    except (OSError, ValueError, TypeError, KeyError):
        return sorted(names)


def _prefix(name: str) -> str:
    return f".{name}.tfmx-"


def _made_and_locked(folder: Path) -> int | None:
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = _lock(folder)
        if lock is not None or sys.platform == "win32":
            return lock
        # another export took it for a leftover in the moment before it was locked


def _lock(folder: Path) -> int | None:
    """Hold a folder until the descriptor is closed or the process dies; None: somebody else does, or it is gone."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)  # noqa: PTH116 - raises if it was removed between open and lock
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks
        os.close(descriptor)
        raise
    return descriptor


def _remove_leftovers(parent: Path, name: str) -> None:
    for before in parent.glob(f"{_glob_escape(_prefix(name))}*{_BEFORE}"):  # see _exchange
        if not (parent / name).exists():
            before.rename(parent / name)
    for folder in parent.glob(f"{_glob_escape(_prefix(name))}*"):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _glob_escape(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _flush(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _move_into_place(folder: Path, out: Path) -> None:
    try:
        folder.rename(out)  # also over an empty folder
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.EACCES}:
            raise
        _exchange(folder, out)
    descriptor = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(folder: Path, out: Path) -> None:
    """Swap two folders in one step, where the system can."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform != "win32" else None
    a, b = os.fsencode(folder), os.fsencode(out)
    if libc is not None and hasattr(libc, "renameat2"):
        at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE (linux/fs.h)
        failed = libc.renameat2(at_cwd, a, at_cwd, b, exchange)
    elif libc is not None and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(a, b, 2)  # RENAME_SWAP (sys/stdio.h of macOS)
    else:
        failed = 1
    if not failed:
        return
    # A system or file system without the exchange: a moment in which neither is at `out`.
    # A kill in it is mended by the next export (see _remove_leftovers).
    before = folder.with_name(folder.name + _BEFORE)
    out.rename(before)
    try:
        folder.rename(out)
    except OSError:
        before.rename(out)
        raise
    before.rename(folder)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
