"""Matrices in blocks of codes, as standard ONNX ops: floating-point arithmetic only.

Integer division and shifts of bytes are where runtimes differ (one of them computes them wrongly); a code is at
most 255, so Floor and a product by 1/16 are exact in every precision.
"""

from __future__ import annotations

import onnx_ir as ir

from .layout import CODES, SCALES, SHIFTS, ZEROS, BlockLayout, Target
from .lower_basic import BasicLowering, dims


class BlockLowering(BasicLowering):
    target: Target = "portable"

    def block_linear(
        self, x: ir.Value, weight: ir.Value, bias: ir.Value | None, layout: BlockLayout
    ) -> ir.Value:
        parts = self.block_parts(weight, layout)
        rows, columns = dims(weight)
        matrix = self.b.op("Reshape", self._weights(parts, layout), self.b.const([columns, rows]))
        y = self.b.op("MatMul", x, matrix)
        return y if bias is None else self.b.op("Add", y, bias)

    def block_embedding(self, token_ids: ir.Value, weight: ir.Value, layout: BlockLayout) -> ir.Value:
        """A token's vector is a column, and only those are computed: (n_blocks, block, B, T)."""
        chosen = {
            part: self.b.op("Gather", value, token_ids, axis=2)
            for part, value in self.block_parts(weight, layout).items()
        }
        vectors = self.b.op("Transpose", self._weights(chosen, layout), perm=[2, 3, 0, 1])
        return self.b.op("Reshape", vectors, self.b.const([0, 0, dims(weight)[1]]))

    def block_parts(self, weight: ir.Value, layout: BlockLayout) -> dict[str, ir.Value]:
        rows, columns = dims(weight)
        return {
            part: self.b.weight(f"{weight.name}{part}", dtype, shape)
            for part, (dtype, shape) in layout.parts(self.target, (rows, columns), self.dtype).items()
        }

    def _weights(self, parts: dict[str, ir.Value], layout: BlockLayout) -> ir.Value:
        """(n_blocks, block, ...)."""
        b, code = self.b, self.b.op("Cast", parts[CODES], to=self.dtype)
        if layout.format.bits == 4:
            upper = b.op("Floor", b.op("Mul", code, b.const(1 / 16, self.dtype)))
            lower = b.op("Sub", code, b.op("Mul", upper, b.const(16, self.dtype)))
            code = b.op("Concat", lower, upper, axis=1)
        if ZEROS in parts:
            zero = b.op("Cast", parts[ZEROS], to=self.dtype)
        else:
            zero = b.const(layout.format.middle, self.dtype)
        values = b.op("Mul", b.op("Sub", code, zero), parts[SCALES])
        return b.op("Add", values, parts[SHIFTS]) if SHIFTS in parts else values
