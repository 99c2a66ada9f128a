"""The tensors of a safetensors file, each mapped into memory for as long as somebody holds it.

Every read opens the file anew: the tensor is a view of its own private mapping, which goes with it. One
mapping for all would keep every page that was ever touched resident (800 MB after 800 MB of reads, against
20 MB this way), and opening costs a tenth of a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open

from .checkpoint import CheckpointError, LazyTensor
from .values import shown

_DTYPES = ("F32", "F16", "BF16")


def lazy_tensors(path: Path, *, skip: Callable[[str], bool]) -> dict[str, LazyTensor]:
    """The tensors of the file by name, but for those to skip; the header is checked, no tensor is read."""
    tensors: dict[str, LazyTensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if skip(name):
                    continue
                view = file.get_slice(name)
                dtype, shape = view.get_dtype(), tuple(view.get_shape())
                if dtype not in _DTYPES:
                    raise CheckpointError(
                        f"{path}: tensor {shown(name)} has dtype {dtype}, supported are {', '.join(_DTYPES)}"
                    )
                tensors[name] = LazyTensor(name, shape, _reader(path, name, shape))
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error
    return tensors


def _reader(path: Path, name: str, shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                tensor = cast(torch.Tensor, file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{path} was changed while it was read: tensor {shown(name)} has another shape"
            )
        return tensor

    return read


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is not a whole safetensors file: {' '.join(str(error).split())[:200]}")
