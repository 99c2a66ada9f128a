"""The optional parts of tfmx, and the one text that says how to install one.

The distribution is called `tfmx-onnx`: the name `tfmx` on the public index is another project. Ours is not published
there yet, so that whoever follows the advice installs from a clone or from a wheel that was made of one.
"""

from __future__ import annotations

from typing import Literal

Extra = Literal["cpu", "cuda", "images", "export"]


def install_advice(extra: Extra) -> str:
    """A command to type, for the end of a sentence that says what is missing."""
    return f"`pip install '.[{extra}]'` in a clone of tfmx (or, for the dot, the path of its wheel)"
