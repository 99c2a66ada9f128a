"""What a user gives (text, token ids, vectors, images) as checked arrays, one input at a time.

Guards that onnxruntime does not give: an id of -1 would wrap around, a bad one can read zeros, NaN would
spread silently.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from .. import InputError
from .manifest import Manifest
from .session import NUMPY_DTYPES
from .tokenizer import PromptError, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

# tokens: text or ids; vectors: (T, F), or (T,) if F is 1; images: a path, a Pillow image or (C, H, W)
Input: TypeAlias = "str | os.PathLike[str] | npt.ArrayLike | Image"
Array = npt.NDArray[Any]


class InputReader:
    """Reads inputs for one bundle."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer | None) -> None:
        self.info = manifest.inputs
        self._float = NUMPY_DTYPES["float32" if manifest.dtype == "fp32" else "float16"]
        self._tokenizer = tokenizer

    def read(self, value: Input, what: str = "the input", *, parse_special: bool = False) -> Array:
        """(T,) token ids, (T, F) vectors or one image (C, H, W), as the graph takes them."""
        if self.info.kind == "tokens":
            return np.asarray(self.ids(value, what, parse_special=parse_special), np.int64)
        return self._vectors(value, what) if self.info.kind == "vectors" else self._image(value, what)

    def ids(self, value: Input, what: str, *, parse_special: bool = False) -> list[int]:
        if isinstance(value, str):
            ids = self.encode(value, parse_special=parse_special)
        elif isinstance(value, Iterable):
            ids = whole_numbers(value, what)
        else:
            raise PromptError(f"{what} must be a text or token ids, not {type(value).__name__}")
        assert self.info.vocab_size is not None
        check_ids(ids, what, self.info.vocab_size, self.info.length)
        return ids

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        if self._tokenizer is None:
            raise PromptError("this bundle has no tokenizer; give token ids (`--ids`)")
        if len(text) > 4 * self.info.length:  # refuse a hopeless text before seconds of work on it
            least = len(text) // self._tokenizer.longest_token()
            if least > self.info.length:
                raise PromptError(
                    f"the prompt has at least {least} tokens, the context holds {self.info.length}; shorten it"
                )
        return self._tokenizer.encode(text, parse_special=parse_special)

    def _vectors(self, value: Input, what: str) -> Array:
        features = self.info.features
        array = _numbers(value, what, "fiu", f"numbers, (T, {features})")
        if array.ndim == 1 and features == 1:
            array = array[:, None]
        if array.size == 0:
            raise InputError(f"{what} is empty")
        if array.ndim != 2 or array.shape[1] != features:
            raise InputError(f"{what} has the shape {array.shape}, this bundle takes (T, {features})")
        if len(array) > self.info.length:
            raise InputError(
                f"{what} has {len(array)} positions, this bundle takes at most {self.info.length}"
            )
        return self._finite(array, what)

    def _image(self, value: Input, what: str) -> Array:
        from .images import image_array, open_image

        assert self.info.image is not None
        if isinstance(value, str | os.PathLike):
            value = open_image(value)
        if hasattr(value, "convert"):  # a Pillow image
            return self._finite(image_array(cast("Image", value), self.info), what)
        wanted = "channels, height, width = ({}, {}, {})".format(*self.info.image)
        array = _numbers(value, what, "f", f"a path, a Pillow image or normalised floats, {wanted}")
        if array.shape != self.info.image:
            raise InputError(f"{what} has the shape {array.shape}, this bundle takes {wanted}")
        return self._finite(array, what)

    def _finite(self, array: Array, what: str) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            found = array.astype(self._float)
        if not np.isfinite(found).all():
            place = tuple(int(i) for i in np.argwhere(~np.isfinite(found))[0])
            raise InputError(f"{what} is not finite in {found.dtype} at {place}: {array[place]}")
        return found


def check_ids(ids: Sequence[int], what: str, vocab_size: int, length: int) -> None:
    if not ids:
        raise PromptError(f"{what} is empty")
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise PromptError(
                f"token {token_id} at place {place} of {what} is outside the vocabulary of {vocab_size}"
            )
    if len(ids) > length:
        raise PromptError(f"{what} has {len(ids)} tokens, the context holds {length}; shorten it")


def pad_left(rows: Sequence[Any], tail: tuple[int, ...], dtype: Any) -> tuple[Array, npt.NDArray[np.int64]]:
    """Rows of (T_i, *tail) as one array (B, T, *tail), zeros before each, and its mask (B, T)."""
    T = max(map(len, rows))
    data, mask = np.zeros((len(rows), T, *tail), dtype), np.zeros((len(rows), T), np.int64)
    for index, row in enumerate(rows):
        data[index, T - len(row) :], mask[index, T - len(row) :] = row, 1
    return data, mask


def whole_numbers(values: Iterable[Any], what: str) -> list[int]:
    ids = []
    for place, value in enumerate(values):
        try:
            ids.append(operator.index(value))
        except TypeError as error:
            raise PromptError(f"{what} has {value!r} at place {place}, where a token id must be") from error
    return ids


def _numbers(value: Input, what: str, kinds: str, wanted: str) -> Array:
    """An array whose dtype is of one of these kinds."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"{what} cannot be made an array; this bundle takes {wanted}") from error
    if array.dtype.kind not in kinds:
        raise InputError(f"{what} holds {array.dtype}; this bundle takes {wanted}")
    return array
