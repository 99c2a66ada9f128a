"""Lets a little text run through a decoder, layer by layer: how to round its matrices, and how far its cache reaches.

Each layer sees what the layers before it give once they are rounded. One layer is in memory at a time, and the rounded
matrices, a byte a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..tfm_model.blocks import BlockFormat, Blocks
from ..tfm_model.config import ModelConfig
from ..tfm_model.layers import Linear
from ..tfm_model.transformer import Block
from .gptq import CalibrationError, round_gptq
from .layer_walk import LayerWalk, Ranges
from .progress import Progress
from .rounding import round_search

WINDOW = 512  # tokens that see each other
TOKENS = 16384  # that are looked at, if the text has as many
LEAST_TOKENS = 2048

Formats = Callable[[str], BlockFormat | None]  # of a matrix by its name; None: it stays as it is


@dataclass(frozen=True, slots=True)
class Calibration:
    blocks: dict[str, Blocks] = field(default_factory=dict)
    ranges: list[Ranges] = field(default_factory=list)  # layer by layer


def calibration_windows(token_ids: Sequence[int], context: int) -> Tensor:
    """(n, T) pieces of a text, spread evenly over it."""
    found = len(token_ids)
    if found < LEAST_TOKENS:
        raise CalibrationError(
            f"the text to calibrate with has {found:,} tokens, wanted at least {LEAST_TOKENS:,}; give a longer one"
        )
    T = min(WINDOW, context)
    starts = torch.linspace(0, found - T, min(found, TOKENS) // T).long()
    return torch.tensor(token_ids)[starts[:, None] + torch.arange(T)]


@torch.no_grad()
def calibrate(
    config: ModelConfig,
    read: Callable[[str, torch.dtype], Tensor],
    windows: Tensor,  # (n, T) token ids
    formats: Formats,
    progress: Progress,
) -> Calibration:
    """Of a decoder that is stamped (see `can_stamp`). The embedding, if it is no head too, is rounded by search."""
    walk, found = LayerWalk(config, read, windows), Calibration()
    progress.stage("calibrating", config.n_layers + 1)
    for layer, block in walk:
        wanted = _linears(block, layer, formats)
        if wanted:
            found.blocks.update(_round_linears(walk, block, wanted))
        found.ranges.append(walk.run(block))
        progress.advance()
    found.blocks.update(_round_ends(walk, formats))
    progress.advance()
    return found


def _linears(block: Block, layer: int, formats: Formats) -> dict[str, tuple[Linear, BlockFormat]]:
    """The linear maps of a layer that are to be rounded, by their weights' names."""
    found = {}
    for name, module in block.named_modules():
        whole = f"blocks.{layer}.{name}.weight"
        format_ = formats(whole) if isinstance(module, Linear) else None
        if isinstance(module, Linear) and format_ is not None:
            found[whole] = module, format_
    return found


def _round_linears(
    walk: LayerWalk, block: Block, wanted: dict[str, tuple[Linear, BlockFormat]]
) -> dict[str, Blocks]:
    """And leaves the rounded weights in the block."""
    moments = {
        name: torch.zeros(module.in_features, module.in_features) for name, (module, _) in wanted.items()
    }
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: _add_moments(moments[name], args[0]))
        for name, (module, _) in wanted.items()
    ]
    walk.look(block)
    for hook in hooks:
        hook.remove()
    rounded = {}
    for name, (module, format_) in wanted.items():
        rounded[name] = round_gptq(module.weight, moments.pop(name), format_, name)
        module.weight = nn.Parameter(rounded[name].dequantised(), requires_grad=False)
    return rounded


def _add_moments(total: Tensor, x: Tensor) -> None:
    flat = x.flatten(0, -2)
    total.addmm_(flat.T, flat)


def _round_ends(walk: LayerWalk, formats: Formats) -> dict[str, Blocks]:
    """The head by what reaches it; a table that is only looked up by itself."""
    ends, rounded = walk.ends, {}
    if (format_ := formats(walk.head)) is not None:
        assert ends.head.weight is not None
        moments = torch.zeros(ends.config.width, ends.config.width)
        for x in walk.head_inputs():
            _add_moments(moments, x)
        rounded[walk.head] = round_gptq(ends.head.weight, moments, format_, walk.head)
    if walk.head != "embed.weight" and (format_ := formats("embed.weight")) is not None:
        rounded["embed.weight"] = round_search(ends.embed.weight, format_, "embed.weight")
    return rounded
