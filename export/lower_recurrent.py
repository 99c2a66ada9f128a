"""Random-feature attention, the LSTM and the linear recurrence as standard ONNX ops, without loops.

What follows itself step by step is either one LSTM op, or computed for all steps at once: sums over spans of 64 for
random features (linear in the length), and log2(context) rounds of doubling for the linear recurrence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..tfm_model.attention_ops import HIDDEN_SCORE
from ..tfm_model.recurrent_ops import LEAST, SPAN
from .lower_attention import AttentionLowering, Heads, Inputs
from .lower_basic import END, FLOAT, dims, given


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureNode:
    """A `tfmx::RandomFeatureAttention` node, read."""

    heads: Heads
    directions: ir.Value
    mask: ir.Value | None
    state: list[ir.Value]  # sums, normalizer, [peak]; empty: nothing came before
    shrink: float  # of queries and keys: sqrt(scale) / sigma
    scale: float
    unit_norm: bool
    causal: bool

    @classmethod
    def parse(cls, node: ir.Node, inputs: Inputs) -> FeatureNode:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        padded: list[ir.Value | None] = [*inputs, *[None] * (11 - len(inputs))]
        qkv, directions, mask, *rest = padded
        traced_cos = node.inputs[4] if len(node.inputs) > 4 else None
        return cls(
            heads=Heads.parse(given(qkv), traced_cos, rest[:5], attributes),
            directions=given(directions),
            mask=mask,
            state=[value for value in rest[5:] if value is not None],
            shrink=attributes["scale"] ** 0.5 / attributes["sigma"],
            scale=attributes["scale"],
            unit_norm=bool(attributes["unit_norm"]),
            causal=bool(attributes["causal"]),
        )


class RecurrentLowering(AttentionLowering):
    def random_feature_attention(self, node: FeatureNode) -> Sequence[ir.Value]:
        b, heads = self.b, node.heads
        q, k, v = (
            self.widen(b.op("Transpose", part, perm=[0, 2, 1, 3])) for part in self.split_heads(heads)
        )  # (B, H, T, D)
        if node.unit_norm:
            q, k = self._unit(q), self._unit(k)
        q_features, k_features = self._features(q, node), self._features(k, node)
        # One more column of ones, which adds up to the denominator.
        v = b.op("Pad", v, b.const([0, 0, 0, 0, 0, 0, 0, 1]), b.const(1, FLOAT))
        mask = None
        if node.mask is not None:
            mask = b.op("Unsqueeze", b.op("Cast", node.mask, to=FLOAT), b.const([1, 3]))  # (B, 1, T, 1)
        past = self._past(node)
        peak: list[ir.Value] = []
        if not node.unit_norm:
            k_features, past, new_peak = self._factors(node, k, k_features, mask, past)
            peak = [new_peak]
        if mask is not None:
            k_features = b.op("Mul", k_features, mask)
        sizes = (2 * dims(node.directions)[0], heads.value_dim + 1)
        y, total = self._linear_attention(q_features, k_features, v, past, sizes, causal=node.causal)
        top, bottom = b.ops("Split", y, b.const([heads.value_dim, 1]), n_outputs=2, axis=3)
        tiny = b.op("Less", b.op("Abs", bottom), b.const(LEAST, FLOAT))
        y = b.op("Div", top, b.op("Where", tiny, b.const(LEAST, FLOAT), bottom))
        y = self.narrow(b.op("Transpose", y, perm=[0, 2, 1, 3]))
        y = b.op("Reshape", y, b.const([0, 0, heads.n_heads * heads.value_dim]))
        sums, normalizer = b.ops("Split", total, b.const([heads.value_dim, 1]), n_outputs=2, axis=3)
        state = [sums, b.op("Squeeze", normalizer, b.const([3])), *peak]
        return [y, *state]  # float32 in any bundle

    def _unit(self, x: ir.Value) -> ir.Value:
        b = self.b
        length = b.op("Sqrt", b.op("ReduceSum", b.op("Mul", x, x), b.const([-1]), keepdims=1))
        return b.op("Div", x, b.op("Max", length, b.const(1e-12, FLOAT)))

    def _features(self, x: ir.Value, node: FeatureNode) -> ir.Value:
        b = self.b
        directions = self.widen(b.op("Transpose", node.directions, perm=[1, 0]))
        angles = b.op("MatMul", b.op("Mul", x, b.const(node.shrink, FLOAT)), directions)
        waves = b.op("Concat", b.op("Sin", angles), b.op("Cos", angles), axis=-1)
        return b.op("Mul", waves, b.const(dims(node.directions)[0] ** -0.5, FLOAT))

    def _past(self, node: FeatureNode) -> ir.Value | None:
        """S and z side by side, (B, H, 2D, Dv+1)."""
        if not node.state:
            return None
        column = self.b.op("Unsqueeze", node.state[1], self.b.const([3]))
        return self.b.op("Concat", node.state[0], column, axis=3)

    def _factors(
        self, node: FeatureNode, k: ir.Value, features: ir.Value, mask: ir.Value | None, past: ir.Value | None
    ) -> tuple[ir.Value, ir.Value | None, ir.Value]:
        """exp(s|k|²/2 - peak) times the features, the past brought to the new peak, and that."""
        b = self.b
        square = b.op("ReduceSum", b.op("Mul", k, k), b.const([-1]), keepdims=1)
        size = b.op("Mul", square, b.const(node.scale / 2, FLOAT))  # (B, H, T, 1)
        size = size if mask is None else b.op("Mul", size, mask)
        peak = b.op("ReduceMax", size, b.const([2]), keepdims=1)  # (B, H, 1, 1)
        if past is not None:
            before = b.op("Unsqueeze", node.state[2], b.const([2, 3]))
            peak = b.op("Max", before, peak)
            past = b.op("Mul", past, b.op("Exp", b.op("Sub", before, peak)))
        features = b.op("Mul", features, b.op("Exp", b.op("Sub", size, peak)))
        return features, past, b.op("Squeeze", peak, b.const([2, 3]))

    def _linear_attention(
        self,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        past: ir.Value | None,
        sizes: tuple[int, int],  # of a row of q and k, and of v
        *,
        causal: bool,
    ) -> tuple[ir.Value, ir.Value]:
        """Every row of q times the sum of k v^T up to it; and that sum over all."""
        b = self.b
        if not causal or self.is_decode:
            total = b.op("MatMul", b.op("Transpose", k, perm=[0, 1, 3, 2]), v)
            total = total if past is None else b.op("Add", past, total)
            return b.op("MatMul", q, total), total
        length = b.dim(q, 2)
        q, k = self._spans(q, length, sizes[0]), self._spans(k, length, sizes[0])  # (B, H, n, 64, 2D)
        v = self._spans(v, length, sizes[1])
        turned = b.op("Transpose", k, perm=[0, 1, 2, 4, 3])
        sums = b.op("MatMul", turned, v)  # (B, H, n, 2D, Dv+1)
        before = b.op("CumSum", sums, b.const(2), exclusive=1)
        total = b.op("ReduceSum", sums, b.const([2]), keepdims=0)
        if past is not None:
            before = b.op("Add", before, b.op("Unsqueeze", past, b.const([2])))
            total = b.op("Add", total, past)
        lower = b.const_tensor(np.tril(np.ones((SPAN, SPAN), np.float32)))
        within = b.op("Mul", b.op("MatMul", q, turned), lower)
        y = b.op("Add", b.op("MatMul", q, before), b.op("MatMul", within, v))
        y = b.op("Reshape", y, b.const([0, 0, -1, sizes[1]]))
        return b.slice(y, b.const([0]), length, 2), total

    def _spans(self, x: ir.Value, length: ir.Value, size: int) -> ir.Value:
        """(B, H, T, N) → (B, H, n, 64, N), the last span filled up with zeros."""
        b = self.b
        filled = b.op("Pad", x, b.const([0, 0, 0, 0, 0, 0, SPAN - 1, 0]))
        count = b.op("Div", b.op("Add", length, b.const([SPAN - 1])), b.const([SPAN]))
        filled = b.slice(filled, b.const([0]), b.op("Mul", count, b.const([SPAN])), 2)
        return b.op("Reshape", filled, b.const([0, 0, -1, SPAN, size]))

    def lstm(self, inputs: Inputs, attributes: dict[str, Any], *, hidden_size: int) -> Sequence[ir.Value]:
        """One LSTM op over each row's real elements, packed to its front; pads then repeat what came before."""
        b = self.b
        x, mask, hidden, cell, input_weight, hidden_weight, *rest = inputs
        bias = rest[0] if rest else None
        order, rank = self._packing(given(mask))
        packed = b.op("GatherND", given(x), order, batch_dims=1)
        kinds = {"tanh": "Tanh", "sigmoid": "Sigmoid"}
        lengths = b.op("ReduceSum", given(mask), b.const([1]), keepdims=0)
        wide_bias = None
        if bias is not None:  # one for the input, one for the state, which is nothing
            both = b.op("Concat", bias, b.op("Sub", bias, bias), axis=0)
            wide_bias = b.op("Unsqueeze", self.widen(both), b.const([0]))
        y, last, last_cell = b.ops(
            "LSTM",
            self.widen(b.op("Transpose", packed, perm=[1, 0, 2])),
            *(b.op("Unsqueeze", self.widen(given(w)), b.const([0])) for w in (input_weight, hidden_weight)),
            wide_bias,
            b.op("Cast", lengths, to=ir.DataType.INT32),
            *(b.op("Unsqueeze", self.widen(given(s)), b.const([0])) for s in (hidden, cell)),
            n_outputs=3,
            hidden_size=hidden_size,
            activations=["Sigmoid", kinds[attributes["candidate"]], kinds[attributes["output"]]],
        )
        rows = b.op("Transpose", b.op("Squeeze", y, b.const([1])), perm=[1, 0, 2])  # (B, T, N), packed
        start = b.op("Unsqueeze", self.widen(given(hidden)), b.const([1]))
        rows = b.op("GatherND", b.op("Concat", start, rows, axis=1), rank, batch_dims=1)
        some = b.op(
            "Unsqueeze", b.op("Greater", lengths, b.const(0)), b.const([1])
        )  # of none, the op gives zeros
        state = (
            b.op("Where", some, self.narrow(b.op("Squeeze", new, b.const([0]))), given(old))
            for new, old in ((last, hidden), (last_cell, cell))
        )
        return [self.narrow(rows), *state]

    def _packing(self, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Which column comes into each packed place, and how many real elements stand up to each column: (B, T, 1)."""
        b = self.b

        def make_rank() -> ir.Value:
            return b.op("CumSum", mask, b.const(1))

        def make_order() -> ir.Value:
            columns = b.op("Add", b.op("Mul", mask, b.const(0)), self.first_columns(b.dim(mask, 1)))  # (B, T)
            return b.op("ScatterElements", columns, self.packed_places(mask), columns, axis=1)

        rank = self.cached(("rank", mask), make_rank)
        order = self.cached(("order", mask), make_order)
        return b.op("Unsqueeze", order, b.const([2])), b.op("Unsqueeze", rank, b.const([2]))

    def recurrence(self, keep: ir.Value, add: ir.Value, start: ir.Value) -> Sequence[ir.Value]:
        b = self.b
        rounds = 0 if self.is_decode else math.ceil(math.log2(self.max_context))
        length = b.dim(keep, 1)
        keep, add, start = self.widen(keep), self.widen(add), self.widen(start)
        zeros = b.op("Mul", keep, b.const(0, FLOAT))
        ones = b.op("Add", zeros, b.const(1, FLOAT))
        for shift in (2**i for i in range(rounds)):
            before = b.op("Min", length, b.const([shift]))  # columns that have nothing so far behind them
            rest = b.op("Sub", length, before)
            earlier_keep, earlier_add = (
                b.op(
                    "Concat",
                    b.slice(fill, b.const([0]), before, 1),
                    b.slice(x, b.const([0]), rest, 1),
                    axis=1,
                )
                for x, fill in ((keep, ones), (add, zeros))
            )
            keep, add = b.op("Mul", keep, earlier_keep), b.op("Add", add, b.op("Mul", keep, earlier_add))
        cells = b.op("Add", add, b.op("Mul", keep, b.op("Unsqueeze", start, b.const([1]))))
        last = b.slice(cells, b.const([-1]), b.const([END]), 1)
        return [self.narrow(value) for value in (cells, b.op("Squeeze", last, b.const([1])))]

    def recurrence_weights(self, keep: ir.Value, add: ir.Value, mask: ir.Value) -> ir.Value:
        b = self.b
        real = b.op("Unsqueeze", b.op("Cast", mask, to=ir.DataType.BOOL), b.const([1]))  # (B, 1, T)
        hidden = b.const(HIDDEN_SCORE, FLOAT)
        log_keep = b.op("Where", real, self._log_sigmoid(keep), b.const(0, FLOAT))  # (B, N, T)
        log_add = b.op("Where", real, self._log_sigmoid(add), hidden)
        columns = self.first_columns(b.dim(mask, 1))
        rows = b.op("Unsqueeze", columns, b.const([1]))
        after = b.op(
            "Where", b.op("Less", columns, rows), b.op("Unsqueeze", log_keep, b.const([3])), b.const(0, FLOAT)
        )
        logs = b.op("Add", b.op("CumSum", after, b.const(2)), b.op("Unsqueeze", log_add, b.const([2])))
        seen = b.op("LessOrEqual", columns, rows)
        return self.narrow(b.op("Exp", b.op("Where", seen, logs, hidden)))

    def _log_sigmoid(self, x: ir.Value) -> ir.Value:
        """(B, T, N) → (B, N, T); the logarithm of a sigmoid would be that of 0 where it underflows."""
        b = self.b
        softplus = b.op("Softplus", b.op("Neg", self.widen(b.op("Transpose", x, perm=[0, 2, 1]))))
        return b.op("Neg", softplus)
