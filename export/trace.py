"""PyTorch → onnx_ir, once for each distinct fragment of a decoder.

Fragments are traced on a skeleton (one block of each kind) of fake tensors, so that neither time nor memory
grows with the model. What targets lower differently stays one `tfmx::` node each (see tfm_model/ops.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import onnx_ir.passes.common as ir_passes
import torch
from onnxscript.optimizer import fold_constants_ir
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..tfm_model.config import ModelConfig
from ..tfm_model.decoder import Decoder

# What torch.onnx's translation is asked for: no op that a fragment leaves outside domain `tfmx`
# changed between this version and any opset that we write.
TRACE_OPSET = 18

_B, _T, _P = 2, 5, 3  # example sizes; distinct, and above 1, which torch.export would bake in


@dataclass(frozen=True, slots=True)
class Fragment:
    graph: ir.Graph
    weights: dict[str, str]  # initializer → the weight's name in the traced module


@dataclass(frozen=True, slots=True)
class DecoderFragments:
    embedding: Fragment
    rotary: Fragment | None  # position_ids → cos, sin: only where they depend on the length of the text
    blocks: dict[int | None, Fragment]  # by window: what makes one layer's block another graph
    head: Fragment


class _Piece(nn.Module):
    """Lets torch.onnx trace one method of a module; its weights are named `module.…`."""

    def __init__(self, module: nn.Module, method: Callable[..., object]) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def forward(self, *args: Tensor) -> object:
        return self.method(*args)


@functools.cache  # both targets and both graphs are made of the same fragments
def trace_decoder(config: ModelConfig, dtype: torch.dtype) -> DecoderFragments:
    windows = tuple(dict.fromkeys(config.window(layer) for layer in range(config.n_layers)))
    skeleton_config = replace(config, n_layers=len(windows), windows=windows, context=min(config.context, 8))
    with FakeTensorMode(), _default_dtype(dtype):
        skeleton = Decoder(skeleton_config).eval()
        attention = config.attention
        ids = torch.zeros(_B, _T, dtype=torch.int64)
        mask = torch.ones(_B, _P + _T, dtype=torch.int64)
        x = torch.zeros(_B, _T, config.width, dtype=dtype)
        cache = torch.zeros(_B, attention.n_kv_heads, _P, attention.head_dim, dtype=dtype)
        rotary = skeleton.rotary(ids)
        per_token = rotary is not None and not skeleton.has_rotary_tables
        row = (0, 1)
        rotary_axes = [row if per_token else (0,)] * 2 if rotary is not None else []

        def block(layer: int) -> Fragment:
            def run(x: Tensor, mask: Tensor, ids: Tensor, key: Tensor, value: Tensor, *tables: Tensor) -> object:
                return skeleton.blocks[layer](x, mask, ids, tables or None, key, value)

            return trace(
                skeleton.blocks[layer],
                run,
                [x, mask, ids, cache, cache.clone(), *(rotary or ())],  # one tensor twice would become one input
                [row, row, row, (0, 2), (0, 2), *rotary_axes],
            )

        return DecoderFragments(
            embedding=trace(skeleton, skeleton.embedding, [ids], [row]),
            rotary=trace(skeleton, skeleton.rotary, [ids], [row]) if per_token else None,
            blocks={window: block(layer) for layer, window in enumerate(windows)},
            head=trace(skeleton, skeleton.logits, [x], [row]),
        )


def trace(
    module: nn.Module,
    method: Callable[..., object],
    inputs: Sequence[Tensor],
    free_axes: Sequence[Sequence[int]],  # of each input: the axes whose length is not baked in
    opset: int = TRACE_OPSET,
) -> Fragment:
    dynamic = tuple({axis: torch.export.Dim.DYNAMIC for axis in axes} for axes in free_axes)
    with _quiet():
        program = torch.onnx.export(
            _Piece(module, method),
            tuple(inputs),
            dynamo=True,
            optimize=False,  # it would fold weights that are not there
            verbose=False,
            opset_version=opset,
            dynamic_shapes=(dynamic,),
        )
    assert program is not None
    fold_constants_ir(program.model)
    ir_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(program.model)
    ir_passes.RemoveUnusedNodesPass()(program.model)
    graph = program.model.graph
    return Fragment(graph, _weight_names(graph))


def _weight_names(graph: ir.Graph) -> dict[str, str]:
    """Initializers that are weights of the traced module; the others are small constants."""
    names = [name for name in graph.initializers if name is not None]
    return {name: name.removeprefix("module.") for name in names if name.startswith("module.")}


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules are made in the dtype: fake parameters cannot be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx warns about torchvision, axis names and its own deprecated calls; none of it is the user's."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
