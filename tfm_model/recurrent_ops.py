"""What carries a state of constant size: random-feature attention, the LSTM, and the linear recurrence.

| node                        | inputs                                                                      | outputs                        |
|-----------------------------|-----------------------------------------------------------------------------|--------------------------------|
| tfmx::RandomFeatureAttention| qkv, directions (D, k), [mask], [position_ids], [cos, sin], [q_norm, k_norm], [sums, normalizer, [peak]] | y, sums, normalizer, [peak] |
| tfmx::Lstm                  | x, mask, hidden, cell, input_weight (4N, in), hidden_weight (4N, N), [bias] | y, hidden, cell                |
| tfmx::Recurrence            | keep (B, T, N), add (B, T, N), start (B, N)                                 | every c_t (B, T, N), the last  |
| tfmx::RecurrenceWeights     | keep (B, T, N), add (B, T, N): before their sigmoids; mask                  | (B, N, T, T)                   |

**Random features.** For any x, y and w ~ N(0, σ² I), E[cos(w·(x - y))] = exp(-σ²|x - y|²/2). With
φ(x) = sqrt(1/D) [sin(w_1·x) ... sin(w_D·x), cos(w_1·x) ... cos(w_D·x)], φ(x)·φ(y) is the mean of
cos(w_i·(x - y)) over the D directions, so it approximates that Gaussian, with an error like 1/sqrt(D). And for a scale s

    exp(s q·k) = exp(s|q|²/2) exp(s|k|²/2) exp(-s|q - k|²/2) ≈ exp(s|q|²/2) exp(s|k|²/2) φ(q')·φ(k'),   x' = x sqrt(s)/σ

so that softmax(s q·k) v is approximated by  φ(q')·Σ e_k φ(k') v^T / φ(q')·Σ e_k φ(k')  with e_k = exp(s|k|²/2): the
factor of the query stands above and below the line, and cancels. The sums S = Σ e_k φ(k') v^T and z = Σ e_k φ(k') are
all that a causal model has to carry. e_k can overflow, so that S and z are kept times exp(-peak) with peak the largest s|k|²/2
so far; that cancels too. Queries and keys of length 1 have one e_k for all, which is left out. S, z and peak are kept
in float32 also in half precision: a sum in float16 stops growing at 2048 times its terms.
(Exported prefills have one peak for all rows of a call: rows before a key whose s|k|²/2 is larger by 69 or more
would lose their numbers, and the gate would tell.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention_config import AttentionConfig
from .attention_ops import HIDDEN_SCORE, attention_attributes, split_heads
from .config import CellActivation
from .ops import node

SPAN = 64  # causal sums are taken over spans: within one by a masked matrix, before it by the state
# A denominator nearer to 0 counts as this: a row of pads gives numbers, not NaN. It is so small because longer keys
# that come later shrink an earlier row's numerator and denominator alike.
LEAST = 1e-30


class FeatureState(NamedTuple):
    sums: Tensor  # S, (B, H, 2D, Dv)
    normalizer: Tensor  # z, (B, H, 2D)
    peak: Tensor | None  # (B, H); none where queries and keys have length 1


def random_feature_attention(
    qkv: Tensor,
    directions: Tensor,  # w, (D, k)
    mask: Tensor | None,  # (B, T), of the new elements
    position_ids: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    state: FeatureState | None,  # None: nothing came before
    config: AttentionConfig,
    *,
    value_dim: int,
    causal: bool,
) -> tuple[Tensor, FeatureState]:
    """y (B, T, H Dv), linear in T, and the state after these elements."""
    features = config.random_features
    assert features is not None
    B, T, _ = qkv.shape
    H, F2 = config.n_heads, 2 * features.features
    has_peak = not features.unit_norm
    wide = torch.promote_types(qkv.dtype, torch.float32)  # of sums over any length, the state's
    if torch.onnx.is_in_onnx_export():
        attributes = attention_attributes(config, None) | {
            "value_dim": value_dim, "causal": int(causal), "sigma": features.sigma, "unit_norm": int(features.unit_norm)
        }  # fmt: skip
        cos, sin = rotary or (None, None)
        inputs = (qkv, directions, mask, position_ids, cos, sin, q_norm, k_norm, *(state or ()))
        shapes = [(B, T, H * value_dim), (B, H, F2, value_dim), (B, H, F2), (B, H)]
        count = 4 if has_peak else 3
        y, sums, normalizer, *rest = torch.onnx.ops.symbolic_multi_out(
            "tfmx::RandomFeatureAttention", inputs, attributes,
            dtypes=(qkv.dtype, wide, wide, wide)[:count], shapes=shapes[:count], version=1,
        )  # fmt: skip
        return y, FeatureState(sums, normalizer, rest[0] if rest else None)

    q, k, v = split_heads(qkv, position_ids, rotary, q_norm, k_norm, config, value_dim)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if features.unit_norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    shrink = config.score_scale**0.5 / features.sigma
    q_features, k_features = (_features(x * shrink, directions.to(wide)) for x in (q, k))  # (B, H, T, 2D)
    size = k.new_zeros(B, H, T)  # s|k|²/2
    if has_peak:
        size = config.score_scale / 2 * k.square().sum(-1)
    if mask is not None:
        k_features, size = k_features * mask[:, None, :, None], size * mask[:, None]
    so_far = _Sums(k.new_zeros(B, H, F2, value_dim + 1), k.new_zeros(B, H))
    if state is not None:
        both = torch.cat((state.sums, state.normalizer[..., None]), dim=-1)
        so_far = _Sums(both, so_far.peak if state.peak is None else state.peak)
    y, so_far = _attend(q_features, k_features, F.pad(v, (0, 1), value=1.0), size, so_far, causal=causal)
    bottom = torch.where(y[..., -1:].abs() < LEAST, LEAST, y[..., -1:])
    y = (y[..., :-1] / bottom).to(qkv.dtype).transpose(1, 2).flatten(2)
    return y, FeatureState(so_far.total[..., :-1], so_far.total[..., -1], so_far.peak if has_peak else None)


def _features(x: Tensor, directions: Tensor) -> Tensor:
    angles = x @ directions.T
    return torch.cat((angles.sin(), angles.cos()), dim=-1) * math.sqrt(1 / directions.shape[0])


class _Sums(NamedTuple):
    total: Tensor  # S and z side by side, times exp(-peak): (B, H, 2D, Dv+1)
    peak: Tensor  # (B, H)

    def plus(self, k: Tensor, v: Tensor, size: Tensor) -> _Sums:
        peak = torch.maximum(self.peak, size.amax(-1))
        new = (k * torch.exp(size - peak[..., None])[..., None]).transpose(-1, -2) @ v
        return _Sums(self.total * torch.exp(self.peak - peak)[..., None, None] + new, peak)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, sums: _Sums, *, causal: bool
) -> tuple[Tensor, _Sums]:
    """Rows of q times the sums, all of them or those up to each; each row has the peak of what it sees."""
    if not causal:
        sums = sums.plus(k, v, size)
        return q @ sums.total, sums
    rows = []
    for q_, k_, v_, size_ in zip(*(torch.split(x, SPAN, dim=2) for x in (q, k, v, size)), strict=True):
        peak = torch.maximum(sums.peak[..., None], size_.cummax(-1).values)  # (B, H, t)
        factors = torch.exp((size_[..., None, :] - peak[..., None]).clamp(max=0))  # (B, H, t, s)
        within = (q_ @ k_.transpose(-1, -2) * factors).tril() @ v_
        before = q_ @ sums.total * torch.exp(sums.peak[..., None] - peak)[..., None]
        rows.append(before + within)
        sums = sums.plus(k_, v_, size_)
    return torch.cat(rows, dim=2), sums


def lstm(
    x: Tensor,  # (B, T, in)
    mask: Tensor,  # (B, T): pads leave the state as it is
    hidden: Tensor,  # h, (B, N)
    cell: Tensor,  # c, (B, N)
    input_weight: Tensor,  # (4N, in): of the gates i, o, f, and the candidate
    hidden_weight: Tensor,  # (4N, N)
    bias: Tensor | None,  # (4N,)
    candidate: CellActivation,
    output: CellActivation,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every h_t (B, T, N), and the last h and c."""
    if torch.onnx.is_in_onnx_export():
        y, last, last_cell = torch.onnx.ops.symbolic_multi_out(
            "tfmx::Lstm", (x, mask, hidden, cell, input_weight, hidden_weight, bias),
            {"candidate": candidate, "output": output},
            dtypes=(x.dtype,) * 3, shapes=((*x.shape[:2], hidden.shape[1]), hidden.shape, cell.shape), version=1,
        )  # fmt: skip
        return y, last, last_cell
    act, out_act = (torch.tanh if kind == "tanh" else torch.sigmoid for kind in (candidate, output))
    from_input = F.linear(x, input_weight, bias)
    rows = []
    for t in range(x.shape[1]):
        i, o, f, new = (from_input[:, t] + F.linear(hidden, hidden_weight)).chunk(4, dim=-1)
        next_cell = i.sigmoid() * act(new) + f.sigmoid() * cell
        real = mask[:, t, None].bool()
        cell = torch.where(real, next_cell, cell)
        hidden = torch.where(real, o.sigmoid() * out_act(next_cell), hidden)
        rows.append(hidden)
    return torch.stack(rows, dim=1), hidden, cell


def recurrence(keep: Tensor, add: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """c_t = keep_t c_{t-1} + add_t for all t at once, (B, T, N); and the last.

    Each round joins spans of twice the length: log2(T) rounds, and as 0 <= keep <= 1 products only shrink, so
    that no length overflows or divides.
    """
    if torch.onnx.is_in_onnx_export():
        cells, last = torch.onnx.ops.symbolic_multi_out(
            "tfmx::Recurrence", (keep, add, start), {},
            dtypes=(keep.dtype,) * 2, shapes=(keep.shape, start.shape), version=1,
        )  # fmt: skip
        return cells, last
    T, shift = keep.shape[1], 1
    while shift < T:
        earlier_keep = F.pad(keep[:, :-shift], (0, 0, shift, 0), value=1.0)
        earlier_add = F.pad(add[:, :-shift], (0, 0, shift, 0))
        keep, add = keep * earlier_keep, add + keep * earlier_add
        shift *= 2
    cells = add + keep * start[:, None]
    return cells, cells[:, -1]


def recurrence_weights(keep: Tensor, add: Tensor, mask: Tensor) -> Tensor:
    """w[t, s] = σ(add_s) σ(keep_{s+1}) ... σ(keep_t) for s <= t, of each dimension: (B, N, T, T). Pads have none.

    Sums of logarithms, in float32 or wider: products would underflow.
    """
    B, T, N = keep.shape
    if torch.onnx.is_in_onnx_export():
        return node("RecurrenceWeights", (keep, add, mask), {}, keep, (B, N, T, T))
    wide = torch.promote_types(keep.dtype, torch.float32)
    real = mask[:, None].bool()  # (B, 1, T)
    log_keep = torch.where(real, F.logsigmoid(keep.to(wide)).transpose(1, 2), 0.0)
    log_add = torch.where(real, F.logsigmoid(add.to(wide)).transpose(1, 2), HIDDEN_SCORE)
    past = torch.ones(T, T, dtype=torch.bool, device=keep.device).tril()
    # Only what comes after s is added up: the difference of two sums from the start would lose a gate in long ones.
    kept = torch.where(past.tril(-1), log_keep[..., :, None], 0.0).cumsum(2)  # (B, N, T, T)
    logs = kept + log_add[..., None, :]
    return torch.where(past, logs, HIDDEN_SCORE).exp().to(keep.dtype)
