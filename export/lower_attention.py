"""Attention as standard ONNX ops.

The cache grows by Concat. Grouped queries are folded into the rows of one MatMul, so that no shape is computed
and keys are not repeated; what that buys is a graph that other runtimes than onnxruntime run too. Half precision
computes scores and softmax in float32, as PyTorch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ..tfm_model.attention_ops import HIDDEN_SCORE
from .lower_basic import END, FLOAT, dims, given
from .lower_blocks import BlockLowering

Inputs = Sequence[ir.Value | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What queries, keys and values are made of."""

    qkv: ir.Value
    positions: ir.Value | None
    cos: ir.Value | None
    sin: ir.Value | None
    has_table: bool  # cos and sin are tables (context, R/2), not rows for each element
    q_norm: ir.Value | None
    k_norm: ir.Value | None
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    rotary_dim: int
    qk_norm_kind: str
    qk_norm_eps: float

    @classmethod
    def parse(
        cls, qkv: ir.Value, traced_cos: ir.Value | None, rest: Inputs, attributes: dict[str, Any]
    ) -> Heads:
        """`rest`: position_ids, cos, sin, q_norm, k_norm."""
        positions, cos, sin, q_norm, k_norm = rest
        names = (
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "value_dim",
            "rotary_dim",
            "qk_norm_kind",
            "qk_norm_eps",
        )
        return cls(
            qkv=qkv,
            positions=positions,
            cos=cos,
            sin=sin,
            has_table=traced_cos is not None and traced_cos.shape is not None and len(traced_cos.shape) == 2,
            q_norm=q_norm,
            k_norm=k_norm,
            **{name: attributes[name] for name in names},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNode:
    """A `tfmx::Attention` node, read."""

    heads: Heads
    past_key: ir.Value | None
    past_value: ir.Value | None
    mask: ir.Value | None
    distance_keys: ir.Value | None
    distance_values: ir.Value | None
    distance_bias: ir.Value | None
    slopes: ir.Value | None
    max_distance: int  # of the tables; 0 = there are none
    scale: float
    softcap: float  # 0 = none
    window: int  # 0 = none
    causal: bool
    has_weights: bool

    @classmethod
    def parse(cls, node: ir.Node, inputs: Inputs) -> AttentionNode:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        padded = [*inputs, *[None] * (13 - len(inputs))]
        qkv, past_key, past_value, mask, *rest = padded
        traced = [*node.inputs, *[None] * (13 - len(node.inputs))]
        tables = [(traced[9], 0), (traced[10], 0), (traced[11], 1)]
        rows = [dims(table)[axis] for table, axis in tables if table is not None]
        return cls(
            heads=Heads.parse(given(qkv), traced[5], rest[:5], attributes),
            past_key=past_key,
            past_value=past_value,
            mask=mask,
            distance_keys=rest[5],
            distance_values=rest[6],
            distance_bias=rest[7],
            slopes=rest[8],
            max_distance=(rows[0] - 1) // 2 if rows else 0,
            scale=attributes["scale"],
            softcap=attributes["softcap"],
            window=attributes["window"],
            causal=bool(attributes["causal"]),
            has_weights=bool(attributes["has_weights"]),
        )

    @property
    def group(self) -> int:
        return self.heads.n_heads // self.heads.n_kv_heads


class AttentionLowering(BlockLowering):
    def attention(self, node: AttentionNode) -> Sequence[ir.Value]:
        b, heads, H_kv, D = self.b, node.heads, node.heads.n_kv_heads, node.heads.head_dim
        # The scale goes on the queries, where it is D numbers a row and not P+T.
        by_row, k, v = self.split_heads(heads)
        by_row = b.op("Mul", by_row, b.const(node.scale, self.dtype))  # (B, T, H, D)
        q, k, v = (b.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (by_row, k, v))
        key = k if node.past_key is None else b.op("Concat", node.past_key, k, axis=2)  # (B, H_kv, P+T, D)
        value = v if node.past_value is None else b.op("Concat", node.past_value, v, axis=2)
        if node.group > 1:
            q = b.op("Reshape", q, b.const([0, H_kv, -1, D]))  # (B, H_kv, G T, D)
        scores = self.widen(
            b.op("MatMul", q, b.op("Transpose", key, perm=[0, 1, 3, 2]))
        )  # (B, H_kv, G T, P+T)
        distance = self.distance(node)
        index = self.distance_index(distance, node.max_distance) if distance and node.max_distance else None
        scores = self.add_relative(scores, by_row, node, distance, index)
        scores = self.capped(scores, node.softcap)
        if node.mask is not None:
            scores = b.op("Add", scores, self.bias(node))
        weights = self.narrow(b.op("Softmax", scores, axis=-1))
        y = b.op("MatMul", weights, value)
        y = self.by_row(y, H_kv, node.group, heads.value_dim)
        if node.distance_values is not None and index is not None:
            rows = b.op("Gather", node.distance_values, index, axis=0)  # (B, T, P+T, Dv)
            by_query = b.op("Transpose", self.unfolded(weights, node), perm=[0, 2, 1, 3])  # (B, T, H, P+T)
            y = b.op("Reshape", y, b.const([0, 0, heads.n_heads, heads.value_dim]))
            y = b.op("Add", y, b.op("MatMul", by_query, rows))
        y = b.op("Reshape", y, b.const([0, 0, heads.n_heads * heads.value_dim]))
        return [y, key, value, *([self.unfolded(weights, node)] if node.has_weights else [])]

    def cross_attention(
        self, q: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value | None, attributes: dict[str, Any]
    ) -> Sequence[ir.Value]:
        b, H, H_kv, D = self.b, attributes["n_heads"], attributes["n_kv_heads"], attributes["head_dim"]
        q = b.op("Mul", self.by_head(q, H, D), b.const(attributes["scale"], self.dtype))
        if H_kv != H:
            q = b.op("Reshape", q, b.const([0, H_kv, -1, D]))
        scores = self.widen(b.op("MatMul", q, b.op("Transpose", key, perm=[0, 1, 3, 2])))
        scores = self.capped(scores, attributes["softcap"])
        if mask is not None:
            scores = b.op("Add", scores, self.cached(("real", mask), lambda: self.hiding(self.real(mask))))
        weights = self.narrow(b.op("Softmax", scores, axis=-1))
        y = self.by_row(b.op("MatMul", weights, value), H_kv, H // H_kv, D)
        y = b.op("Reshape", y, b.const([0, 0, H * D]))
        return [y, *([self._heads_apart(weights, H, H_kv)] if attributes["has_weights"] else [])]

    def split_heads(self, heads: Heads) -> list[ir.Value]:
        """Queries, keys and values of the new elements by head, (B, T, H, D), normalised and turned."""
        b, D, Dv = self.b, heads.head_dim, heads.value_dim
        counts = (heads.n_heads, heads.n_kv_heads, heads.n_kv_heads)
        sizes = (D, D, Dv)
        split = b.const([n * size for n, size in zip(counts, sizes, strict=True)])
        q, k, v = (
            b.op("Reshape", part, b.const([0, 0, n, size]))
            for part, n, size in zip(
                b.ops("Split", heads.qkv, split, n_outputs=3, axis=-1), counts, sizes, strict=True
            )
        )
        if heads.q_norm is not None and heads.k_norm is not None:
            q = self.norm(q, heads.q_norm, None, heads.qk_norm_kind, heads.qk_norm_eps)
            k = self.norm(k, heads.k_norm, None, heads.qk_norm_kind, heads.qk_norm_eps)
        if heads.rotary_dim:
            q, k = self.turn(q, heads), self.turn(k, heads)
        return [q, k, v]

    def positions(self, heads: Heads) -> ir.Value:
        return given(heads.positions)

    def rotary_rows(self, values: ir.Value, heads: Heads) -> ir.Value:
        """cos or sin of each new element, (B, T, 1, R/2), looked up once for all layers."""

        def make() -> ir.Value:
            rows = self.b.op("Gather", values, self.positions(heads), axis=0) if heads.has_table else values
            return self.b.op("Unsqueeze", rows, self.b.const([2]))

        return self.cached(("rotary", values), make)

    def turn(self, x: ir.Value, heads: Heads) -> ir.Value:
        cos, sin = (self.rotary_rows(given(values), heads) for values in (heads.cos, heads.sin))
        b, half, still = self.b, heads.rotary_dim // 2, heads.head_dim - heads.rotary_dim
        sizes = [half, half, still] if still else [half, half]
        first, second, *rest = b.ops("Split", x, b.const(sizes), n_outputs=len(sizes), axis=-1)
        left = b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin))
        right = b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin))
        return b.op("Concat", left, right, *rest, axis=-1)

    def capped(self, scores: ir.Value, softcap: float) -> ir.Value:
        if not softcap:
            return scores
        cap = self.b.const(softcap, FLOAT)
        return self.b.op("Mul", self.b.op("Tanh", self.b.op("Div", scores, cap)), cap)

    def by_row(self, y: ir.Value, n_kv_heads: int, group: int, size: int) -> ir.Value:
        """(B, H_kv, G T, size) → (B, T, H, size), or with groups (B, T, H_kv, G, size)."""
        b = self.b
        if group == 1:
            return b.op("Transpose", y, perm=[0, 2, 1, 3])
        y = b.op("Reshape", y, b.const([0, n_kv_heads, group, -1, size]))
        return b.op("Transpose", y, perm=[0, 3, 1, 2, 4])

    # --- which columns an element sees --------------------------------------------------------------------

    def bias(self, node: AttentionNode) -> ir.Value:
        """What is added to the scores, 0 or almost -inf: (B, 1, T, P+T), T repeated for each head of a group."""
        mask, group = given(node.mask), node.group

        def make() -> ir.Value:
            bias = self.hiding(self.visible(node))
            repeats = group > 1 and node.causal and not self.is_decode
            return self.b.op("Concat", *[bias] * group, axis=2) if repeats else bias

        return self.cached(("bias", mask, node.window, group, node.causal), make)

    def hiding(self, seen: ir.Value) -> ir.Value:
        return self.b.op("Where", seen, self.b.const(0, FLOAT), self.b.const(HIDDEN_SCORE, FLOAT))

    def real(self, mask: ir.Value) -> ir.Value:
        """(B, 1, 1, S)."""
        return self.b.op("Unsqueeze", self.b.op("Cast", mask, to=ir.DataType.BOOL), self.b.const([1, 2]))

    def visible(self, node: AttentionNode) -> ir.Value:
        b, mask = self.b, given(node.mask)
        seen = self.real(mask)
        if node.causal and not self.is_decode:  # a single new element is the last column: it sees them all
            total, length = b.dim(mask, 1), b.dim(node.heads.qkv, 1)
            columns = self.first_columns(total)
            rows = b.slice(columns, b.op("Sub", total, length), b.const([END]), 0)
            seen = b.op("And", seen, b.op("LessOrEqual", columns, b.op("Unsqueeze", rows, b.const([1]))))
        if node.window:
            distance = b.op("Unsqueeze", self.key_distance(mask, self.positions(node.heads)), b.const([1]))
            seen = b.op("And", seen, b.op("Greater", distance, b.const(-node.window)))
        return seen

    # --- distances ----------------------------------------------------------------------------------------

    def key_distance(self, mask: ir.Value, positions: ir.Value) -> ir.Value:
        """The key's position less the query's, (B, T, P+T); a position is the number of real ones before."""

        def make() -> ir.Value:
            b = self.b
            keys = b.op("Sub", b.op("CumSum", mask, b.const(1)), b.const(1))
            return b.op(
                "Sub", b.op("Unsqueeze", keys, b.const([1])), b.op("Unsqueeze", positions, b.const([2]))
            )

        return self.cached(("distance", mask, positions), make)

    def distance(self, node: AttentionNode) -> ir.Value | None:
        if not node.max_distance and node.slopes is None:
            return None
        return self.key_distance(given(node.mask), self.positions(node.heads))

    def distance_index(self, distance: ir.Value, most: int) -> ir.Value:
        def make() -> ir.Value:
            b = self.b
            return b.op(
                "Add", b.op("Min", b.op("Max", distance, b.const(-most)), b.const(most)), b.const(most)
            )

        return self.cached(("index", distance, most), make)

    def add_relative(
        self,
        scores: ir.Value,
        q: ir.Value,
        node: AttentionNode,
        distance: ir.Value | None,
        index: ir.Value | None,
    ) -> ir.Value:
        """`q` (B, T, H, D), scaled."""
        b = self.b
        added: list[ir.Value] = []  # (B, H, T, P+T) each
        if node.distance_keys is not None and index is not None:
            rows = b.op("Gather", node.distance_keys, index, axis=0)  # (B, T, P+T, D)
            by_query = b.op("MatMul", q, b.op("Transpose", rows, perm=[0, 1, 3, 2]))  # (B, T, H, P+T)
            added.append(self.widen(b.op("Transpose", by_query, perm=[0, 2, 1, 3])))
        if node.distance_bias is not None and index is not None:
            bias = b.op("Gather", node.distance_bias, index, axis=1)  # (H, B, T, P+T)
            added.append(self.widen(b.op("Transpose", bias, perm=[1, 0, 2, 3])))
        if node.slopes is not None and distance is not None:
            far = b.op("Unsqueeze", b.op("Cast", b.op("Abs", distance), to=FLOAT), b.const([1]))
            slopes = self.widen(b.op("Reshape", node.slopes, b.const([-1, 1, 1])))
            added.append(b.op("Neg", b.op("Mul", slopes, far)))
        for part in added:
            scores = b.op("Add", scores, self.folded(part, node))
        return scores

    def folded(self, x: ir.Value, node: AttentionNode) -> ir.Value:
        """(B, H, T, S) → (B, H_kv, G T, S)."""
        if node.group == 1:
            return x
        shape = self.b.op("Concat", self.b.const([0, node.heads.n_kv_heads, -1]), self.b.dim(x, 3), axis=0)
        return self.b.op("Reshape", x, shape)

    def unfolded(self, x: ir.Value, node: AttentionNode) -> ir.Value:
        return self._heads_apart(x, node.heads.n_heads, node.heads.n_kv_heads)

    def _heads_apart(self, x: ir.Value, n_heads: int, n_kv_heads: int) -> ir.Value:
        """(B, H_kv, G T, S) → (B, H, T, S)."""
        if n_heads == n_kv_heads:
            return x
        shape = self.b.op("Concat", self.b.const([0, n_heads, -1]), self.b.dim(x, 3), axis=0)
        return self.b.op("Reshape", x, shape)
