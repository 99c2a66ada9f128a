"""What goes into the first block: tokens, vectors or patches as vectors of the model's width, with positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import ops
from .config import ModelConfig, PatchInputs, PositionConfig, TokenInputs
from .layers import Linear


class Embedding(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        inputs, width = config.inputs, config.embedding_width
        if isinstance(inputs, TokenInputs):
            self.weight = nn.Parameter(torch.randn(inputs.vocab_size, width), requires_grad=inputs.learned)
        elif isinstance(inputs, PatchInputs):
            self.project: Linear | None = Linear(inputs.patch_size, width, bias=inputs.bias)
            self.class_token = nn.Parameter(torch.randn(width)) if inputs.class_token else None
        else:
            self.project = Linear(inputs.features, width, bias=inputs.bias) if inputs.projected else None
        self.positions = Positions(config, config.positions) if config.positions is not None else None

    def forward(self, inputs: Tensor, position_ids: Tensor | None) -> Tensor:
        x = self.vectors(inputs)
        return x if self.positions is None else self.positions(x, position_ids)

    def vectors(self, inputs: Tensor) -> Tensor:
        kind = self.config.inputs
        if isinstance(kind, TokenInputs):
            x = ops.embedding(inputs, self.weight)
            return x if kind.scale is None else x * kind.scale
        if isinstance(kind, PatchInputs):
            inputs = ops.patches(inputs, kind.patch)
        x = inputs if self.project is None else self.project(inputs)
        if isinstance(kind, PatchInputs) and self.class_token is not None:
            x = ops.prepend(x, self.class_token)
        return x


class Positions(nn.Module):
    """Tables have a row for each place of the context; a one-hot vector times a matrix is a row of it."""

    table: Tensor

    def __init__(self, config: ModelConfig, positions: PositionConfig) -> None:
        super().__init__()
        self.config, self.kind = config, positions.kind
        width, m, context = config.width, positions.features, config.context
        self.features = Linear(width, m, bias=False) if m is not None else None  # W_x
        self.mix = Linear(m, width, bias=False) if m is not None else None  # W_z or W_zx
        if positions.kind == "learned":
            self.weight = nn.Parameter(torch.randn(context, width))
        elif m is not None and positions.kind in {"joint", "separate"}:
            self.weight = nn.Parameter(torch.randn(context, m))  # W_e
        if positions.kind == "separate":
            assert m is not None
            self.mix_positions = Linear(m, width, bias=False)  # W_ze
        self.has_table = positions.kind in {"one_hot", "sinusoidal"}
        if self.has_table:
            self.set_table(torch.get_default_dtype())

    def set_table(self, dtype: torch.dtype) -> None:
        """Rounded once, from float64."""
        self.register_buffer("table", position_table(self.config).to(dtype), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        if self.kind == "one_hot":
            return torch.cat((x, self._rows(self.table, x, position_ids)), dim=-1)
        if self.kind == "learned":
            return x + self._rows(self.weight, x, position_ids)
        if self.features is not None and self.mix is not None:
            x = self.features(x)
            if self.kind == "joint":
                joint: Tensor = self.mix(torch.relu(x + self._rows(self.weight, x, position_ids)))
                return joint
            x = self.mix(torch.relu(x))
        if self.kind == "sinusoidal":
            return x + self._rows(self.table, x, position_ids)
        separate: Tensor = self.mix_positions(torch.relu(self._rows(self.weight, x, position_ids)))
        return x + separate

    def _rows(self, table: Tensor, x: Tensor, position_ids: Tensor | None) -> Tensor:
        """A row for each element; an image has all places, always."""
        if position_ids is not None:
            return ops.embedding(position_ids, table)
        return table[None] + x[..., :1] * 0.0 if self.kind == "one_hot" else table[None]


def position_table(config: ModelConfig) -> Tensor:
    """What is not learned, in float64: sinusoids, or one-hot vectors. (context, width or context)."""
    assert config.positions is not None
    if config.positions.kind == "one_hot":
        return torch.eye(config.context, dtype=torch.float64)
    return sinusoids(config.context, config.width, config.positions.base)


def sinusoids(context: int, width: int, base: float) -> Tensor:
    """p[k, 2i] = sin(k / base^(2i/width)), p[k, 2i+1] = cos(the same), float64, (context, width)."""
    rates = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), rates)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
