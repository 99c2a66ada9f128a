"""Which codes, scales and zero points a matrix gets: from its smallest to its largest weight, or by search.

Blocks here are float32 (..., block), scales and zeros float32 (...); k is how many steps a block's range spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..tfm_model.blocks import BlockFormat, Blocks

_CHUNK = 2**18  # weights at a time, so that what is in between stays in the cache
# Candidates for k, less those of round_nearest. Against 60 and 360 of them, the error is 0.3 % larger (stories15M).
_FROM_ZERO = (-1.3, -0.9, -0.5, -0.3, -0.1, 0.0, 0.1, 0.25, 0.4, 0.6, 0.9)  # symmetric: 8 is nearest's
_WHOLE = (-2.5, -1.5, -1.0, -0.5, -0.2, 0.0, 0.2, 0.4, 0.7, 1.0, 1.5)  # with zero points: 15 is
_REFITS = 3  # then nothing moves any more

Grid = tuple[Tensor, Tensor]  # scales and zeros


def round_nearest(w: Tensor, format_: BlockFormat, name: str = "the matrix") -> Blocks:
    """Each block (of w: out, in) spans its codes from its smallest to its largest weight."""
    return _by_chunks(w, format_, name, lambda blocks: nearest_grid(blocks, format_))


def round_search(
    w: Tensor, format_: BlockFormat, name: str = "the matrix", importance: Tensor | None = None
) -> Blocks:
    """Each block gets the scale (and zero) of least squared error, weighted by `importance` (in,) of each input."""
    if importance is not None:
        importance = positive(importance).reshape(-1, format_.block)  # (n_blocks, block)
    return _by_chunks(w, format_, name, lambda blocks: search_grid(blocks, format_, importance))


def nearest_grid(blocks: Tensor, format_: BlockFormat) -> Grid:
    low, high = blocks.aminmax(dim=-1)
    if not format_.zero_points:
        # The weight farthest from 0 gets code 0, which is one step farther than the top: the scale has its sign.
        farthest = torch.where(-low > high, low, high)
        return farthest / -format_.middle, torch.full_like(low, format_.middle)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)  # 0 is a code itself
    scale = high / format_.top - low / format_.top
    return scale, (-low / divisor(scale)).round_().clamp_(0, format_.top)


def search_grid(blocks: Tensor, format_: BlockFormat, importance: Tensor | None = None) -> Grid:
    """Never worse than `nearest_grid`, in any block."""
    nearest = nearest_grid(blocks, format_)
    weighted = blocks if importance is None else blocks * importance
    scale, zero = nearest
    most = torch.full_like(scale, -1.0)
    for candidate in _candidates(blocks, format_):
        fitted, gain = _refit(blocks, weighted, importance, candidate, format_)
        is_better = gain > most
        most = torch.where(is_better, gain, most)
        scale, zero = torch.where(is_better, fitted, scale), torch.where(is_better, candidate[1], zero)
    for _ in range(_REFITS):  # codes for the scale, the scale for the codes: the error only falls
        scale, _ = _refit(blocks, weighted, importance, (scale, zero), format_)
    # Weights that are on a grid already stay as they are: a scale that was fitted is off by its last bit.
    # And so do those whose squares are no float32.
    errors = [_error(blocks, importance, grid, format_) for grid in (nearest, (scale, zero))]
    is_better = errors[1] < errors[0]
    return torch.where(is_better, scale, nearest[0]), torch.where(is_better, zero, nearest[1])


def encode(blocks: Tensor, scale: Tensor, zero: Tensor, format_: BlockFormat) -> Tensor:
    """The codes nearest to the weights, uint8."""
    return to_steps(blocks, (scale, zero), format_).add_(zero[..., None]).to(torch.uint8)


def _candidates(blocks: Tensor, format_: BlockFormat) -> Iterable[Grid]:
    low, high = blocks.aminmax(dim=-1)
    if not format_.zero_points:
        farthest = torch.where(-low > high, low, high)
        middle = torch.full_like(low, format_.middle)
        for more in _FROM_ZERO:
            yield farthest / -(format_.middle + more), middle
        return
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    for more in _WHOLE:
        scale = high / (format_.top + more) - low / (format_.top + more)
        # What there are too few codes for, or too many, is shared by both ends.
        yield scale, (-low / divisor(scale)).sub_(more / 2).round_().clamp_(0, format_.top)


def _refit(
    blocks: Tensor, weighted: Tensor, importance: Tensor | None, grid: Grid, format_: BlockFormat
) -> Grid:
    """The best scale for a grid's codes, and by how much the squared error is below that of all zeros."""
    steps = to_steps(blocks, grid, format_)
    along = (weighted * steps).sum(dim=-1)
    square = (steps.square() if importance is None else steps.square() * importance).sum(dim=-1)
    scale = torch.where(square > 0, along / square, grid[0])
    return scale, scale * along


def _error(blocks: Tensor, importance: Tensor | None, grid: Grid, format_: BlockFormat) -> Tensor:
    error = (to_steps(blocks, grid, format_) * grid[0][..., None] - blocks).square_()
    return (error if importance is None else error * importance).sum(dim=-1)


def to_steps(blocks: Tensor, grid: Grid, format_: BlockFormat) -> Tensor:
    """Codes less their zero, in float32."""
    scale, zero = grid
    steps = (blocks / divisor(scale)[..., None]).round_()
    if not format_.zero_points:
        return steps.clamp_(-format_.middle, format_.middle - 1)
    return steps.add_(zero[..., None]).clamp_(0, format_.top).sub_(zero[..., None])


def _by_chunks(w: Tensor, format_: BlockFormat, name: str, grid_of: Callable[[Tensor], Grid]) -> Blocks:
    format_.check(name, tuple(w.shape))
    codes = torch.empty(len(w), w.shape[1] // format_.block, format_.block, dtype=torch.uint8)
    scales = torch.empty(codes.shape[:2])
    zeros = torch.empty(codes.shape[:2], dtype=torch.uint8) if format_.zero_points else None
    step = max(1, _CHUNK // w.shape[1])
    for first in range(0, len(w), step):
        rows = slice(first, first + step)
        blocks = w[rows].float().reshape(-1, *codes.shape[1:])
        scale, zero = grid_of(blocks)
        codes[rows], scales[rows] = encode(blocks, scale, zero, format_), scale
        if zeros is not None:
            zeros[rows] = zero.to(torch.uint8)
    return Blocks(format_, codes, scales, zeros)


def divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)  # a block of zeros


def positive(importance: Tensor) -> Tensor:
    """With a mean of 1, and never 0: an input that a text never used is used by another."""
    return (importance / importance.mean().clamp_min(1e-30)).clamp_min(1e-6).float()
