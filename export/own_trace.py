"""How modules that know nothing of ours are traced: PyTorch's own ops become `tfmx::` nodes where targets differ.

So a linear layer of anybody's is stored, quantised and packed as one of the built-in family is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnxscript import opset18 as op
from onnxscript import values
from torch import Tensor

from ..tfm_model.ops import node
from .lower_basic import FLOAT, INT64

_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)"]


def _op(name: str, **inputs: str) -> values.Op:
    """A node of domain `tfmx` for PyTorch's translation; a type that ends in ? is of an input that may be missing."""
    kinds = [
        OpSchema.FormalParameter(
            name,
            type_.removesuffix("?"),
            param_option=OpSchema.FormalParameterOption.Optional
            if type_.endswith("?")
            else OpSchema.FormalParameterOption.Single,
        )
        for name, type_ in inputs.items()
    ]
    types = [("T", _FLOATS, "numbers"), ("I", ["tensor(int64)", "tensor(int32)"], "indices")]
    used = [entry for entry in types if entry[0] in {type_[0] for type_ in inputs.values()}]
    schema = OpSchema(
        name, "tfmx", 1, inputs=kinds, outputs=[OpSchema.FormalParameter("y", "T")], type_constraints=used
    )
    return values.Op(values.Opset("tfmx", 1), name, schema)


_LINEAR = _op("Linear", x="T", weight="T", bias="T?")
_EMBEDDING = _op("Embedding", ids="I", weight="T")


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if len(x.shape) < 2 or len(weight.shape) != 2:  # what MatMulNBits does not take
        y = op.MatMul(x, op.Transpose(weight))
        return y if bias is None else op.Add(y, bias)
    return _LINEAR(x, weight, bias)


def _embedding(
    weight: Any,
    token_ids: Any,
    padding_idx: int = -1,  # noqa: ARG001 (what these three change is training)
    scale_grad_by_freq: bool = False,  # noqa: ARG001
    sparse: bool = False,  # noqa: ARG001
) -> Any:
    if len(token_ids.shape) != 2:  # not of tokens (B, T), as the lowerings expect
        return op.Gather(weight, token_ids, axis=0)
    return _EMBEDDING(token_ids, weight)


def _attention(
    query: Any,  # (..., H, T, D)
    key: Any,  # (..., H_kv, S, D)
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,  # noqa: ARG001 (nothing is dropped in eval mode, see `eval_mode.py`)
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """F.scaled_dot_product_attention: a row that sees nothing gives zeros, as in PyTorch; softmax is in float32.

    torch.onnx's own translation adds the lowest number of float16 to scores, which overflows.
    """
    rank, D = len(query.shape), query.shape[-1]
    if enable_gqa:
        key, value = (_repeated(part, query.shape[-3] // part.shape[-3]) for part in (key, value))
    turned = op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2])
    factor = _constant(D**-0.5 if scale is None else scale, query.dtype)
    scores = op.Cast(op.MatMul(op.Mul(query, factor), turned), to=FLOAT)
    zero, seen = _constant(0.0, FLOAT), attn_mask
    if is_causal:
        seen = op.LessOrEqual(_count(key), op.Unsqueeze(_count(query), _constant([1], INT64)))
    if seen is None:
        weights = op.Softmax(scores, axis=-1)
    elif seen.dtype in {None, ir.DataType.BOOL}:  # None: our own comparison
        lowest = _constant(FLOAT.min, FLOAT)
        weights = op.Where(seen, op.Softmax(op.Where(seen, scores, lowest), axis=-1), zero)
    else:
        weights = op.Softmax(op.Add(scores, op.Cast(seen, to=FLOAT)), axis=-1)
        weights = op.Where(op.IsNaN(weights), zero, weights)
    return op.MatMul(op.Cast(weights, to=query.dtype), value)


def _repeated(x: Any, times: int) -> Any:
    """Each head (of axis -3) as often as queries share it."""
    heads = [head for head in range(x.shape[-3]) for _ in range(times)]
    return x if times == 1 else op.Gather(x, _constant(heads, INT64), axis=len(x.shape) - 3)


def _count(x: Any) -> Any:
    """0, 1, ... as many as x has elements, (T,)."""
    length = op.Squeeze(op.Shape(x, start=-2, end=-1))
    return op.Range(_constant(0, INT64), length, _constant(1, INT64))


def _constant(value: object, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(value, dtype=dtype))  # type: ignore[arg-type]


TRANSLATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.embedding.default: _embedding,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
}


def with_columns(mask: Tensor, x: Tensor, past_length: int) -> Tensor:
    """The same mask, and torch knows while it traces that its columns are those of the past and of x.

    Two free lengths would leave it open whether `columns[total - new :]` starts before the first column.
    """
    if not torch.onnx.is_in_onnx_export():
        return mask
    return node("WithColumns", (mask,), {}, mask, (x.shape[0], past_length + x.shape[1]))
