"""PyTorch → onnx_ir, once for each distinct fragment of a decoder.

Fragments are traced on a skeleton (one block of each kind) of fake tensors, so that neither time nor memory
grows with the model. What targets lower differently stays one `tfmx::` node each (see tfm_model/ops.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as ir_passes
import torch
from onnxscript.optimizer import fold_constants_ir
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..tfm_model.config import ModelConfig
from ..tfm_model.layers import Reads
from ..tfm_model.transformer import Transformer

# What torch.onnx's translation is asked for: no op that a fragment leaves outside domain `tfmx`
# changed between this version and any opset that we write.
TRACE_OPSET = 18

Translations = Mapping[Callable[..., Any], Callable[..., Any]]

_B, _T, _P = 2, 5, 3  # example sizes; distinct, and above 1, which torch.export would bake in


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of a traced graph."""

    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    nodes: Sequence[ir.Node]
    constants: Sequence[ir.Value]
    weights: dict[ir.Value, str]  # initializer → the weight's name in the piece


@dataclass(frozen=True, slots=True)
class DecoderFragments:
    embedding: Fragment  # of input_ids and position_ids
    rotary: Fragment | None  # position_ids → cos, sin: only where they depend on the length of the text
    blocks: dict[int | None, Fragment]  # by window: what makes one layer's block another graph
    head: Fragment


@dataclass(frozen=True, slots=True)
class Piece:
    name: str
    run: Callable[..., object]
    inputs: Sequence[Tensor]
    free_axes: Sequence[Sequence[int]]  # of each input: the axes whose length is not baked in
    n_outputs: int
    prefix: str = ""  # of its weights' names in the skeleton


@functools.cache  # both targets and both graphs are made of the same fragments
def trace_decoder(config: ModelConfig, dtype: torch.dtype) -> DecoderFragments:
    """All pieces in one trace, side by side: most of a trace's time does not depend on what is traced."""
    windows = tuple(dict.fromkeys(config.window(layer) for layer in range(config.n_layers)))
    shown = tuple(range(len(windows))) if config.attention_outputs else ()
    skeleton_config = replace(config, n_layers=len(windows), windows=windows, attention_outputs=shown)
    if config.positions is None:
        skeleton_config = replace(skeleton_config, context=min(config.context, 8))
    with FakeTensorMode(), default_dtype(dtype):
        skeleton = Transformer(skeleton_config).eval()
        pieces = _pieces(skeleton, dtype)
        fragments = trace_pieces(skeleton, pieces)
    return DecoderFragments(
        embedding=fragments["embedding"],
        rotary=fragments.get("rotary"),
        blocks={window: fragments[f"blocks.{i}"] for i, window in enumerate(windows)},
        head=fragments["head"],
    )


def _pieces(skeleton: Transformer, dtype: torch.dtype) -> list[Piece]:
    attention, row = skeleton.config.attention, (0, 1)

    def ids() -> Tensor:  # a tensor given twice would become one input
        return torch.zeros(_B, _T, dtype=torch.int64)

    def x() -> Tensor:
        return torch.zeros(_B, _T, skeleton.config.width, dtype=dtype)

    def cache() -> Tensor:
        return torch.zeros(_B, attention.n_kv_heads, _P, attention.head_dim, dtype=dtype)

    def block(index: int) -> Piece:
        def run(x: Tensor, mask: Tensor, ids: Tensor, key: Tensor, value: Tensor, *rotary: Tensor) -> object:
            reads = Reads(mask, ids, (rotary[0], rotary[1]) if rotary else None)
            x, state, weights = skeleton.blocks[index](x, reads, [key, value])
            return x, *state, *(part for part in weights if part is not None)

        tables = [table.clone() for table in skeleton.rotary(ids()) or ()]
        mask = torch.ones(_B, _P + _T, dtype=torch.int64)
        table_axes = [(0,) if skeleton.has_rotary_tables else row for _ in tables]
        inputs = [x(), mask, ids(), cache(), cache(), *tables]
        name, axes = f"blocks.{index}", [row, row, row, (0, 2), (0, 2), *table_axes]
        n_outputs = 4 if skeleton.config.attention_outputs else 3
        return Piece(name, run, inputs, axes, n_outputs, prefix=f"{name}.")

    pieces = [
        Piece("embedding", skeleton.embedding, [ids(), ids()], [row, row], 1),
        *[block(index) for index in range(len(skeleton.blocks))],
        Piece("head", skeleton.logits, [x()], [row], 1),
    ]
    if attention.rotary is not None and not skeleton.has_rotary_tables:
        pieces.append(Piece("rotary", skeleton.rotary, [ids()], [row], 2))
    return pieces


def trace_pieces(
    module: nn.Module,
    pieces: Sequence[Piece],
    opset: int = TRACE_OPSET,
    translations: Translations = MappingProxyType({}),
) -> dict[str, Fragment]:
    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        rest = iter(arguments)
        results: list[Tensor] = []
        for piece in pieces:
            result = piece.run(*itertools.islice(rest, len(piece.inputs)))
            results += [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
        return tuple(results)

    inputs = [value for piece in pieces for value in piece.inputs]
    axes = [axes for piece in pieces for axes in piece.free_axes]
    graph = trace(module, run, inputs, axes, opset, translations)
    graph_inputs, graph_outputs = iter(graph.inputs), iter(graph.outputs)
    return {
        piece.name: cut(
            list(itertools.islice(graph_inputs, len(piece.inputs))),
            list(itertools.islice(graph_outputs, piece.n_outputs)),
            piece.prefix,
        )
        for piece in pieces
    }


class _Traced(nn.Module):
    """Lets torch.onnx trace a function of a module; the module's weights are named `module.…`."""

    def __init__(self, module: nn.Module, run: Callable[..., object]) -> None:
        super().__init__()
        self.module = module
        self.run = run

    def forward(self, *args: Tensor) -> object:
        return self.run(*args)


def trace(
    module: nn.Module,
    run: Callable[..., object],
    inputs: Sequence[Tensor],
    free_axes: Sequence[Sequence[int]],
    opset: int = TRACE_OPSET,
    translations: Translations = MappingProxyType({}),
) -> ir.Graph:
    """`translations`: ops of PyTorch that become other nodes than torch.onnx would make of them."""
    dynamic = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in free_axes)
    with _quiet():
        program = torch.onnx.export(
            _Traced(module, run),
            tuple(inputs),
            dynamo=True,
            optimize=False,  # it would fold weights that are not there
            verbose=False,
            opset_version=opset,
            dynamic_shapes=(dynamic,),
            custom_translation_table=dict(translations),
        )
        assert program is not None
        # an own matrix that is also read in another way (x @ table.T) stays one: folded, it would be two
        fold_constants_ir(
            program.model, should_fold=lambda node: False if translations and _reads_matrix(node) else None
        )
        ir_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(program.model)
        ir_passes.RemoveUnusedNodesPass()(program.model)
    return program.model.graph


def cut(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], prefix: str = "") -> Fragment:
    """What lies between inputs and outputs; weights lose the prefix from their names."""
    reached: set[ir.Node] = set()
    open_values = list(outputs)
    while open_values:
        node = open_values.pop().producer()
        if node is not None and node not in reached:
            reached.add(node)
            open_values += [value for value in node.inputs if value is not None]
    graph = next(iter(reached)).graph if reached else ()
    assert graph is not None
    nodes = [node for node in graph if node in reached]
    known = dict.fromkeys(
        value for node in nodes for value in node.inputs if value and value.const_value is not None
    )
    weights = {value: str(value.name).removeprefix("module.") for value in known if _is_weight(value)}
    return Fragment(
        inputs=inputs,
        outputs=outputs,
        nodes=nodes,
        constants=[value for value in known if value not in weights],
        weights={value: name.removeprefix(prefix) for value, name in weights.items()},
    )


def _reads_matrix(node: ir.Node) -> bool:
    return any(value and _is_weight(value) and len(value.shape or ()) == 2 for value in node.inputs)


def _is_weight(value: ir.Value) -> bool:
    return str(value.name).startswith("module.")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules are made in the dtype: fake parameters cannot be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx warns about torchvision, axis names and its own deprecated calls, onnxscript about what it does not fold; none
    of it is the user's."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
