"""What quantised graphs round on the way, done to a PyTorch model: so the gate knows which error is theirs by right."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..tfm_model.layers import Linear
from .layout import BlockLayout

INT8_TOP = 127


def round_inputs(model: nn.Module, layout_of: Callable[[str], BlockLayout | None]) -> None:
    """Inputs of linear maps become int8, each block by its largest; `layout_of` a weight by its name, if quantised."""
    for name, module in model.named_modules():
        layout = layout_of(f"{name}.weight") if isinstance(module, Linear) else None
        if layout is not None:
            block = layout.format.block
            module.register_forward_pre_hook(lambda _, args, block=block: (rounded_blocks(args[0], block),))


def rounded_blocks(x: Tensor, block: int) -> Tensor:
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / INT8_TOP).clamp_min(1e-30)
    return ((blocks / scale).round() * scale).reshape(x.shape)


def rounded_cache(values: Tensor, scales: Tensor) -> Tensor:
    """Keys or values (B, H_kv, P, D) as a cache of int8 holds them; scales (1, H_kv, 1, D)."""
    scales = scales.to(values.dtype)
    return (values / scales).round().clamp(-INT8_TOP - 1, INT8_TOP) * scales
