"""`tfmx::` nodes as standard ONNX ops: the `portable` target, and what the `ort` target does not fuse.

The cache grows by Concat. Attention is written out with grouped queries folded into the rows of one MatMul,
so that no shape is computed and keys are not repeated; what that buys is a graph that other runtimes than
onnxruntime run too. Half precision computes norms, scores and softmax in float32, as PyTorch does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..tfm_model.ops import HIDDEN_SCORE
from .builder import Builder

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
COLUMNS = "tfmx.columns"  # 0, 1, 2, ...: a table in the weights file
END = 2**63 - 1  # as far as a Slice goes


@dataclass(slots=True)
class GraphInputs:
    """What every block reads: the graph's own inputs."""

    input_ids: ir.Value
    attention_mask: ir.Value
    position_ids: ir.Value | None  # None: positions follow from the mask


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNode:
    """A `tfmx::Attention` node, read."""

    qkv: ir.Value
    past_key: ir.Value
    past_value: ir.Value
    cos: ir.Value | None
    sin: ir.Value | None
    has_table: bool  # cos and sin are tables (context, R/2), not rows for each token
    q_norm: ir.Value | None
    k_norm: ir.Value | None
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    softcap: float  # 0 = none
    window: int  # 0 = none
    rotary_dim: int
    qk_norm_kind: str
    qk_norm_eps: float

    @classmethod
    def parse(cls, node: ir.Node, inputs: Sequence[ir.Value | None]) -> AttentionNode:
        qkv, past_key, past_value, _mask, _positions, *optional = inputs
        cos, sin, q_norm, k_norm = [*optional, None, None, None, None][:4]
        traced_cos = node.inputs[5] if len(node.inputs) > 5 else None
        return cls(
            qkv=_given(qkv),
            past_key=_given(past_key),
            past_value=_given(past_value),
            cos=cos,
            sin=sin,
            has_table=traced_cos is not None and traced_cos.shape is not None and len(traced_cos.shape) == 2,
            q_norm=q_norm,
            k_norm=k_norm,
            **{name: attribute.value for name, attribute in node.attributes.items()},
        )

    @property
    def group(self) -> int:
        return self.n_heads // self.n_kv_heads


class PortableLowering:
    growth = "append"

    def __init__(
        self, builder: Builder, inputs: GraphInputs, dtype: ir.DataType, max_context: int, *, is_decode: bool
    ) -> None:
        self.b, self.inputs, self.dtype = builder, inputs, dtype
        self.max_context, self.is_decode = max_context, is_decode
        self._biases: dict[tuple[int, int], ir.Value] = {}  # by window and group
        self._rotary_rows: dict[ir.Value, ir.Value] = {}  # by table

    def token_ids(self) -> ir.Value:
        return self.inputs.input_ids

    def position_ids(self) -> ir.Value:
        assert self.inputs.position_ids is not None
        return self.inputs.position_ids

    def select(self, x: ir.Value, keep: ir.Value) -> ir.Value:
        """The last `keep` columns; 0 is all, since a Slice from -0 starts at the front."""
        start = self.b.op("Neg", self.b.op("Reshape", keep, self.b.const([1])))
        return self.b.slice(x, start, self.b.const([END]), 1)

    def lower(
        self, node: ir.Node, inputs: Sequence[ir.Value | None], weight_is_column: bool
    ) -> Sequence[ir.Value]:
        """`weight_is_column`: the node's weight lies in the file as (in, out)."""
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        x = inputs[0]
        assert x is not None
        rest = inputs[1:]
        if node.op_type == "Embedding":
            return [self.embedding(x, _given(rest[0]), weight_is_column)]
        if node.op_type == "Linear":
            weight = _given(rest[0])
            if not weight_is_column:  # computed, or read by others as it is
                weight = self.b.op("Transpose", weight, perm=[1, 0])
            return [self.linear(x, weight, rest[1] if len(rest) > 1 else None)]
        if node.op_type == "Norm":
            bias = rest[1] if len(rest) > 1 else None
            return [self.norm(x, _given(rest[0]), bias, attributes["kind"], attributes["eps"])]
        if node.op_type == "Activation":
            return [self.activation(x, attributes["kind"])]
        if node.op_type == "GatedActivation":
            gate, up = self.halves(x)
            return [self.b.op("Mul", self.activation(gate, attributes["kind"]), up)]
        assert node.op_type == "Attention", node.op_type
        return self.attention(AttentionNode.parse(node, inputs))

    def halves(self, x: ir.Value) -> Sequence[ir.Value]:
        if self.b.opset < 18:  # equal parts were the default
            return self.b.ops("Split", x, n_outputs=2, axis=-1)
        return self.b.ops("Split", x, n_outputs=2, axis=-1, num_outputs=2)

    def embedding(self, token_ids: ir.Value, weight: ir.Value, weight_is_column: bool) -> ir.Value:
        if not weight_is_column:
            return self.b.op("Gather", weight, token_ids, axis=0)
        # The head's matrix (width, vocab) serves both: a column is a token's vector.
        return self.b.op("Transpose", self.b.op("Gather", weight, token_ids, axis=1), perm=[1, 2, 0])

    def linear(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
        y = self.b.op("MatMul", x, weight)
        return y if bias is None else self.b.op("Add", y, bias)

    def norm(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None, kind: str, eps: float) -> ir.Value:
        b = self.b
        if kind == "layer":
            return b.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=eps)
        wide = self.widen(x)
        mean = b.op("ReduceMean", b.op("Mul", wide, wide), b.const([-1]), keepdims=1)
        root = b.op("Sqrt", b.op("Add", mean, b.const(eps, FLOAT)))
        return b.op("Mul", self.narrow(b.op("Div", wide, root)), weight)

    def activation(self, x: ir.Value, kind: str) -> ir.Value:
        b = self.b
        if kind == "relu":
            return b.op("Relu", x)
        if kind == "silu":
            return b.op("Mul", x, b.op("Sigmoid", x))
        wide = self.widen(x)
        if kind == "gelu":
            inner = b.op("Erf", b.op("Mul", wide, b.const(math.sqrt(0.5), FLOAT)))
        else:
            cube = b.op("Mul", b.op("Mul", wide, wide), wide)
            sum_ = b.op("Add", wide, b.op("Mul", cube, b.const(0.044715, FLOAT)))
            inner = b.op("Tanh", b.op("Mul", sum_, b.const(math.sqrt(2 / math.pi), FLOAT)))
        half = b.op("Mul", wide, b.const(0.5, FLOAT))
        return self.narrow(b.op("Mul", half, b.op("Add", inner, b.const(1, FLOAT))))

    def attention(self, node: AttentionNode) -> Sequence[ir.Value]:
        b, H_kv, D = self.b, node.n_kv_heads, node.head_dim
        q, k, v = self.heads(node)
        q, k, v = (b.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, k, v))
        key = b.op("Concat", node.past_key, k, axis=2)  # (B, H_kv, P+T, D)
        value = b.op("Concat", node.past_value, v, axis=2)
        if node.group > 1:
            q = b.op("Reshape", q, b.const([0, H_kv, -1, D]))  # (B, H_kv, G T, D)
        # The scale goes on the queries, where it is D numbers a row and not P+T.
        q = b.op("Mul", q, b.const(node.scale, self.dtype))
        scores = self.widen(
            b.op("MatMul", q, b.op("Transpose", key, perm=[0, 1, 3, 2]))
        )  # (B, H_kv, G T, P+T)
        if node.softcap:
            cap = b.const(node.softcap, FLOAT)
            scores = b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap)
        scores = b.op("Add", scores, self.bias(node.window, node.group))
        y = b.op("MatMul", self.narrow(b.op("Softmax", scores, axis=-1)), value)
        if node.group > 1:
            y = b.op("Reshape", y, b.const([0, H_kv, node.group, -1, D]))
            y = b.op("Transpose", y, perm=[0, 3, 1, 2, 4])
        else:
            y = b.op("Transpose", y, perm=[0, 2, 1, 3])
        return [b.op("Reshape", y, b.const([0, -1, node.n_heads * D])), key, value]

    def heads(self, node: AttentionNode) -> list[ir.Value]:
        """Queries, keys and values of the new tokens by head, (B, T, H, D), normalised and turned."""
        b, D = self.b, node.head_dim
        counts = (node.n_heads, node.n_kv_heads, node.n_kv_heads)
        parts = b.ops("Split", node.qkv, b.const([n * D for n in counts]), n_outputs=3, axis=-1)
        q, k, v = (
            b.op("Reshape", part, b.const([0, 0, n, D])) for part, n in zip(parts, counts, strict=True)
        )
        if node.q_norm is not None and node.k_norm is not None:
            q = self.norm(q, node.q_norm, None, node.qk_norm_kind, node.qk_norm_eps)
            k = self.norm(k, node.k_norm, None, node.qk_norm_kind, node.qk_norm_eps)
        if node.rotary_dim:
            q, k = self.turn(q, node), self.turn(k, node)
        return [q, k, v]

    def rotary_rows(self, values: ir.Value, *, is_table: bool) -> ir.Value:
        """cos or sin of each new token, (B, T, 1, R/2), looked up once for all layers."""
        if values not in self._rotary_rows:
            rows = self.b.op("Gather", values, self.position_ids(), axis=0) if is_table else values
            self._rotary_rows[values] = self.b.op("Unsqueeze", rows, self.b.const([2]))
        return self._rotary_rows[values]

    def turn(self, x: ir.Value, node: AttentionNode) -> ir.Value:
        cos, sin = (self.rotary_rows(_given(v), is_table=node.has_table) for v in (node.cos, node.sin))
        b, half, still = self.b, node.rotary_dim // 2, node.head_dim - node.rotary_dim
        sizes = [half, half, still] if still else [half, half]
        first, second, *rest = b.ops("Split", x, b.const(sizes), n_outputs=len(sizes), axis=-1)
        left = b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin))
        right = b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin))
        return b.op("Concat", left, right, *rest, axis=-1)

    def bias(self, window: int, group: int) -> ir.Value:
        """What is added to the scores, 0 or almost -inf: (B, 1, T, P+T), T repeated for each head of a group."""
        if (window, group) not in self._biases:
            b = self.b
            shown = b.const(0, FLOAT)
            bias = b.op("Where", self.visible(window), shown, b.const(HIDDEN_SCORE, FLOAT))
            if group > 1 and not self.is_decode:
                bias = b.op("Concat", *[bias] * group, axis=2)
            self._biases[window, group] = bias
        return self._biases[window, group]

    def columns(self) -> ir.Value:
        return self.b.weight(COLUMNS, INT64, [self.max_context])

    def visible(self, window: int) -> ir.Value:
        b, mask = self.b, self.inputs.attention_mask
        seen = b.op("Unsqueeze", b.op("Cast", mask, to=ir.DataType.BOOL), b.const([1, 2]))  # (B, 1, 1, P+T)
        if not self.is_decode:  # a single new token is the last column: it sees them all
            total, length = b.dim(mask, 1), b.dim(self.inputs.input_ids, 1)
            # Sliced from a table: computing them with Range is what some runtimes cannot do.
            columns = b.slice(self.columns(), b.const([0]), total, 0)
            rows = b.slice(columns, b.op("Sub", total, length), b.const([END]), 0)
            seen = b.op("And", seen, b.op("LessOrEqual", columns, b.op("Unsqueeze", rows, b.const([1]))))
        if window:
            key_positions = b.op("Sub", b.op("CumSum", mask, b.const(1)), b.const(1))
            key_positions = b.op("Unsqueeze", key_positions, b.const([1, 2]))
            query_positions = b.op("Unsqueeze", self.position_ids(), b.const([1, 3]))
            distance = b.op("Sub", query_positions, key_positions)
            seen = b.op("And", seen, b.op("Less", distance, b.const(window)))
        return seen

    def widen(self, x: ir.Value) -> ir.Value:
        return x if self.dtype == FLOAT else self.b.op("Cast", x, to=FLOAT)

    def narrow(self, x: ir.Value) -> ir.Value:
        return x if self.dtype == FLOAT else self.b.op("Cast", x, to=self.dtype)


def _given(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value
