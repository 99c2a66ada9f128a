"""Evens channels out between activations and weights, so that both lose less when they are rounded.

A block of activations, or of a matrix's row, is rounded by its largest number, so one large channel costs all its
neighbours their precision. What a norm gives is therefore divided, channel by channel, by about the square root of
its size, and the matrix that reads it multiplied; the same between the two matrices of a gated MLP. The factors are
powers of two: the model computes the same to the bit, and a bundle's factors can be read off its weights.

(Activation-aware scaling as in AWQ, at both ends as in SmoothQuant, with a fixed exponent: on SmolLM2-135M it takes
the divergence of int8 from 0.0040 to 0.0019, of symmetric int4 from 0.41 to 0.28, and to 0.19 where the errors of a
block's search are weighted by the squares of the inputs, which the same text shows: `tfmx verify --quality`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..tfm_model.checkpoint import Checkpoint, LazyTensor
from ..tfm_model.config import ModelConfig
from ..tfm_model.layers import Linear, Reads
from ..tfm_model.transformer import Block
from .layer_walk import LayerWalk
from .parity_error import ParityError
from .progress import Progress
from .stored import StoredMatrices

EXPONENT = 0.5  # of a channel's size: 0.25 and 0.75 lose more
WINDOWS = 4  # of the text: sizes need less of it than ranges or moments
LIMIT = 8  # steps of two, either way
LEAST = 2.0**-8  # of the median size: what a text never used, another may
SAME = 1e-4  # of the largest number: what float32 may make of another order of sums, and no more

CHECKED = 2  # tokens, so that attention has something to choose from

Read = Callable[[str, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Powers of two that tensors are multiplied by: rows of matrices (or entries of vectors), and columns."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    importance: dict[str, Tensor] = field(
        default_factory=dict
    )  # of a matrix's inputs: their squares, evened out

    def applied(self, name: str, values: Tensor) -> Tensor:
        if name in self.columns:
            values = values * self.columns[name]
        if name in self.rows:
            values = values * self.rows[name].reshape(-1, *[1] * (values.dim() - 1))
        return values

    def smoothed(self, checkpoint: Checkpoint) -> Checkpoint:
        """The same model, its tensors evened out as they are read."""
        changed = self.rows.keys() | self.columns.keys()
        tensors = {
            name: self._lazy(name, tensor) if name in changed else tensor
            for name, tensor in checkpoint.tensors.items()
        }
        return replace(checkpoint, tensors=tensors)

    def _lazy(self, name: str, tensor: LazyTensor) -> LazyTensor:
        return replace(
            tensor, read=lambda: self.applied(name, tensor.read())
        )  # its blocks, if any, are not kept

    def add(self, layer: int, pair: _Pair, factors: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """The writer gives a factor less, the reader takes a factor more."""
        self.columns[f"blocks.{layer}.{pair.reader}.weight"] = factors
        for part in ("weight", "bias"):
            name = f"{pair.writer}.{part}"
            if name in tensors:  # a gated MLP's first half goes through the activation, and stays
                untouched = torch.ones(len(tensors[name]) - len(factors))
                self.rows[f"blocks.{layer}.{name}"] = torch.cat([untouched, 1 / factors])


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two parts of a block with nothing but a multiplication between them."""

    writer: str
    reader: str
    by_norm: bool


def _pairs(config: ModelConfig) -> list[_Pair]:
    found = []
    if config.norm_order == "pre":
        found.append(_Pair("attention_norm", "attention.qkv", True))
        if config.mlp is not None:
            found.append(_Pair("mlp_norm", "mlp.up", True))
    if config.mlp is not None and config.mlp.gated and config.mlp.hidden_layers == 1:
        found.append(_Pair("mlp.up", "mlp.down", False))
    return found


@torch.no_grad()
def find_smoothing(
    config: ModelConfig, read: Read, windows: Tensor, is_rounded: Callable[[str], bool], progress: Progress
) -> Smoothing:
    """By what the model computes for windows (n, T) of token ids. `is_rounded`: a matrix, by its name."""
    found = Smoothing()
    walk = LayerWalk(config, read, windows[:: -(-len(windows) // WINDOWS)])
    progress.stage("evening out", config.n_layers)
    for layer, block in walk:
        linears = {name: module for name, module in block.named_modules() if isinstance(module, Linear)}
        squares = {name: torch.zeros(module.in_features) for name, module in linears.items()}
        hooks = [
            linears[name].register_forward_pre_hook(lambda _, args, total=total: _add_squares(total, args[0]))
            for name, total in squares.items()
        ]
        walk.run(block)
        for hook in hooks:
            hook.remove()
        tensors = dict(block.named_parameters())
        for pair in _pairs(config):
            if not _may_change(layer, pair, is_rounded):
                continue
            factors = _factors(squares[pair.reader].sqrt())
            written = tensors[f"{pair.writer}.weight"][-len(factors) :].reshape(len(factors), -1)
            factors[(written == 0).all(dim=1)] = 1  # where nothing passes, nothing could be read off
            found.add(layer, pair, factors, tensors)
        for name, total in squares.items():
            whole = f"blocks.{layer}.{name}.weight"
            found.importance[whole] = total / found.columns[whole] ** 2 if whole in found.columns else total
        check_same(block, layer, found, walk.reads(CHECKED))
        progress.advance()
    found.importance[walk.head] = torch.zeros(config.width)
    for x in walk.head_inputs():
        _add_squares(found.importance[walk.head], x)
    return found


@torch.no_grad()
def recover_smoothing(
    config: ModelConfig, read: Read, stored: StoredMatrices, progress: Progress
) -> Smoothing:
    """The one that a bundle was made with, from its weights and its source's."""
    found = Smoothing()
    walk = LayerWalk(config, read, torch.zeros(1, CHECKED, dtype=torch.long))
    progress.stage("finding what was evened out", config.n_layers)
    for layer, block in walk:
        tensors = dict(block.named_parameters())
        for pair in _pairs(config):
            if not _may_change(layer, pair, stored.__contains__):
                continue
            name = f"{pair.writer}.weight"
            whole = f"blocks.{layer}.{name}"
            w = found.applied(whole, tensors[name])
            own = stored.vector(whole) if pair.by_norm else stored.read(whole)
            if own.shape != w.shape:
                continue  # another model: the gate says so
            found.add(layer, pair, _ratio(w, own)[-_width(block, pair) :], tensors)
        walk.run(block)
        check_same(block, layer, found, walk.reads(CHECKED))
        progress.advance()
    return found


def _width(block: Block, pair: _Pair) -> int:
    reader = block.get_submodule(pair.reader)
    assert isinstance(reader, Linear)
    return reader.in_features


def _add_squares(total: Tensor, x: Tensor) -> None:
    total += x.square().sum(dim=(0, 1))


def _may_change(layer: int, pair: _Pair, is_rounded: Callable[[str], bool]) -> bool:
    matrices = [pair.reader] if pair.by_norm else [pair.writer, pair.reader]
    return all(is_rounded(f"blocks.{layer}.{name}.weight") for name in matrices)


def _factors(sizes: Tensor) -> Tensor:
    """About the sizes to the power of EXPONENT, around 1."""
    sizes = sizes.clamp_min(max(float(sizes.median()) * LEAST, 1e-20))
    steps = EXPONENT * sizes.log2()
    return torch.exp2((steps - steps.median()).round().clamp(-LIMIT, LIMIT))


def _ratio(w: Tensor, own: Tensor) -> Tensor:
    """How many times each row of w (or entry) is its own in the bundle, to the nearest power of two."""
    w, own = w.reshape(len(w), -1).double(), own.reshape(len(own), -1).double()
    products = (w * own).sum(dim=1)
    ratios = (w * w).sum(dim=1) / products.where(products > 0, 1)
    return torch.exp2(
        ratios.where((ratios > 0) & (products > 0), 1).log2().round().clamp(-LIMIT, LIMIT)
    ).float()


def check_same(block: Block, layer: int, smoothing: Smoothing, reads: Reads) -> None:
    """The layer computes what it did; parity alone would not see it, for PyTorch then has the same weights."""
    assert reads.position_ids is not None
    shape = (1, reads.position_ids.shape[1], len(block.attention_norm.weight))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(layer))
    changed = {
        name: smoothing.applied(f"blocks.{layer}.{name}", values) for name, values in block.named_parameters()
    }
    plain = block(x, reads, [])[0]
    other = torch.func.functional_call(block, changed, (x, reads, []))[0]
    if not float((other - plain).abs().max()) <= SAME * float(plain.abs().max()):
        raise ParityError(
            f"layer {layer} computes something else after its channels were evened out; please report it"
        )
