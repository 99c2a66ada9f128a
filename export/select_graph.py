"""`select.onnx`: greedy choice on the device, so that on CUDA only a token crosses to the host.

`check` is 0 unless a logit is not finite: the guard that an argmax alone would lose.
"""

from __future__ import annotations

import onnx_ir as ir

from .builder import Builder
from .lower_portable import FLOAT, INT64


def select_graph(vocab_size: int, opset: int) -> ir.Model:
    builder = Builder("select", opset)
    logits = builder.input("logits", FLOAT, ["batch_size", vocab_size])
    token = builder.op("ArgMax", logits, axis=1, keepdims=0)
    zeros = builder.op("Mul", logits, builder.const(0, FLOAT))  # infinity and NaN give NaN
    check = builder.op("ReduceSum", zeros, builder.const([1]), keepdims=0)
    builder.output(token, "token", INT64, ["batch_size"])
    builder.output(check, "check", FLOAT, ["batch_size"])
    return builder.model()
