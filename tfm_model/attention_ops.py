"""Softmax attention, over a sequence itself and over another one: plain PyTorch when run, one node when traced.

| node                 | inputs                                                                           | outputs                            |
|----------------------|----------------------------------------------------------------------------------|------------------------------------|
| tfmx::Attention      | qkv, [past_key, past_value], [attention_mask, position_ids], [cos, sin], [q_norm, k_norm], [distance_keys, distance_values], [distance_bias], [slopes] | y, key, value, [weights] |
| tfmx::CrossAttention | q, key, value, [encoder_attention_mask]                                          | y, [weights]                       |

The distance of two elements is the key's position less the query's, and a position is the number of real
elements before one in its row: pads take no place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_config import AttentionConfig
from .ops import Attributes, norm
from .rotary import turn

HIDDEN_SCORE = -1e30  # finite, so that a row that sees nothing (a pad) gives numbers, not NaN


class Relative(NamedTuple):
    """What distances -M ... M add, by M + distance."""

    keys: Tensor | None = None  # (2M+1, D): q · keys[distance] is added to a score
    values: Tensor | None = None  # (2M+1, Dv): added to a value
    bias: Tensor | None = None  # (H, 2M+1): added to a score
    slopes: Tensor | None = None  # (H,): -slope |distance| is added to a score


# What a cache makes of new keys and values, where it holds them in fewer bits
Kept = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Attended(NamedTuple):
    y: Tensor  # (B, T, H Dv)
    key: Tensor  # (B, H_kv, P+T, D)
    value: Tensor
    weights: Tensor | None  # (B, H, T, P+T)


def attention(
    qkv: Tensor,  # (B, T, H D + H_kv D + H_kv Dv): queries, keys, values of the new elements
    past: tuple[Tensor, Tensor] | None,  # keys (B, H_kv, P, D), already turned, and values
    attention_mask: Tensor | None,  # (B, P+T), 1 = real; None: all are
    position_ids: Tensor | None,  # (B, T)
    rotary: tuple[Tensor, Tensor] | None,  # cos, sin: tables (context, R/2), or for each element (B, T, R/2)
    q_norm: Tensor | None,  # (D,)
    k_norm: Tensor | None,
    config: AttentionConfig,
    *,
    relative: Relative | None = None,
    value_dim: int | None = None,  # None: head_dim
    causal: bool = True,
    window: int | None = None,
    with_weights: bool = False,
    kept: Kept | None = None,
) -> Attended:
    B, T, _ = qkv.shape
    H, H_kv, D, Dv = config.n_heads, config.n_kv_heads, config.head_dim, value_dim or config.head_dim
    relative = relative or Relative()
    if torch.onnx.is_in_onnx_export():
        past_key, past_value = past or (None, None)
        cos, sin = rotary or (None, None)
        P = 0 if past_key is None else past_key.shape[2]
        attributes = attention_attributes(config, window) | {
            "value_dim": Dv, "causal": int(causal), "has_weights": int(with_weights)
        }  # fmt: skip
        inputs = (
            qkv,
            past_key,
            past_value,
            attention_mask,
            position_ids,
            cos,
            sin,
            q_norm,
            k_norm,
            *relative,
        )
        shapes = [(B, T, H * Dv), (B, H_kv, P + T, D), (B, H_kv, P + T, Dv), (B, H, T, P + T)]
        count = 4 if with_weights else 3
        y, key, value, *maps = torch.onnx.ops.symbolic_multi_out(
            "tfmx::Attention",
            inputs,
            attributes,
            dtypes=(qkv.dtype,) * count,
            shapes=shapes[:count],
            version=1,
        )
        return Attended(y, key, value, maps[0] if maps else None)

    q, k, v = split_heads(qkv, position_ids, rotary, q_norm, k_norm, config, Dv)
    if kept is not None:
        k, v = kept(k, v)
    key, value = (
        (k, v) if past is None else (torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True))
    )
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.reshape(B, H_kv, H // H_kv, T, D)  # (B, H_kv, H/H_kv, T, D)
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).flatten(1, 2).to(wide)  # (B, H, T, P+T)
    index = None
    if attention_mask is not None and position_ids is not None and any(r is not None for r in relative):
        distance = key_positions(attention_mask)[:, None, :] - position_ids[:, :, None]  # (B, T, P+T)
        index = _distance_index(distance, relative)
        scores = _add_to_scores(scores, q, distance, index, relative, config.score_scale)
    else:
        scores = scores * config.score_scale
    if config.softcap is not None:
        scores = config.softcap * torch.tanh(scores / config.softcap)
    if attention_mask is not None:
        seen = visible(attention_mask, T, position_ids, causal=causal, window=window)[
            :, None
        ]  # (B, 1, T, P+T)
        scores = torch.where(seen, scores, HIDDEN_SCORE)
    weights = scores.softmax(-1).to(q.dtype)
    y = (weights.reshape(B, H_kv, H // H_kv, T, -1) @ value[:, :, None]).flatten(1, 2)  # (B, H, T, Dv)
    if relative.values is not None and index is not None:
        y = y + torch.einsum("bhts,btsd->bhtd", weights, relative.values[index])
    return Attended(y.transpose(1, 2).flatten(2), key, value, weights if with_weights else None)


def split_heads(
    qkv: Tensor,
    position_ids: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    config: AttentionConfig,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, T, D), keys (B, H_kv, T, D) and values (B, H_kv, T, Dv), normalised and turned."""
    B, T, _ = qkv.shape
    sizes = [config.q_size, config.kv_size, config.n_kv_heads * value_dim]
    q, k, v = torch.split(qkv, sizes, dim=-1)
    q, k = q.reshape(B, T, -1, config.head_dim), k.reshape(B, T, -1, config.head_dim)
    if q_norm is not None and k_norm is not None and config.qk_norm is not None:
        q, k = norm(q, q_norm, None, config.qk_norm), norm(k, k_norm, None, config.qk_norm)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.reshape(B, T, -1, value_dim).transpose(1, 2)
    if rotary is not None and position_ids is not None:
        cos, sin = (table[position_ids] if table.dim() == 2 else table for table in rotary)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
    return q, k, v


def _distance_index(distance: Tensor, relative: Relative) -> Tensor | None:
    """Where a distance lies in the tables: those beyond their ends count as the last."""
    tables = [
        (table.shape[axis] - 1) // 2
        for table, axis in ((relative.keys, 0), (relative.values, 0), (relative.bias, 1))
        if table is not None
    ]
    return distance.clamp(-tables[0], tables[0]) + tables[0] if tables else None


def _add_to_scores(
    scores: Tensor, q: Tensor, distance: Tensor, index: Tensor | None, relative: Relative, scale: float
) -> Tensor:
    """Shaw's vectors count like keys, before the scale; biases and slopes after it."""
    if relative.keys is not None:
        scores = scores + torch.einsum("bhtd,btsd->bhts", q, relative.keys[index]).to(scores.dtype)
    scores = scores * scale
    if relative.bias is not None:
        scores = scores + relative.bias[:, index].movedim(0, 1).to(scores.dtype)
    if relative.slopes is not None:
        scores = scores - relative.slopes[:, None, None].to(scores.dtype) * distance.abs()[:, None]
    return scores


def key_positions(attention_mask: Tensor) -> Tensor:
    """Of each column: how many real ones stand before it."""
    return attention_mask.cumsum(1) - 1


def visible(
    attention_mask: Tensor, T: int, position_ids: Tensor | None, *, causal: bool, window: int | None
) -> Tensor:
    """Which columns each new element sees, (B, 1 or T, P+T): real ones; if causal none after itself or before its window."""
    seen = attention_mask.bool()[:, None, :]
    if not causal:
        return seen
    total = attention_mask.shape[1]
    columns = torch.arange(total, device=attention_mask.device)
    seen = seen & (columns[None, None, :] <= columns[None, total - T :, None])
    if window is not None and position_ids is not None:
        seen = seen & (position_ids[:, :, None] - key_positions(attention_mask)[:, None, :] < window)
    return seen


def cross_attention(
    q: Tensor,  # (B, T, H D)
    key: Tensor,  # (B, H_kv, S, D)
    value: Tensor,
    encoder_attention_mask: Tensor | None,  # (B, S)
    config: AttentionConfig,
    *,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """y (B, T, H D) and the weights (B, H, T, S), if wanted."""
    B, T, _ = q.shape
    H, H_kv, D = config.n_heads, config.n_kv_heads, config.head_dim
    if torch.onnx.is_in_onnx_export():
        attributes = attention_attributes(config, None) | {"has_weights": int(with_weights)}
        shapes = [q.shape, (B, H, T, key.shape[2])]
        count = 2 if with_weights else 1
        y, *maps = torch.onnx.ops.symbolic_multi_out(
            "tfmx::CrossAttention", (q, key, value, encoder_attention_mask), attributes,
            dtypes=(q.dtype,) * count, shapes=shapes[:count], version=1,
        )  # fmt: skip
        return y, maps[0] if maps else None
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.reshape(B, T, H_kv, H // H_kv, D).permute(0, 2, 3, 1, 4)  # (B, H_kv, H/H_kv, T, D)
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).to(wide) * config.score_scale
    if config.softcap is not None:
        scores = config.softcap * torch.tanh(scores / config.softcap)
    if encoder_attention_mask is not None:
        scores = torch.where(encoder_attention_mask.bool()[:, None, None, None], scores, HIDDEN_SCORE)
    weights = scores.softmax(-1).to(q.dtype)
    y = (weights @ value[:, :, None]).flatten(1, 2).transpose(1, 2).flatten(2)
    return y, weights.flatten(1, 2) if with_weights else None


def attention_attributes(config: AttentionConfig, window: int | None) -> Attributes:
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
