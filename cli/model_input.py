"""What a bundle is given: text or token ids, a file of vectors, or an image, by what its manifest says it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .console import say
from .input_file import read_vectors
from .prompt import read_prompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..runtime.inputs import Input
    from ..runtime.manifest import InputInfo

_WANTED = {"vectors": "a .npy or .csv file", "images": "an image file"}


def read_input(
    inputs: InputInfo, argument: str | None, file: str | None, ids: str | None, *, quiet: bool = False
) -> Input | None:
    """A prompt, an array (T, F) or a Pillow image; None where a prompt was wanted and none given."""
    if inputs.kind == "tokens":
        return read_prompt(argument, file, ids)
    wanted = _WANTED[inputs.kind]
    if ids is not None:
        raise click.UsageError(
            f"--ids is for bundles that take tokens; this one takes {inputs.kind}: {wanted}"
        )
    if argument is not None and file is not None:
        raise click.UsageError("the input is given twice, by INPUT and --file")
    path = argument if file is None else file
    if not path:
        raise click.UsageError(f"this bundle takes {inputs.kind}; give {wanted}")
    return read_vectors(path) if inputs.kind == "vectors" else _read_image(path, inputs, quiet=quiet)


def _read_image(path: str, inputs: InputInfo, *, quiet: bool) -> Image:
    from ..runtime.images import open_image

    image = open_image(path)
    assert inputs.image is not None
    _, height, width = inputs.image
    if image.size != (width, height) and not quiet:
        say(f"{path}: {image.size[0]} x {image.size[1]} pixels, resized to {width} x {height}")
    return image
