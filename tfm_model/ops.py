"""The operations that export targets lower in different ways.

Called in PyTorch, each computes its plain definition, which is the reference of every parity check.
Called while torch.onnx traces, each leaves one node of domain `tfmx` in the graph, for `export/lower_*.py`
to replace. Anybody's module may use them, and gets the fused kernels of the `ort` target for it.

| node                 | inputs                                                                     | outputs                 |
|----------------------|----------------------------------------------------------------------------|-------------------------|
| tfmx::Embedding      | token_ids, weight (V, N)                                                    | x                       |
| tfmx::Linear         | x, weight (out, in), [bias]                                                 | y                       |
| tfmx::Norm           | x, weight, [bias]                                                           | y                       |
| tfmx::GatedActivation| x (..., 2m): gate, then up                                                  | act(gate) * up          |
| tfmx::Activation     | x                                                                           | act(x)                  |
| tfmx::Attention      | qkv, past_key, past_value, attention_mask, position_ids, [cos, sin], [q_norm, k_norm] | y, present_key, present_value |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import Activation, AttentionConfig, NormConfig
from .rotary import turn

HIDDEN_SCORE = -1e30  # finite, so that a row that sees nothing (a pad) gives numbers, not NaN

_Attributes = dict[
    str, int | float | str | bool | Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bool]
]


def _node(
    name: str, inputs: Sequence[Tensor | None], attributes: _Attributes, like: Tensor, shape: Sequence[int]
) -> Tensor:
    return torch.onnx.ops.symbolic(
        f"tfmx::{name}", inputs, attributes, dtype=like.dtype, shape=shape, version=1
    )


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    if torch.onnx.is_in_onnx_export():
        return _node("Embedding", (token_ids, weight), {}, weight, (*token_ids.shape, weight.shape[1]))
    return F.embedding(token_ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.onnx.is_in_onnx_export():
        return _node("Linear", (x, weight, bias), {}, x, (*x.shape[:-1], weight.shape[0]))
    return F.linear(x, weight, bias)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, config: NormConfig) -> Tensor:
    if torch.onnx.is_in_onnx_export():
        return _node("Norm", (x, weight, bias), {"kind": config.kind, "eps": config.eps}, x, x.shape)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # half precision squares overflow at 256
    if config.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.eps)).to(x.dtype) * weight
    return y if bias is None else y + bias


def activation(x: Tensor, kind: Activation) -> Tensor:
    if torch.onnx.is_in_onnx_export():
        return _node("Activation", (x,), {"kind": kind}, x, x.shape)
    return _plain_activation(x, kind)


def gated_activation(x: Tensor, kind: Activation) -> Tensor:
    half = x.shape[-1] // 2
    if torch.onnx.is_in_onnx_export():
        return _node("GatedActivation", (x,), {"kind": kind}, x, (*x.shape[:-1], half))
    return _plain_activation(x[..., :half], kind) * x[..., half:]


def _plain_activation(x: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def attention(
    qkv: Tensor,  # (B, T, (H + 2 H_kv) D): queries, keys, values of the new tokens
    past_key: Tensor,  # (B, H_kv, P, D), already turned
    past_value: Tensor,
    attention_mask: Tensor,  # (B, P+T), 1 = real
    position_ids: Tensor,  # (B, T)
    rotary: tuple[Tensor, Tensor] | None,  # cos, sin: tables (context, R/2), or for each token (B, T, R/2)
    q_norm: Tensor | None,  # (D,)
    k_norm: Tensor | None,
    config: AttentionConfig,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal grouped-query attention over the cache and the new tokens; returns y (B, T, H D) and the new cache."""
    B, T, _ = qkv.shape
    H, H_kv, D = config.n_heads, config.n_kv_heads, config.head_dim
    if torch.onnx.is_in_onnx_export():
        cos, sin = rotary or (None, None)
        inputs = (qkv, past_key, past_value, attention_mask, position_ids, cos, sin, q_norm, k_norm)
        cache = (B, H_kv, past_key.shape[2] + T, D)
        y, key, value = torch.onnx.ops.symbolic_multi_out(
            "tfmx::Attention",
            inputs,
            _attention_attributes(config, window),
            dtypes=(qkv.dtype,) * 3,
            shapes=((B, T, H * D), cache, cache),
            version=1,
        )
        return y, key, value

    q, k, v = (part.reshape(B, T, -1, D) for part in torch.split(qkv, [H * D, H_kv * D, H_kv * D], dim=-1))
    if q_norm is not None and k_norm is not None and config.qk_norm is not None:
        q, k = norm(q, q_norm, None, config.qk_norm), norm(k, k_norm, None, config.qk_norm)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, D), (B, H_kv, T, D)
    if rotary is not None:
        cos, sin = (table[position_ids] if table.dim() == 2 else table for table in rotary)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
    key = torch.cat((past_key, k), dim=2)  # (B, H_kv, P+T, D)
    value = torch.cat((past_value, v), dim=2)

    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.reshape(B, H_kv, -1, T, D)  # (B, H_kv, H/H_kv, T, D)
    scores = (q @ key[:, :, None].transpose(-1, -2)).to(wide) * config.score_scale
    if config.softcap is not None:
        scores = config.softcap * torch.tanh(scores / config.softcap)
    seen = visible(attention_mask, position_ids, window)[:, None, None]  # (B, 1, 1, T, P+T)
    weights = torch.where(seen, scores, HIDDEN_SCORE).softmax(-1).to(q.dtype)
    y = weights @ value[:, :, None]
    return y.flatten(1, 2).transpose(1, 2).flatten(2), key, value


def visible(attention_mask: Tensor, position_ids: Tensor, window: int | None) -> Tensor:
    """Which columns each new token sees, (B, T, P+T): real ones, not after itself, not before its window."""
    total, T = attention_mask.shape[1], position_ids.shape[1]
    columns = torch.arange(total, device=attention_mask.device)
    seen = attention_mask.bool()[:, None, :] & (columns[None, None, :] <= columns[None, total - T :, None])
    if window is not None:
        key_positions = (
            attention_mask.cumsum(1) - 1
        )  # a column's position is the number of real ones before it
        seen = seen & (position_ids[:, :, None] - key_positions[:, None, :] < window)
    return seen


def _attention_attributes(config: AttentionConfig, window: int | None) -> _Attributes:
    return {
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "scale": config.score_scale,
        "softcap": config.softcap or 0.0,
        "window": window or 0,
        "rotary_dim": config.rotary.dim if config.rotary else 0,
        "qk_norm_kind": config.qk_norm.kind if config.qk_norm else "",
        "qk_norm_eps": config.qk_norm.eps if config.qk_norm else 0.0,
    }
