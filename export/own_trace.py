"""How modules that know nothing of ours are traced: PyTorch's own ops become `tfmx::` nodes where targets differ.

So a linear layer of anybody's is stored, quantised and packed as one of the built-in family is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from onnx.defs import OpSchema
from onnxscript import opset18, values
from torch import Tensor

from ..tfm_model.ops import node

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
_EMBEDDING = _op("Embedding", token_ids="I", weight="T")


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return _LINEAR(x, weight, bias)


def _embedding(
    weight: Any,
    token_ids: Any,
    padding_idx: int = -1,  # noqa: ARG001 (what these three change is training)
    scale_grad_by_freq: bool = False,  # noqa: ARG001, FBT001, FBT002
    sparse: bool = False,  # noqa: ARG001, FBT001, FBT002
) -> Any:
    if len(token_ids.shape) != 2:  # not of tokens (B, T), as the lowerings expect
        return opset18.Gather(weight, token_ids, axis=0)
    return _EMBEDDING(token_ids, weight)


TRANSLATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.embedding.default: _embedding,
}


def with_columns(mask: Tensor, x: Tensor, past_length: int) -> Tensor:
    """The same mask, and torch knows while it traces that its columns are those of the past and of x.

    Two free lengths would leave it open whether `columns[total - new :]` starts before the first column.
    """
    if not torch.onnx.is_in_onnx_export():
        return mask
    return node("WithColumns", (mask,), {}, mask, (x.shape[0], past_length + x.shape[1]))
