"""Fragments → whole graphs: each block stamped once a layer with that layer's weights, in a target's ops.

| graph   | input_ids       | attention_mask | also                                            | logits          |
|---------|-----------------|----------------|-------------------------------------------------|-----------------|
| prefill | (B, T), int64   | (B, P+T)       | num_logits_to_keep: the last n columns, 0 = all | (B, n or T, V)  |
| decode  | (B, 1), int64   | (B, P+1)       |                                                 | (B, 1, V)       |

Both take any past, none included. Without the cache by slots they also take position_ids like input_ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from ..tfm_model.config import ModelConfig
from ..tfm_model.state import StateSpec
from .arithmetic import Arithmetic
from .builder import Builder
from .fitting import keeps_slots
from .layout import BlockLayout, Layout, Target
from .lower_basic import FLOAT, INT64, dims
from .lower_ort import FusedLowering, OrtLowering, fuse_skip_norms
from .lower_portable import PortableLowering
from .trace import DecoderFragments, Fragment

GraphKind = Literal["encode", "prefill", "decode", "select", "sample"]
GRAPHS_OF_KIND: dict[str, tuple[GraphKind, ...]] = {
    "decoder": ("prefill", "decode"),
    "encoder": ("encode",),
    "encoder-decoder": ("encode", "prefill", "decode"),
}
INT8 = ir.DataType.INT8
ROTARY_TABLES = ("rotary.cos", "rotary.sin")
POSITION_TABLE = "embed.positions.table"


class WeightPlan:
    """Which weights the graphs use, under which names and in which layout; the same for all graphs of a bundle."""

    def __init__(
        self, dtype: ir.DataType, tied: Mapping[str, str], blocks: Mapping[str, BlockLayout] | None = None
    ) -> None:
        self.dtype = dtype
        self.tied = tied  # another name of a tensor → its name in the file
        self.blocks = blocks or {}  # matrices that are quantised
        self._columns: set[str] = set()  # matrices of linear layers
        self._tables: set[str] = set()  # what tokens' vectors are gathered from
        self._plain: set[str] = set()  # what anything else reads as it is

    def see(self, fragment: Fragment, prefix: str) -> None:
        """Matrices of linear layers lie transposed, also where an embedding shares them."""
        for node in fragment.nodes:
            for index, value in enumerate(node.inputs):
                if value is None or value not in fragment.weights:
                    continue
                name = self.name(prefix + fragment.weights[value])
                if (node.domain, node.op_type, index) == ("tfmx", "Linear", 1):
                    self._columns.add(name)
                elif (node.domain, node.op_type, index) == ("tfmx", "Embedding", 1):
                    self._tables.add(name)
                else:
                    self._plain.add(name)

    @property
    def can_quantise(self) -> set[str]:
        return (self._columns | self._tables) - self._plain

    def name(self, name: str) -> str:
        return self.tied.get(name, name)

    def layout(self, name: str) -> Layout:
        if name in self._plain:
            return "rows"
        return self.blocks.get(name, "columns" if name in self._columns else "rows")

    def use(self, builder: Builder, name: str, shape: Sequence[int]) -> ir.Value:
        """A matrix in blocks is only a name here: what is read are its parts."""
        return builder.weight(name, self.dtype, self.stored_shape(name, shape))

    def stored_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(reversed(shape)) if self.layout(name) == "columns" else tuple(shape)


def stamp(
    fragment: Fragment, inputs: Sequence[ir.Value], prefix: str, lowering: PortableLowering, plan: WeightPlan
) -> list[ir.Value]:
    """Copy the fragment into the graph under construction; returns its outputs there."""
    builder = lowering.b
    values: dict[ir.Value | None, ir.Value | None] = {None: None}
    values.update(zip(fragment.inputs, inputs, strict=True))
    for value, name in fragment.weights.items():
        values[value] = plan.use(builder, plan.name(prefix + name), dims(value))
    for value in fragment.constants:
        assert value.const_value is not None
        values[value] = builder.const_tensor(value.const_value.numpy())
    for node in fragment.nodes:
        mapped = [values[value] for value in node.inputs]
        if node.domain == "tfmx":
            weight = mapped[1].name if len(mapped) > 1 and mapped[1] is not None else None
            outputs = lowering.lower(node, mapped, plan.layout(weight) if weight else "rows")
        else:
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            outputs = builder.ops(
                node.op_type, *mapped, n_outputs=len(node.outputs), domain=node.domain, **attributes
            )
        values.update(zip(node.outputs, outputs, strict=True))
    stamped = [values[output] for output in fragment.outputs]
    assert all(value is not None for value in stamped)
    return [value for value in stamped if value is not None]


def stitch_decoder(
    kind: GraphKind,
    config: ModelConfig,
    fragments: DecoderFragments,
    spec: StateSpec,
    target: Target,
    opset: int,
    plan: WeightPlan,
    arithmetic: Arithmetic,
) -> ir.Model:
    builder = Builder(kind, opset)
    length: int | str = "sequence_length" if kind == "prefill" else 1
    input_ids = builder.input("input_ids", INT64, ["batch_size", length])
    mask = builder.input("attention_mask", INT64, ["batch_size", "total_sequence_length"])
    lowering, token_ids, positions = _lowering(
        builder, config, target, plan.dtype, input_ids, mask, arithmetic
    )
    cache_dtype = INT8 if arithmetic.kv == "int8" else plan.dtype
    pasts = [builder.input(state.past, cache_dtype, state.shape) for state in spec]
    keep = keep_input(builder) if kind == "prefill" else None
    plan.see(fragments.embedding, "")
    plan.see(fragments.head, "")
    for fragment in fragments.blocks.values():
        for layer in range(config.n_layers):
            plan.see(fragment, f"blocks.{layer}.")

    [x] = stamp(fragments.embedding, [token_ids, positions], "", lowering, plan)
    rotary = _rotary(builder, config, fragments, positions, lowering, plan)
    presents: list[ir.Value] = []
    maps: dict[int, ir.Value] = {}
    for layer in range(config.n_layers):
        builder.scope = prefix = f"blocks.{layer}"
        block = fragments.blocks[config.window(layer)]
        arguments = [x, mask, positions, *pasts[2 * layer : 2 * layer + 2], *rotary]
        x, key, value, *weights = stamp(block, arguments, f"{prefix}.", lowering, plan)
        presents += [key, value]
        if layer in config.attention_outputs:
            maps[layer] = weights[0]
    builder.scope = "head"
    if keep is not None:
        x = lowering.select(x, keep)
    [logits] = stamp(fragments.head, [x], "", lowering, plan)

    kept: int | str = "logits_length" if kind == "prefill" else 1
    builder.output(logits, "logits", FLOAT, ["batch_size", kept, config.vocab_size])
    for state, present in zip(spec, presents, strict=True):
        builder.output(present, state.present, cache_dtype, present_shape(state.shape, lowering.growth))
    for layer, shown in maps.items():
        shape = ("batch_size", config.attention.n_heads, length, "total_sequence_length")
        builder.output(shown, f"attentions.{layer}", plan.dtype, shape)
    builder.nodes = fuse_skip_norms(builder.nodes, builder.outputs) if target == "ort" else builder.nodes
    return builder.model()


def _lowering(
    builder: Builder,
    config: ModelConfig,
    target: Target,
    dtype: ir.DataType,
    input_ids: ir.Value,
    mask: ir.Value,
    arithmetic: Arithmetic,
) -> tuple[PortableLowering, ir.Value, ir.Value]:
    """And the tokens and positions that blocks get: the graph's own, or each row's real ones first."""
    is_decode = builder.name == "decode"
    if keeps_slots(config, target):
        by_slots = OrtLowering(
            builder, dtype, config.context, input_ids, mask, is_decode=is_decode, arithmetic=arithmetic
        )
        return by_slots, by_slots.token_ids(), by_slots.position_ids
    positions = builder.input("position_ids", INT64, ["batch_size", 1 if is_decode else "sequence_length"])
    return (
        column_lowering(target, builder, dtype, config.context, arithmetic, is_decode=is_decode),
        input_ids,
        positions,
    )


def column_lowering(
    target: Target,
    builder: Builder,
    dtype: ir.DataType,
    context: int,
    arithmetic: Arithmetic,
    *,
    is_decode: bool,
) -> PortableLowering:
    """For graphs whose cache, if any, is by columns."""
    if target == "ort":
        return FusedLowering(builder, dtype, context, is_decode=is_decode, arithmetic=arithmetic)
    return PortableLowering(builder, dtype, context, is_decode=is_decode)


def keep_input(builder: Builder) -> ir.Value:
    """An input with a default, so that runtimes that do not know it get all logits."""
    keep = builder.input("num_logits_to_keep", INT64, [])
    keep.const_value = ir.Tensor(np.array(0, dtype=np.int64), name="num_logits_to_keep")
    return keep


def _rotary(
    builder: Builder,
    config: ModelConfig,
    fragments: DecoderFragments,
    positions: ir.Value,
    lowering: PortableLowering,
    plan: WeightPlan,
) -> list[ir.Value]:
    rotary = config.attention.rotary
    if rotary is None:
        return []
    if fragments.rotary is not None:
        return stamp(fragments.rotary, [positions], "", lowering, plan)
    return [builder.weight(name, plan.dtype, [config.context, rotary.dim // 2]) for name in ROTARY_TABLES]


def present_shape(shape: Sequence[int | str], growth: str) -> list[int | str]:
    grown = "total_sequence_length" if growth == "append" else "present_sequence_length"
    return [grown if dim == "past_sequence_length" else dim for dim in shape]
