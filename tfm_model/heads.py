"""What the last block's vectors become: tokens, classes, values, an embedding, or themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import ops
from .config import ModelConfig


class Head(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, head = config, config.head
        self.weight = self.bias = None
        if head.kind in {"tokens", "classes", "values"}:
            linear = nn.Linear(config.width, config.output_size, bias=head.bias)
            self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """x (B, T, N) → (B, T, size), or pooled (B, size); float32 or wider."""
        head = self.config.head
        if head.pooling != "none":
            x = pool(x, attention_mask, head.pooling)
            if self.config.kind == "decoder":
                x = x[:, None]  # (B, 1, N): a decoder gives columns
        y = x if self.weight is None else ops.linear(x, self.weight, self.bias)
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        if head.softcap is not None:
            y = head.softcap * torch.tanh(y / head.softcap)
        if head.normalized:
            y = y / y.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-12)
        return y


def pool(x: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    """One vector for each sequence, (B, N); pads do not count."""
    if pooling == "class_token":
        return x[:, 0]
    if attention_mask is None:  # an image: all is real
        return {"mean": x.mean(1), "max": x.amax(1), "last": x[:, -1]}[pooling]
    mask = ops.new_mask(attention_mask, x)
    real = mask[..., None] == 1  # (B, T, 1)
    if pooling == "max":
        return torch.where(real, x, torch.finfo(x.dtype).min).amax(1)
    if pooling == "last":  # the one with no real one behind it
        behind = mask.sum(1, keepdim=True) - mask.cumsum(1)
        real = real & (behind[..., None] == 0)
    total = torch.where(real, x, 0.0).sum(1)
    return total if pooling == "last" else total / real.to(x.dtype).sum(1)
