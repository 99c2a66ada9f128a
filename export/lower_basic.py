"""`tfmx::` nodes that look at each element alone, as standard ONNX ops.

Half precision computes norms and activations in float32, as PyTorch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import onnx_ir as ir

from .builder import Builder

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
COLUMNS = "tfmx.columns"  # 0, 1, 2, ...: a table in the weights file
END = 2**63 - 1  # as far as a Slice goes


class BasicLowering:
    def __init__(self, builder: Builder, dtype: ir.DataType, max_context: int, *, is_decode: bool) -> None:
        self.b, self.dtype = builder, dtype
        self.max_context, self.is_decode = max_context, is_decode
        self._cache: dict[Hashable, ir.Value] = {}

    def cached(self, key: Hashable, make: Callable[[], ir.Value]) -> ir.Value:
        """What all layers share is made once."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def embedding(self, token_ids: ir.Value, weight: ir.Value, *, is_column: bool) -> ir.Value:
        if not is_column:
            return self.b.op("Gather", weight, token_ids, axis=0)
        # The head's matrix (width, vocab) serves both: a column is a token's vector.
        return self.b.op("Transpose", self.b.op("Gather", weight, token_ids, axis=1), perm=[1, 2, 0])

    def linear(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None, *, is_column: bool) -> ir.Value:
        if not is_column:  # computed, or read by others as it is
            weight = self.b.op("Transpose", weight, perm=[1, 0])
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
        if kind in {"relu", "sigmoid", "tanh"}:
            return b.op(kind.capitalize(), x)
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

    def gated_activation(self, x: ir.Value, kind: str) -> ir.Value:
        gate, up = self.parts(x, 2)
        return self.b.op("Mul", self.activation(gate, kind), up)

    def parts(self, x: ir.Value, count: int) -> Sequence[ir.Value]:
        """Equal parts of the last axis."""
        if self.b.opset < 18:  # equal parts were the default
            return self.b.ops("Split", x, n_outputs=count, axis=-1)
        return self.b.ops("Split", x, n_outputs=count, axis=-1, num_outputs=count)

    def patches(self, image: ir.Value, node: ir.Node, patch: int) -> ir.Value:
        assert node.inputs[0] is not None
        assert node.inputs[0].shape is not None
        _, C, H, W = (dim if isinstance(dim, int) else 0 for dim in node.inputs[0].shape)
        b, rows, columns = self.b, H // patch, W // patch
        cut = b.op("Reshape", image, b.const([-1, C, rows, patch, columns, patch]))
        cut = b.op("Transpose", cut, perm=[0, 2, 4, 1, 3, 5])
        return b.op("Reshape", cut, b.const([-1, rows * columns, C * patch**2]))

    def prepend(self, x: ir.Value, first: ir.Value) -> ir.Value:
        b = self.b
        shape = b.op("Concat", b.dim(x, 0), b.const([1]), b.dim(x, 2), axis=0)
        return b.op("Concat", b.op("Expand", first, shape), x, axis=1)

    def new_mask(self, attention_mask: ir.Value, x: ir.Value) -> ir.Value:
        start = self.b.const([-1]) if self.is_decode else self.b.op("Neg", self.b.dim(x, 1))
        return self.b.slice(attention_mask, start, self.b.const([END]), 1)

    def packed_places(self, mask: ir.Value) -> ir.Value:
        """Where each column goes when a row's real elements come first, in their order, (B, T)."""
        b, one = self.b, self.b.const(1)
        pads = b.op("CumSum", b.op("Sub", one, mask), one)
        count = b.op("ReduceSum", mask, b.const([1]), keepdims=1)
        is_real = b.op("Cast", mask, to=ir.DataType.BOOL)
        rank = b.op("Where", is_real, b.op("CumSum", mask, one), b.op("Add", count, pads))
        return b.op("Sub", rank, one)

    def by_head(self, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
        parted = self.b.op("Reshape", x, self.b.const([0, 0, heads, head_dim]))
        return self.b.op("Transpose", parted, perm=[0, 2, 1, 3])

    def columns(self) -> ir.Value:
        return self.b.weight(COLUMNS, INT64, [self.max_context])

    def first_columns(self, count: ir.Value) -> ir.Value:
        """0 ... count-1. Sliced from a table: computing them with Range is what some runtimes cannot do."""
        return self.b.slice(self.columns(), self.b.const([0]), count, 0)

    def widen(self, x: ir.Value) -> ir.Value:
        return x if self.dtype == FLOAT else self.b.op("Cast", x, to=FLOAT)

    def narrow(self, x: ir.Value) -> ir.Value:
        return x if self.dtype == FLOAT else self.b.op("Cast", x, to=self.dtype)


def dims(value: ir.Value) -> tuple[int, ...]:
    """The shape of a value that has no named dimension."""
    assert value.shape is not None
    return value.shape.numpy()


def given(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value
