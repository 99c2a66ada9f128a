"""Runs bundles with onnxruntime: no torch, no onnx, no transformers.

Importing this package loads neither onnxruntime nor numpy: `runtime.bundle` and `runtime.ops` serve the
exporter and `tfmx inspect` too. onnxruntime is imported when the first session is made.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

# Since 1.29 onnxruntime reports home unless this is set before it is first imported.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

if TYPE_CHECKING:
    from .bundle import Bundle as Bundle
    from .generate import Statistics as Statistics
    from .generate import Step as Step
    from .loading import load as load
    from .model import Model as Model
    from .model import Result as Result
    from .sampling_options import SamplingOptions as SamplingOptions

_HOMES = {
    "Bundle": "bundle",
    "Model": "model",
    "Result": "model",
    "SamplingOptions": "sampling_options",
    "Statistics": "generate",
    "Step": "generate",
    "load": "loading",
}
__all__ = ["Bundle", "Model", "Result", "SamplingOptions", "Statistics", "Step", "load"]


def __dir__() -> list[str]:
    """With what is imported late, so that help(tfmx.runtime) has it."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
