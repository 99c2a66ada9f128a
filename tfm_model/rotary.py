"""Rotary position embedding: frequencies, tables, and the turn itself.

Angles are computed in float64 and only cos and sin are rounded to the model's dtype: at position 8191
a float32 angle is off by up to 4e-4, a rounded cosine by 6e-8.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attention_config import RotaryConfig, RotaryScaling


def inverse_frequencies(config: RotaryConfig) -> Tensor:
    """Radians per position for each pair of dimensions, float64, (dim/2,). Dynamic scaling starts from these too."""
    plain = config.theta ** -(torch.arange(0, config.dim, 2, dtype=torch.float64) / config.dim)
    scaling = config.scaling
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, config, scaling)


def _llama3(plain: Tensor, scaling: RotaryScaling) -> Tensor:
    """Long waves are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    waves = scaling.original_context * plain / (2 * math.pi)  # how many fit the original context
    keep = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor


def _yarn(plain: Tensor, config: RotaryConfig, scaling: RotaryScaling) -> Tensor:
    """Like llama3, but the blend is linear in the dimension's index (Peng et al. 2023)."""

    def index_of(
        rotations: float,
    ) -> float:  # the (real) pair index that turns so often over the original context
        return (
            config.dim
            * math.log(scaling.original_context / (rotations * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # a step, without a division by zero
    divide = ((torch.arange(config.dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return divide * plain / scaling.factor + (1 - divide) * plain


def rotary_tables(config: RotaryConfig, context: int) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 ... context-1, float64, each (context, dim/2)."""
    angles = torch.outer(torch.arange(context, dtype=torch.float64), inverse_frequencies(config))
    factor = 1.0 if config.scaling is None else config.scaling.attention_factor
    return angles.cos() * factor, angles.sin() * factor


def dynamic_rotary(config: RotaryConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, (B, T, dim/2), with theta stretched by how far past the original context each row has come.

    transformers stretches by the longest row of the batch; per row, a neighbour changes nothing.
    """
    scaling = config.scaling
    assert scaling is not None
    working = torch.float64 if dtype == torch.float64 else torch.float32
    length = (
        (position_ids.amax(dim=1, keepdim=True) + 1).clamp(min=scaling.original_context).to(working)
    )  # (B, 1)
    stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
    theta = config.theta * stretch ** (config.dim / (config.dim - 2))
    exponents = torch.arange(0, config.dim, 2, dtype=working, device=position_ids.device) / config.dim
    frequencies = theta**-exponents  # (B, dim/2)
    angles = position_ids[:, :, None].to(working) * frequencies[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first dim dimensions of x (B, H, T, D) by cos and sin (B, T, dim/2); the halves pair up."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
