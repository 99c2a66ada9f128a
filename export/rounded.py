"""What quantised graphs round on the way, done to a PyTorch model: so the gate knows which error is theirs by right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..tfm_model.heads import Head
from ..tfm_model.layers import Linear
from .layout import BlockLayout
from .parity_error import ParityError

INT8_TOP = 127
MOST_LOST = 0.1  # of keys or values, root mean square, by rounding and cutting off


def round_inputs(model: nn.Module, layout_of: Callable[[str], BlockLayout | None]) -> None:
    """Inputs of linear maps become int8, each block by its largest (or two int8, `fine`); `layout_of` a weight by its name, if quantised.

    (A head that pools rounds what is pooled, here each vector before: alike, or less.)
    """
    for name, module in model.named_modules():
        if not isinstance(module, Linear | Head) or module.weight is None:
            continue
        layout = layout_of(f"{name}.weight")
        if layout is not None:
            module.register_forward_pre_hook(
                lambda _, args, layout=layout: (_rounded_as(layout, args[0]), *args[1:])
            )


class RoundedInputs(TorchFunctionMode):
    """The same where modules are not ours: every `F.linear` whose weight has blocks, whoever calls it.

    What PyTorch calls inside its own functions (of nn.MultiheadAttention, say) is not seen.
    """

    def __init__(self, layout_of: Callable[[object], BlockLayout | None]) -> None:
        super().__init__()
        self._layout_of = layout_of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 (its name in PyTorch)
        layout = self._layout_of(weight)
        return F.linear(input if layout is None else _rounded_as(layout, input), weight, bias)


def _rounded_as(layout: BlockLayout, x: Tensor) -> Tensor:
    block = layout.format.block
    first = rounded_blocks(x, block)
    return first + rounded_blocks(x - first, block) if layout.fine else first


def rounded_blocks(x: Tensor, block: int) -> Tensor:
    wide = x.to(
        torch.promote_types(x.dtype, torch.float32)
    )  # half precision has no scale for a block of zeros
    blocks = wide.reshape(*x.shape[:-1], -1, block)
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / INT8_TOP).clamp_min(1e-30)
    return ((blocks / scale).round() * scale).reshape(x.shape).to(x.dtype)


def rounded_cache(values: Tensor, scales: Tensor, what: str) -> Tensor:
    """Keys or values (B, H_kv, P, D) as a cache of int8 holds them; scales (1, H_kv, 1, D)."""
    scales = scales.to(values.dtype)
    kept = (values / scales).round().clamp(-INT8_TOP - 1, INT8_TOP) * scales
    lost = (kept - values).norm(dim=(1, 3)) / values.norm(dim=(1, 3)).clamp_min(1e-30)  # (B, P)
    usual = float(lost.quantile(0.25)) if lost.numel() else 0.0  # pads are far out of range, on purpose
    if not usual <= MOST_LOST:  # PyTorch and the graphs would lose it alike, and agree
        raise ParityError(f"an int8 cache loses {usual:.2g} of the {what}, {MOST_LOST} is allowed")
    return kept
