"""Words for people: results to stdout, all else to stderr, tables as aligned plain text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence

from .. import TfmxError

# Control characters steer terminals (titles, colours, the clipboard): what comes from a model or a file must not.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
_CONTROLS[ord("\r")] = ""
_UNITS = ("B", "KB", "MB", "GB", "TB")


class OutputError(TfmxError):
    """Standard output cannot be written."""


def write(text: str) -> None:
    """A part of the result, at once: who reads the pipe sees each token when it comes."""
    stream = sys.stdout
    if stream is None:  # closed by whoever started us
        return
    try:
        stream.write(harmless(text) if stream.isatty() else text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


def write_line(text: str = "") -> None:
    write(text + "\n")


def say(text: str) -> None:
    """A line that is no result: an error, a note, statistics."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # nobody is left to hear it
            sys.stderr.write(harmless(text) + "\n")
            sys.stderr.flush()


def harmless(text: str) -> str:
    return text.translate(_CONTROLS)


def write_table(rows: Iterable[Sequence[str]], align: str = "", indent: int = 2) -> None:
    """Rows of texts in columns; `align` has `<` or `>` for each, and columns beyond it go left."""
    lines = [[harmless(cell) for cell in row] for row in rows]
    count = max((len(row) for row in lines), default=0)
    widths = [max(len(row[i]) for row in lines if i < len(row)) for i in range(count)]
    for row in lines:
        cells = [f"{cell:{align[i : i + 1] or '<'}{widths[i]}}" for i, cell in enumerate(row)]
        write_line((" " * indent + "  ".join(cells)).rstrip())


def size(count: float) -> str:
    """Bytes for people, in powers of 1000 as disks and downloads are sold."""
    unit = 0
    while count >= 999.95 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"
