"""Vectors from a file, `.npy` or `.csv`: one row a position, one column a feature."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from .. import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SUFFIXES = (".npy", ".csv")
LIMIT = 256 << 20  # bytes of a CSV file; a float32 array of as much text is about 100 MB


class InputFileError(InputError):
    """A file of vectors that cannot be used."""


def read_vectors(name: str) -> npt.NDArray[np.number]:
    """(T, F), or as many dimensions as the array has: the model knows which it wants."""
    path = Path(name)
    if path.suffix.lower() not in SUFFIXES:
        raise InputFileError(f"{name}: this bundle takes vectors, from a file that ends in .npy or .csv")
    try:
        return _read_npy(path) if path.suffix.lower() == ".npy" else _read_csv(path)
    except OSError as error:
        raise InputFileError(f"{name} cannot be read: {error.strerror or error}") from error


def _read_npy(path: Path) -> npt.NDArray[np.number]:
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, SyntaxError) as error:  # numpy parses the header as a Python literal
        reason = (
            "it holds Python objects" if "Object arrays" in str(error) else "it is damaged or something else"
        )
        raise InputFileError(f"{path} is no array of numbers: {reason}; write it with numpy.save") from error
    if not isinstance(array, np.ndarray):  # a zip file: np.savez
        array.close()
        raise InputFileError(f"{path} holds several arrays (npz); wanted one, written with numpy.save")
    if array.dtype.kind not in "fiu":
        raise InputFileError(f"{path} holds {array.dtype}, wanted numbers")
    return array


def _read_csv(path: Path) -> npt.NDArray[np.number]:
    import numpy as np

    rows = [(line, row) for line, row in _csv_rows(path) if any(cell.strip() for cell in row)]
    if rows and not any(map(_is_number, rows[0][1])):
        del rows[0]  # the header
    if not rows:
        raise InputFileError(f"{path} has no rows of numbers")
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise InputFileError(f"{path}, line {line}: {len(row)} columns, the rows above have {width}")
        for column, cell in enumerate(row, 1):
            if not _is_number(cell):
                raise InputFileError(f"{path}, line {line}, column {column}: {cell[:40]!r} is no number")
    return np.array([[float(cell) for cell in row] for _, row in rows])


def _csv_rows(path: Path) -> list[tuple[int, list[str]]]:
    with path.open("rb") as file:
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise InputFileError(f"{path} has more than {LIMIT >> 20} MiB; write it as .npy")
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""))
        return [(reader.line_num, row) for row in reader]
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except csv.Error as error:
        raise InputFileError(f"{path}, line {reader.line_num}: {error}") from error


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # Python's own way of writing numbers, no one else's
