"""Windows of a text on their way through a decoder, all through one layer before the next is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..tfm_model.config import ModelConfig
from ..tfm_model.layers import Reads
from ..tfm_model.transformer import Block, Transformer
from .arithmetic import EXACT
from .decoder_reference import DecoderReference

Ranges = tuple[Tensor, Tensor]  # the largest magnitudes of keys (turned) and values, (H_kv, D) each


class LayerWalk:
    """Of a decoder that is stamped (see `can_stamp`); `read(name, dtype)` gives its weights."""

    def __init__(
        self, config: ModelConfig, read: Callable[[str, torch.dtype], Tensor], windows: Tensor
    ) -> None:
        """`windows`: (n, T) token ids."""
        self._reference = DecoderReference(config, torch.float32, read)
        self.ends: Transformer = self._reference.part(0, torch.float32, EXACT)  # all but the layers
        places = torch.arange(windows.shape[1])[None]
        self.hidden = [self.ends.embedding(row[None], places) for row in windows]  # (1, T, width) each
        self._reads = self.reads(windows.shape[1])

    def reads(self, length: int) -> Reads:
        """What a layer reads beside `length` tokens."""
        places = torch.arange(length)[None]
        return Reads(torch.ones_like(places), places, self.ends.rotary(places))

    def __iter__(self) -> Iterator[tuple[int, Block]]:
        """Layer by layer; `hidden` is what reaches it. Call `run` for each, before the next is asked for."""
        for layer in range(self._reference.config.n_layers):
            block = self._reference.part(layer + 1, torch.float32, EXACT).blocks[0]
            assert isinstance(block, Block)
            yield layer, block

    @property
    def head(self) -> str:
        """The name of its matrix."""
        return "embed.weight" if self.ends.config.head.tied else "head.weight"

    def head_inputs(self) -> Iterator[Tensor]:
        """What reaches it, once all layers have run."""
        for x in self.hidden:
            yield x if self.ends.norm is None else self.ends.norm(x)

    def look(self, block: Block) -> tuple[list[Tensor], Ranges]:
        """What the layer makes of `hidden`, and how far its keys and values reach."""
        outputs, tops = [], []
        for x in self.hidden:
            y, (key, value), _ = block(x, self._reads, [])
            outputs.append(y)
            tops.append([part.abs().amax(dim=(0, 2)) for part in (key, value)])  # (H_kv, D) each
        keys, values = (torch.stack(parts).amax(dim=0) for parts in zip(*tops, strict=True))
        return outputs, (keys, values)

    def run(self, block: Block) -> Ranges:
        """Go on to the next layer."""
        self.hidden, ranges = self.look(block)
        return ranges
