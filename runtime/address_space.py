"""Memory that a limit forbids (`ulimit -v`, RLIMIT_AS): asked for beforehand where a failure could not be caught.

Python raises MemoryError. But libraries that get no memory end the process, some without a word that helps: `tokenizers`
aborts, PyTorch and onnxruntime throw where nobody catches. So what they will need is compared with what is left of the
limit. Where there is none, nothing is checked.
"""

from __future__ import annotations

import contextlib
import os

from .. import TfmxError

_SIGNS = (
    "allocate memory",
    "failed to map segment",
    "bad_alloc",
    "can't start new thread",
    "pthread_create failed",
    "not enough memory",
)


class AddressSpaceError(TfmxError):
    """The limit on address space leaves too little."""


def free_address_space() -> int | None:
    """Bytes that are left of the limit; None where there is none, or the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:  # noqa: PTH123 (each token may ask)
        return max(0, limit - int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    return None


def require_address_space(needed: int, what: str) -> None:
    """Refuse what needs more than is left; `needed` is an estimate, rather too high than too low."""
    free = free_address_space()
    if free is not None and free < needed:
        raise AddressSpaceError(
            f"there is not enough memory: {what} needs about {needed >> 20:,} MiB of address space, "
            f"and the limit on it (`ulimit -v`) leaves {free >> 20:,}; raise the limit"
        )


def lacks_memory(error: BaseException | None) -> bool:
    """Whether memory is what an error is about, or one that it came from."""
    while error is not None:
        if isinstance(error, MemoryError) or any(sign in str(error) for sign in _SIGNS):
            return True
        if isinstance(error, SystemError) and free_address_space() is not None:
            return True  # numpy's import says no more than that something failed
        error = error.__cause__ or error.__context__
    return False
