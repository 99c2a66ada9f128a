"""GPTQ (Frantar et al. 2022): columns are rounded one after the other, and those that follow make up for what was lost.

With the second moments H = XᵀX of a matrix's inputs, rounding w to q costs (w - q) H (w - q)ᵀ a row. The best answer of
the later columns to a change of the first is linear; all these answers are the rows of the Cholesky factor of H⁻¹.
Then each code is looked at once more, now that all others are known, and the scales are fitted together: 6 % less error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import InputError
from ..tfm_model.blocks import BlockFormat, Blocks, concat
from .rounding import divisor, positive, search_grid, to_steps

_DAMPING = 0.1  # of the mean of H's diagonal: what is not believed of a short text (0.01 to 0.3 were tried)
_ROWS = 4096  # at a time, so that a block of columns stays in the cache
_SYSTEMS = 2**23  # numbers of the equations for the scales of as many rows


class CalibrationError(InputError):
    """The text cannot calibrate the model."""


@dataclass(frozen=True, slots=True)
class _Rounded:
    """Rows that are being rounded; w ≈ steps * scales, block by block."""

    w: Tensor  # (out, in)
    steps: Tensor  # (out, n_blocks, block): codes less their zero
    scales: Tensor  # (out, n_blocks)
    zeros: Tensor  # (out, n_blocks)

    @property
    def error(self) -> Tensor:
        return self.w - (self.steps * self.scales[..., None]).flatten(1)

    def blocks(self, format_: BlockFormat) -> Blocks:
        codes = (self.steps + self.zeros[..., None]).to(torch.uint8)
        zeros = self.zeros.to(torch.uint8) if format_.zero_points else None
        return Blocks(format_, codes, self.scales, zeros)


def round_gptq(w: Tensor, moments: Tensor, format_: BlockFormat, name: str = "the matrix") -> Blocks:
    """w (out, in), moments (in, in)."""
    format_.check(name, tuple(w.shape))
    moments = _damped(moments, name)
    answers, moments = _answers(moments), moments.float()
    step = max(1, min(_ROWS, _SYSTEMS // (w.shape[1] // format_.block) ** 2))
    parts = []
    for first in range(0, len(w), step):
        rounded = _round_rows(w[first : first + step].float(), answers, format_)
        _sweep(rounded, moments, format_)
        _refit(rounded, moments)
        parts.append(rounded.blocks(format_))
    return concat(parts)


def _damped(moments: Tensor, name: str) -> Tensor:
    """In float64, with a diagonal of 1 in the mean before damping."""
    mean = moments.diagonal().double().mean()
    if not torch.isfinite(mean):
        raise CalibrationError(f"the inputs of {name} are not finite on this text; give another one")
    moments = moments.double() / (mean if mean > 0 else 1.0)
    moments.diagonal().add_(_DAMPING)
    return moments


def _answers(moments: Tensor) -> Tensor:
    """The upper factor U of H⁻¹ = UᵀU: when column i is off by e, column j > i best moves by -e U[i, j] / U[i, i]."""
    lower: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)))
    return lower.T.float().contiguous()


def _round_rows(w: Tensor, answers: Tensor, format_: BlockFormat) -> _Rounded:
    # The error of a column costs its square over that of U's diagonal, once the later ones have answered.
    importance = positive(answers.diagonal().pow(-2))
    rest, steps, grids = w.clone(), [], []
    for first in range(0, w.shape[1], format_.block):
        here, after = slice(first, first + format_.block), slice(first + format_.block, None)
        scale, zero = search_grid(rest[:, here], format_, importance[here])
        columns = rest[:, here].T.contiguous()  # (block, out)
        found, lost = torch.empty_like(columns), torch.empty_like(columns)
        for i, (column, row) in enumerate(zip(columns, answers[here, here], strict=True)):
            found[i] = to_steps(column[:, None], (scale, zero), format_)[:, 0]
            lost[i] = (column - found[i] * scale) / row[i]
            columns[i + 1 :].addr_(row[i + 1 :], lost[i], alpha=-1)
        rest[:, after] -= lost.T @ answers[here, after]
        steps.append(found.T)
        grids.append((scale, zero))
    scales, zeros = (torch.stack(part, dim=1) for part in zip(*grids, strict=True))
    return _Rounded(w, torch.stack(steps, dim=1), scales, zeros)


def _sweep(rounded: _Rounded, moments: Tensor, format_: BlockFormat) -> None:
    """Move each code to where the error is least as long as all others stay."""
    error = rounded.error
    for block in range(rounded.steps.shape[1]):
        here = slice(block * format_.block, (block + 1) * format_.block)
        own, scale, zero = moments[here, here], rounded.scales[:, block], rounded.zeros[:, block]
        slope = moments[here] @ error.T  # (block, out): what a step of each would bring
        steps = rounded.steps[:, block].T.contiguous()
        for i, row in enumerate(own):
            best = (steps[i] + slope[i] / (row[i] * divisor(scale))).round_()
            moved = best.add_(zero).clamp_(0, format_.top).sub_(zero).sub_(steps[i])
            steps[i] += moved
            slope.addr_(row, moved * scale, alpha=-1)
        rounded.steps[:, block] = steps.T
        error[:, here] = rounded.w[:, here] - steps.T * scale[:, None]


def _refit(rounded: _Rounded, moments: Tensor) -> None:
    """The scales of a row that are best together: n_blocks linear equations for how each moves."""
    steps, (_, n_blocks, size) = rounded.steps, rounded.steps.shape
    flat = steps.flatten(1)
    # From the error, which is small: at 8 bits, float32 would lose it in a sum over the weights themselves.
    wanted = ((rounded.error @ moments) * flat).reshape(steps.shape).sum(dim=-1).double()  # (out, n_blocks)
    system = torch.empty(len(steps), n_blocks, n_blocks, dtype=torch.float64)
    for block in range(n_blocks):
        seen = steps[:, block] @ moments[block * size : (block + 1) * size]  # (out, in)
        system[:, block] = (seen * flat).reshape(steps.shape).sum(dim=-1)
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += diagonal.mean(dim=1, keepdim=True) * 1e-6 + 1e-12  # a block of zeros keeps its scale
    rounded.scales.add_(torch.linalg.solve(system, wanted))
