"""The source's logits for windows of tokens, by PyTorch in float32.

A decoder is read layer by layer, once, all windows through one layer before the next: hidden states are small, and
logits (100 MB a window of 512 for a vocabulary of 49,152) are made for one window at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..tfm_model.layers import Reads
from ..tfm_model.state import StateTensor
from ..tfm_model.transformer import all_real, positions
from .arithmetic import EXACT
from .decoder_reference import DecoderReference
from .progress import Progress
from .reference import Reference
from .whole_reference import WholeReference


def source_logits(
    reference: Reference, windows: npt.NDArray[np.int64], progress: Progress
) -> Iterator[Tensor]:
    """(W, V) for each row of `windows`, (N, W), from an empty state."""
    rows = [torch.from_numpy(row)[None] for row in windows]  # (1, W) each
    if isinstance(reference, DecoderReference):
        return _by_layer(reference, rows, progress)
    assert isinstance(reference, WholeReference)
    return _whole(reference, rows)


@torch.no_grad()
def _by_layer(reference: DecoderReference, rows: Sequence[Tensor], progress: Progress) -> Iterator[Tensor]:
    progress.stage("quality: PyTorch in float32", reference.config.n_layers * len(rows))
    ends = reference.part(0, torch.float32, EXACT)
    hidden = [ends.embedding(row, positions(_mask(row))) for row in rows]  # (1, W, width) each
    per_layer = len(reference.spec) // reference.config.n_layers
    for layer in range(reference.config.n_layers):
        block = reference.part(layer + 1, torch.float32, EXACT).blocks[0]
        spec = reference.spec[per_layer * layer : per_layer * (layer + 1)]
        for index, row in enumerate(rows):
            mask, places = _mask(row), positions(_mask(row))
            hidden[index] = block(hidden[index], Reads(mask, places, ends.rotary(places)), _empty(spec))[0]
            progress.advance()
    for x in hidden:
        yield ends.logits(x)[0]


@torch.no_grad()
def _whole(reference: WholeReference, rows: Sequence[Tensor]) -> Iterator[Tensor]:
    with reference.model(torch.float32) as model:
        for row in rows:
            mask = _mask(row)
            yield model.step(row, mask, positions(mask), _empty(reference.spec)).main[0]


def _mask(row: Tensor) -> Tensor:
    mask = all_real(row)
    assert mask is not None
    return mask


def _empty(spec: Sequence[StateTensor]) -> list[Tensor]:
    """Before the first token, for a batch of one."""
    dims = {"batch_size": 1, "past_sequence_length": 0}
    return [
        torch.zeros([dims[dim] if isinstance(dim, str) else dim for dim in state.shape]) for state in spec
    ]
