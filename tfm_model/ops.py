"""The operations that export targets lower in different ways; attention and recurrence have files of their own.

Called in PyTorch, each computes its plain definition, which is the reference of every parity check.
Called while torch.onnx traces, each leaves one node of domain `tfmx` in the graph, for `export/lower_*.py`
to replace. Anybody's module may use them, and gets the fused kernels of the `ort` target for it.

| node                 | inputs                       | outputs                                  |
|----------------------|------------------------------|------------------------------------------|
| tfmx::Embedding      | token_ids, weight (V, N)     | x                                        |
| tfmx::Linear         | x, weight (out, in), [bias]  | y                                        |
| tfmx::Norm           | x, weight, [bias]            | y                                        |
| tfmx::GatedActivation| x (..., 2m): gate, then up   | act(gate) * up                           |
| tfmx::Activation     | x                            | act(x)                                   |
| tfmx::Patches        | image (B, C, H, W)           | (B, patches, C patch²)                   |
| tfmx::Prepend        | x (B, T, N), first (N,)      | (B, T+1, N)                              |
| tfmx::NewMask        | attention_mask (B, P+T), x   | (B, T)                                   |
| tfmx::ByHead         | x (B, T, H D)                | (B, H, T, D)                             |

attention_ops.py adds Attention and CrossAttention, recurrent_ops.py RandomFeatureAttention, Lstm,
Recurrence and RecurrenceWeights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention_config import NormConfig
from .config import Activation

Attributes = dict[
    str, int | float | str | bool | Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bool]
]


def node(
    name: str, inputs: Sequence[Tensor | None], attributes: Attributes, like: Tensor, shape: Sequence[int]
) -> Tensor:
    return torch.onnx.ops.symbolic(
        f"tfmx::{name}", inputs, attributes, dtype=like.dtype, shape=shape, version=1
    )


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    if torch.onnx.is_in_onnx_export():
        return node("Embedding", (token_ids, weight), {}, weight, (*token_ids.shape, weight.shape[1]))
    return F.embedding(token_ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.onnx.is_in_onnx_export():
        return node("Linear", (x, weight, bias), {}, x, (*x.shape[:-1], weight.shape[0]))
    return F.linear(x, weight, bias)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, config: NormConfig) -> Tensor:
    if torch.onnx.is_in_onnx_export():
        return node("Norm", (x, weight, bias), {"kind": config.kind, "eps": config.eps}, x, x.shape)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # half precision squares overflow at 256
    if config.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.eps)).to(x.dtype) * weight
    return y if bias is None else y + bias


def activation(x: Tensor, kind: Activation) -> Tensor:
    if torch.onnx.is_in_onnx_export():
        return node("Activation", (x,), {"kind": kind}, x, x.shape)
    return _plain_activation(x, kind)


def gated_activation(x: Tensor, kind: Activation) -> Tensor:
    half = x.shape[-1] // 2
    if torch.onnx.is_in_onnx_export():
        return node("GatedActivation", (x,), {"kind": kind}, x, (*x.shape[:-1], half))
    return _plain_activation(x[..., :half], kind) * x[..., half:]


def _plain_activation(x: Tensor, kind: Activation) -> Tensor:
    if kind in {"gelu", "gelu_tanh"}:
        return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    if kind in {"sigmoid", "tanh"}:
        return torch.sigmoid(x) if kind == "sigmoid" else torch.tanh(x)
    return F.silu(x) if kind == "silu" else F.relu(x)


def patches(image: Tensor, patch: int) -> Tensor:
    """(B, C, H, W) → (B, patches, C patch²): row by row, each patch flattened by channel, row, column."""
    B, C, H, W = image.shape
    rows, columns = H // patch, W // patch
    if torch.onnx.is_in_onnx_export():
        return node("Patches", (image,), {"patch": patch}, image, (B, rows * columns, C * patch**2))
    cut = image.reshape(B, C, rows, patch, columns, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(B, rows * columns, C * patch**2)


def prepend(x: Tensor, first: Tensor) -> Tensor:
    """One more element (N,) before each sequence of x (B, T, N)."""
    B, T, N = x.shape
    if torch.onnx.is_in_onnx_export():
        return node("Prepend", (x, first), {}, x, (B, T + 1, N))
    return torch.cat((first.expand(B, 1, N), x), dim=1)


def new_mask(attention_mask: Tensor, x: Tensor) -> Tensor:
    """The mask's columns of the new elements, (B, T); before them are those of the past."""
    T = x.shape[1]
    if torch.onnx.is_in_onnx_export():
        return node("NewMask", (attention_mask, x), {}, attention_mask, x.shape[:2])
    return attention_mask[:, attention_mask.shape[1] - T :]


def by_head(x: Tensor, heads: int, head_dim: int) -> Tensor:
    """(B, T, H D) → (B, H, T, D)."""
    B, T, _ = x.shape
    if torch.onnx.is_in_onnx_export():
        return node("ByHead", (x,), {"heads": heads, "head_dim": head_dim}, x, (B, heads, T, head_dim))
    return x.reshape(B, T, heads, head_dim).transpose(1, 2)
