"""`tfmx::` nodes as ONNX Runtime's fused ops: the `ort` target.

GroupQueryAttention keeps the cache in one buffer of fixed capacity, bound as past and present, where the slot
of a token is the number of real tokens before it. So the graph needs no position_ids; and a batch padded on
the left, on the right or in between is first packed (real tokens to the front of each row), and unpacked
before the head. The pads that follow a row's tokens are written into slots that its next tokens overwrite.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import onnx_ir as ir

from .. import InputError
from .arithmetic import Activations, Arithmetic
from .builder import Builder
from .layout import CODES, SCALES, SHIFTS, TABLE, ZEROS, BlockLayout
from .lower_attention import AttentionNode, Heads
from .lower_basic import FLOAT, dims
from .lower_portable import PortableLowering
from .rounded import INT8_TOP

INT32 = ir.DataType.INT32
MICROSOFT = "com.microsoft"
CACHE_SCALES = ("attention.key_scales", "attention.value_scales")
LEAST_STEP = {ir.DataType.FLOAT: 1e-30, ir.DataType.FLOAT16: 1e-7}
_ACCURACY_LEVELS: dict[Activations, int] = {"float": 1, "int8": 4}


class FusedLowering(PortableLowering):
    """Any graph for ONNX Runtime: its fused norms, activations and products of quantised matrices.

    Positions and cache stay what they are.
    """

    target = "ort"

    def __init__(
        self,
        builder: Builder,
        dtype: ir.DataType,
        max_context: int,
        *,
        is_decode: bool,
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__(builder, dtype, max_context, is_decode=is_decode)
        self.arithmetic = arithmetic

    def block_linear(
        self, x: ir.Value, weight: ir.Value, bias: ir.Value | None, layout: BlockLayout
    ) -> ir.Value:
        b, parts, columns = self.b, self.block_parts(weight, layout), dims(weight)[1]
        if layout.fine:
            two = self._in_two_steps(x, columns, layout.format.block)
            y = b.op("ReduceSum", self._product(two, parts, weight, None, layout), b.const([0]), keepdims=0)
            y = y if bias is None else b.op("Add", y, bias)
        else:
            y = self._product(x, parts, weight, bias, layout)
        if SHIFTS not in parts:
            return y
        # what a block adds to each of its weights, it adds to the result once for the sum of its inputs
        n_blocks = columns // layout.format.block
        blocks = b.op("Reshape", x, b.const([0, 0, n_blocks, layout.format.block]))
        sums = b.op("ReduceSum", blocks, b.const([-1]), keepdims=0)
        return b.op("Add", y, b.op("MatMul", sums, parts[SHIFTS]))

    def _product(
        self,
        x: ir.Value,
        parts: dict[str, ir.Value],
        weight: ir.Value,
        bias: ir.Value | None,
        layout: BlockLayout,
    ) -> ir.Value:
        rows, columns = dims(weight)
        return self.b.op(
            "MatMulNBits",
            x,
            parts[CODES],
            parts[SCALES],
            parts.get(ZEROS),
            None,
            bias,
            domain=MICROSOFT,
            K=columns,
            N=rows,
            bits=layout.format.bits,
            block_size=layout.format.block,
            accuracy_level=_ACCURACY_LEVELS[self.arithmetic.activations],
        )

    def _in_two_steps(self, x: ir.Value, columns: int, block: int) -> ir.Value:
        """(B, T, K) → (2, B, T, K): what MatMulNBits will round x to, and what is left of it (`rounded.py`).

        The first is rounded here, by blocks, so that the product only finds its own steps again; the second is at most half
        a step of the first, and rounded to a 127th of that.
        """
        b = self.b
        blocks = b.op("Reshape", b.op("Unsqueeze", x, b.const([0])), b.const([0, 0, 0, -1, block]))
        top = b.op("ReduceMax", b.op("Abs", blocks), b.const([-1]), keepdims=1)
        step = b.op("Mul", top, b.const(1 / INT8_TOP, self.dtype))
        step = b.op("Max", step, b.const(LEAST_STEP[self.dtype], self.dtype))  # a block of zeros has none
        first = b.op("Mul", b.op("Round", b.op("Div", blocks, step)), step)
        two = b.op("Concat", first, b.op("Sub", blocks, first), axis=0)
        return b.op("Reshape", two, b.const([0, 0, 0, columns]))

    def block_embedding(self, token_ids: ir.Value, weight: ir.Value, layout: BlockLayout) -> ir.Value:
        b, parts, (_, columns) = self.b, self.block_parts(weight, layout), dims(weight)
        vectors = b.op(
            "GatherBlockQuantized",
            parts[TABLE],
            token_ids,
            parts[SCALES],
            parts.get(ZEROS),
            domain=MICROSOFT,
            bits=layout.format.bits,
            block_size=layout.format.block,
            gather_axis=0,
            quantize_axis=1,
        )
        if SHIFTS not in parts:
            return vectors
        shifts = b.op("Transpose", b.op("Gather", parts[SHIFTS], token_ids, axis=1), perm=[1, 2, 0])
        by_block = b.op("Reshape", vectors, b.const([0, 0, -1, layout.format.block]))
        shifted = b.op("Add", by_block, b.op("Unsqueeze", shifts, b.const([-1])))
        return b.op("Reshape", shifted, b.const([0, 0, columns]))

    def norm(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None, kind: str, eps: float) -> ir.Value:
        if kind == "layer":
            return super().norm(x, weight, bias, kind, eps)
        return self.b.op("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=eps, stash_type=1)

    def activation(self, x: ir.Value, kind: str) -> ir.Value:
        if kind == "silu":
            return self.b.op("QuickGelu", x, domain=MICROSOFT, alpha=1.0)  # x * sigmoid(1 x)
        if kind in {"gelu", "gelu_tanh"}:
            return self.b.op("Gelu" if kind == "gelu" else "FastGelu", x, domain=MICROSOFT)
        return super().activation(x, kind)


class OrtLowering(FusedLowering):
    """A decoder of tokens for ONNX Runtime, with its fused attention."""

    growth = "capacity"

    def __init__(
        self,
        builder: Builder,
        dtype: ir.DataType,
        max_context: int,
        input_ids: ir.Value,
        attention_mask: ir.Value,
        *,
        is_decode: bool,
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__(builder, dtype, max_context, is_decode=is_decode, arithmetic=arithmetic)
        self.input_ids, self.attention_mask = input_ids, attention_mask

    def token_ids(self) -> ir.Value:
        ids = self.input_ids
        return ids if self.is_decode else self.b.op("ScatterElements", ids, self.slots, ids, axis=1)

    def positions(self, heads: Heads) -> ir.Value:  # noqa: ARG002 - the packed ones, not the graph's
        return self.position_ids

    @cached_property
    def position_ids(self) -> ir.Value:
        """Past tokens of the row + slot, (B, T)."""
        b = self.b
        if self.is_decode:
            return self.n_past
        columns = b.slice(self.columns(), b.const([0]), self.length, 0)
        last = b.op("Max", b.op("Sub", self.n_real, b.const(1)), b.const(0))
        return b.op(
            "Add", self.n_past, b.op("Min", columns, last)
        )  # pads lie behind: none is past the last token

    def select(self, x: ir.Value, keep: ir.Value) -> ir.Value:
        slots = super().select(self.slots, keep)
        return self.b.op("GatherND", x, self.b.op("Unsqueeze", slots, self.b.const([2])), batch_dims=1)

    @cached_property
    def length(self) -> ir.Value:
        return self.b.dim(self.input_ids, 1)

    @cached_property
    def mask_of_new(self) -> ir.Value:
        """(B, T)."""
        return self.new_mask(self.attention_mask, self.input_ids)

    @cached_property
    def n_past(self) -> ir.Value:
        """Real tokens in the cache, (B, 1)."""
        b, mask = self.b, self.attention_mask
        end = b.const([-1]) if self.is_decode else b.op("Neg", self.length)
        return b.op("ReduceSum", b.slice(mask, b.const([0]), end, 1), b.const([1]), keepdims=1)

    @cached_property
    def n_real(self) -> ir.Value:
        """Real ones among the new tokens, (B, 1)."""
        return self.b.op("ReduceSum", self.mask_of_new, self.b.const([1]), keepdims=1)

    @cached_property
    def slots(self) -> ir.Value:
        """Where each new token goes among its row's new tokens: the real ones first, in their order, (B, T)."""
        return self.packed_places(self.mask_of_new)

    @cached_property
    def lengths(self) -> tuple[ir.Value, ir.Value]:
        """seqlens_k (B,): tokens of each row after this run, less one; and the longest that a row can be."""
        b = self.b
        last = self.n_past
        if not self.is_decode:
            last = b.op("Add", last, b.op("Sub", self.length, b.const(1)))
        seqlens_k = b.op("Reshape", b.op("Cast", last, to=INT32), b.const([-1]))
        total = b.op("Gather", b.op("Shape", self.attention_mask), b.const(1))
        return seqlens_k, b.op("Cast", total, to=INT32)

    def attention(self, node: AttentionNode) -> Sequence[ir.Value]:
        b, heads = self.b, node.heads
        if heads.head_dim % 8:
            raise InputError(
                f"head_dim is {heads.head_dim}, and ONNX Runtime's fused attention wants a multiple of 8; "
                "export with --target portable"
            )
        seqlens_k, total = self.lengths
        turns_itself = self._turns_itself(heads)
        if heads.q_norm is None and (turns_itself or heads.cos is None):
            qkv: list[ir.Value | None] = [heads.qkv, None, None]
        else:
            counts = (heads.n_heads, heads.n_kv_heads, heads.n_kv_heads)
            qkv = [
                b.op("Reshape", part, b.const([0, 0, n * heads.head_dim]))
                for part, n in zip(self.split_heads(heads), counts, strict=True)
            ]
        tables: list[ir.Value | None] = [heads.cos, heads.sin] if turns_itself else [None, None]
        scales, rounded = self._cache_scales(heads)
        return b.ops(
            "GroupQueryAttention",
            *qkv,
            node.past_key,
            node.past_value,
            seqlens_k,
            total,
            *tables,
            None,  # position_ids: by slots
            None,  # attention_bias
            None,  # head_sink
            *scales,
            n_outputs=3,
            domain=MICROSOFT,
            num_heads=heads.n_heads,
            kv_num_heads=heads.n_kv_heads,
            scale=node.scale,
            do_rotary=int(turns_itself),
            **({"softcap": node.softcap} if node.softcap else {}),
            **({"local_window_size": node.window} if node.window else {}),
            **rounded,
        )

    def _cache_scales(self, heads: Heads) -> tuple[list[ir.Value], dict[str, int | str]]:
        """A cache of int8 has a scale for each channel of keys and values, in the weights file."""
        if self.arithmetic.kv != "int8":
            return [], {}
        scales = [
            self.b.weight(f"{self.b.scope}.{part}", FLOAT, [1, heads.n_kv_heads, 1, heads.head_dim])
            for part in CACHE_SCALES
        ]
        return scales, {
            "k_quant_type": "PER_CHANNEL",
            "v_quant_type": "PER_CHANNEL",
            "kv_cache_bit_width": 8,
        }

    def turn(self, x: ir.Value, heads: Heads) -> ir.Value:
        return x if self._turns_itself(heads) else super().turn(x, heads)

    def _turns_itself(self, heads: Heads) -> bool:
        """Its own rotary wants a table, a head of 16 n dimensions, and 16 n of them turning."""
        return heads.has_table and heads.head_dim % 16 == 0 and heads.rotary_dim % 16 == 0


def fuse_skip_norms(nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> list[ir.Node]:
    """Add, then SimplifiedLayerNormalization → one SkipSimplifiedLayerNormalization that also returns the sum."""
    fused: list[ir.Node] = []
    for node in nodes:
        added = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        is_pair = (
            node.op_type == "SimplifiedLayerNormalization"
            and added is not None
            and added.op_type == "Add"
            and added in fused
            and not any(value in outputs for value in added.outputs)
        )
        if not is_pair or added is None:
            fused.append(node)
            continue
        left, right = added.inputs
        skip = ir.node(
            "SkipSimplifiedLayerNormalization",
            [left, right, node.inputs[1]],
            {"epsilon": node.attributes["epsilon"].value},
            domain=MICROSOFT,
            num_outputs=4,
        )
        normed, mean, deviation, total = skip.outputs
        normed.name, total.name = node.outputs[0].name, added.outputs[0].name
        mean.name = deviation.name = ""  # not wanted
        skip.name = node.name
        node.outputs[0].replace_all_uses_with(normed)
        added.outputs[0].replace_all_uses_with(total)
        fused[fused.index(added)] = skip
    return fused
