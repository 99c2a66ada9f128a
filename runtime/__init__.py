"""Runs bundles with onnxruntime: no torch, no onnx, no transformers.

Importing this package loads neither onnxruntime nor numpy: `runtime.bundle` and `runtime.ops` serve the
exporter and `tfmx inspect` too. onnxruntime is imported when the first session is made.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Since 1.29 onnxruntime reports home unless this is set before it is first imported.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

if TYPE_CHECKING:
    from .model import Model as Model
    from .model import load as load

__all__ = ["Model", "load"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from . import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
