"""What a failed gate raises."""

from __future__ import annotations

from .. import TfmxError


class ParityError(TfmxError):
    """The graphs do not compute what PyTorch computes."""
