"""`select.onnx` and `sample.onnx`: the next token is chosen on the device, so that on CUDA only it crosses to the host.

`check` is 0 unless a logit is not finite: the guard that an argmax alone would lose. What is fed to `sample` is
in runtime/device_choice.py, and its definition on the CPU in runtime/sampling.py.
"""

from __future__ import annotations

import onnx_ir as ir

from .builder import Builder
from .lower_basic import END, FLOAT, INT64


def select_graph(vocab_size: int, opset: int) -> ir.Model:
    builder = Builder("select", opset)
    logits = builder.input("logits", FLOAT, ["batch_size", vocab_size])
    token = builder.op("ArgMax", logits, axis=1, keepdims=0)
    check = _check(builder, logits)
    builder.output(token, "token", INT64, ["batch_size"])
    builder.output(check, "check", FLOAT, ["batch_size"])
    return builder.model()


def sample_graph(vocab_size: int, opset: int) -> ir.Model:
    b = Builder("sample", opset)
    logits = b.input("logits", FLOAT, ["batch_size", vocab_size])
    ids = b.input("ids", INT64, ["batch_size", "changed"])
    penalty = b.input("penalty", FLOAT, ["batch_size", "changed"])
    minus = b.input("minus", FLOAT, ["batch_size", "changed"])
    inverse_temperature = b.input("inverse_temperature", FLOAT, [])
    top_k = b.input("top_k", INT64, [1])
    top_p, min_p = b.input("top_p", FLOAT, []), b.input("min_p", FLOAT, [])
    uniform = b.input("uniform", FLOAT, ["batch_size", 1])

    values = b.op("GatherElements", logits, ids, axis=1)
    is_positive = b.op("Greater", values, b.const(0, FLOAT))
    values = b.op("Where", is_positive, b.op("Div", values, penalty), b.op("Mul", values, penalty))
    changed = b.op("ScatterElements", logits, ids, b.op("Sub", values, minus), axis=1)

    best, order = b.ops("TopK", changed, top_k, n_outputs=2, axis=1)  # largest first
    distance = b.op("Sub", best, b.slice(best, b.const([0]), b.const([1]), 1))
    weights = b.op("Exp", b.op("Mul", distance, inverse_temperature))  # the largest is 1
    sums = b.op("CumSum", weights, b.const(1))
    in_top_p = b.op("Less", b.op("Sub", sums, weights), b.op("Mul", _last(b, sums), top_p))
    kept = b.op("And", in_top_p, b.op("GreaterOrEqual", weights, min_p))
    weights = b.op("Mul", weights, b.op("Cast", kept, to=FLOAT))
    sums = b.op("CumSum", weights, b.const(1))

    passed = b.op("LessOrEqual", sums, b.op("Mul", _last(b, sums), uniform))
    place = b.op("Min", _count(b, passed), b.op("Sub", _count(b, kept), b.const(1)))  # (B, 1)
    token = b.op("GatherElements", order, place, axis=1)
    logit = b.op("GatherElements", best, place, axis=1)
    b.output(b.op("Squeeze", token, b.const([1])), "token", INT64, ["batch_size"])
    b.output(b.op("Squeeze", logit, b.const([1])), "logit", FLOAT, ["batch_size"])
    b.output(_check(b, logits), "check", FLOAT, ["batch_size"])
    return b.model()


def _check(b: Builder, logits: ir.Value) -> ir.Value:
    zeros = b.op("Mul", logits, b.const(0, FLOAT))  # infinity and NaN give NaN
    return b.op("ReduceSum", zeros, b.const([1]), keepdims=0)


def _last(b: Builder, sums: ir.Value) -> ir.Value:
    return b.slice(sums, b.const([-1]), b.const([END]), 1)


def _count(b: Builder, flags: ir.Value) -> ir.Value:
    return b.op("ReduceSum", b.op("Cast", flags, to=INT64), b.const([1]), keepdims=1)
