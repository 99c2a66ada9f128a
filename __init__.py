"""tfmx: PyTorch transformers as proven ONNX graphs, run without PyTorch.

The errors that a user can cause:

    TfmxError            something failed (exit code 1)
    └── InputError       what was given cannot be used (exit code 2)

Each is subclassed beside the code that raises it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runtime import load as load

__version__ = "0.1.0"
__all__ = ["InputError", "TfmxError", "__version__", "load"]


class TfmxError(Exception):
    """A failure that has a one-line explanation for the user."""


class InputError(TfmxError):
    """What the user gave (file, option, prompt) cannot be used."""


def __dir__() -> list[str]:
    """With `load`, so that help(tfmx) has it."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name == "load":  # late, so that `import tfmx` stays free of onnxruntime
        from .runtime import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
