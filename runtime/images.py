"""Image files as the array that a model takes. Pillow (the extra `images`) is imported when the first is read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import InputError
from .extras import install_advice
from .manifest import InputInfo

if TYPE_CHECKING:
    from PIL.Image import Image

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by channels


class ImageError(InputError):
    """An image that cannot be used."""


def open_image(path: str | os.PathLike[str]) -> Image:
    """A Pillow image, read whole, so that a damaged file is noticed here."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImageError(f"reading an image needs Pillow; {install_advice('images')}") from error
    try:
        with Image.open(path) as image:
            image.load()
            return image.copy()
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        reason = "is no image that Pillow knows" if isinstance(error, UnidentifiedImageError) else None
        reason = reason or f"cannot be read as an image: {getattr(error, 'strerror', None) or error}"
        raise ImageError(f"{os.fspath(path)} {' '.join(reason.split())}") from error


def image_array(image: Image, info: InputInfo) -> npt.NDArray[np.float32]:
    """(C, H, W): brought to the model's channels and size (bilinear), then (value / 255 - mean) / std."""
    assert info.image is not None
    channels, height, width = info.image
    mode = _MODES.get(channels)
    if mode is None:
        raise ImageError(f"an image file cannot have the {channels} channels of this bundle; give an array")
    if image.mode[0] in "IF":  # Pillow would cut their values at 255
        raise ImageError(f"the image has mode {image.mode}; convert it to 8 bits a channel")
    from PIL.Image import Resampling

    image = image.convert(mode)
    if image.size != (width, height):
        image = image.resize((width, height), Resampling.BILINEAR)
    pixels = np.asarray(image, np.float32).reshape(height, width, channels) / 255
    normal = (pixels - np.asarray(info.mean, np.float32)) / np.asarray(info.std, np.float32)
    return np.ascontiguousarray(normal.transpose(2, 0, 1))
