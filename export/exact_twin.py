"""A graph that rounds nothing on the way, made of one that does.

It reads the same weights through the same nodes. What remains between the two is the rounding of activations
(MatMulNBits at accuracy level 4) and of the cache (int8 keys and values in GroupQueryAttention).
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from .builder import serialised

EXACT_LEVEL = 1  # MatMulNBits: everything in float32
_SCALES = slice(12, 14)  # inputs of GroupQueryAttention: k_scale, v_scale
_CACHE_ATTRIBUTES = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")


def exact_twin(path: Path, cache_dtype: ir.DataType) -> bytes:
    """The graph at the path, as a model of the same inputs but for the cache's dtype."""
    model = ir.load(path)
    graph = model.graph
    for node in graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", EXACT_LEVEL)
        if node.op_type == "GroupQueryAttention" and "kv_cache_bit_width" in node.attributes:
            for index in range(_SCALES.start, _SCALES.stop):
                node.replace_input_with(index, None)
            for name in _CACHE_ATTRIBUTES:
                del node.attributes[name]
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype == ir.DataType.INT8:
            value.dtype = cache_dtype
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    return serialised(model)
