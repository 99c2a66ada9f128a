"""What blocks are made of: linear maps, norms, MLPs, and the ways to mix a sequence.

A mixer takes x (B, T, N), what all blocks read (`Reads`) and its own state, and gives y, the new state and,
if it was asked to, its weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import ops
from .attention_config import AttentionConfig, NormConfig, RelativeConfig
from .attention_ops import Kept, Relative, attention, cross_attention
from .config import LstmConfig, MlpConfig
from .recurrent_ops import FeatureState, lstm, random_feature_attention, recurrence, recurrence_weights

Rotary = tuple[Tensor, Tensor] | None


class Reads(NamedTuple):
    """What every block reads beside its own input."""

    attention_mask: Tensor | None  # (B, P+T), 1 = real; None: an image, all is
    position_ids: Tensor | None  # (B, T)
    rotary: Rotary = None
    encoder_attention_mask: Tensor | None = None  # (B, S)


class Mixed(NamedTuple):
    y: Tensor
    state: list[Tensor]
    weights: Tensor | None


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, width: int, config: NormConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, self.weight, self.bias, self.config)


class Mlp(nn.Module):
    def __init__(self, width: int, config: MlpConfig) -> None:
        super().__init__()
        self.config = config
        rows = config.hidden * (2 if config.gated else 1)
        self.up = Linear(width, rows, bias=config.bias)
        self.middle = Linear(config.hidden, rows, bias=config.bias) if config.hidden_layers == 2 else None
        self.down = Linear(config.hidden, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        act = ops.gated_activation if self.config.gated else ops.activation
        x = act(self.up(x), self.config.activation)
        if self.middle is not None:
            x = act(self.middle(x), self.config.activation)
        y: Tensor = self.down(x)
        return y


class RelativePositions(nn.Module):
    """Shaw's vectors, T5's buckets of biases, or ALiBi's slopes."""

    bucket: Tensor
    slopes: Tensor

    def __init__(
        self, config: RelativeConfig, heads: int, head_dim: int, value_dim: int, *, causal: bool
    ) -> None:
        super().__init__()
        self.config = config
        rows = 2 * config.max_distance + 1
        if config.kind == "shaw":
            self.keys = nn.Parameter(torch.randn(rows, head_dim) * head_dim**-0.5)
            self.values = nn.Parameter(torch.randn(rows, value_dim) * value_dim**-0.5)
        elif config.kind == "t5":
            self.bias = nn.Parameter(torch.randn(heads, config.buckets) * 0.02)
            self.register_buffer("bucket", t5_buckets(config, causal=causal), persistent=False)
        else:
            self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def forward(self) -> Relative:
        if self.config.kind == "shaw":
            return Relative(keys=self.keys, values=self.values)
        if self.config.kind == "t5":
            return Relative(bias=torch.index_select(self.bias, 1, self.bucket))
        return Relative(slopes=self.slopes)


def t5_buckets(config: RelativeConfig, *, causal: bool) -> Tensor:
    """The bucket of each distance -M ... M: one each for the shortest, then by logarithm (Raffel et al. 2020)."""
    most, rows = config.max_distance, []
    n = config.buckets if causal else config.buckets // 2  # both directions share them
    for distance in range(-most, most + 1):  # the key's position less the query's
        back = max(-distance, 0) if causal else abs(distance)
        exact = n // 2
        far = exact + int(math.log(max(back, 1) / exact) / math.log(most / exact) * (n - exact))
        rows.append((back if back < exact else min(far, n - 1)) + (n if distance > 0 and not causal else 0))
    return torch.tensor(rows)


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8/n), 2^(-16/n), ...; if n is no power of 2, the rest is taken from twice the power below it (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes)


class Attention(nn.Module):
    directions: Tensor

    def __init__(
        self,
        width: int,
        config: AttentionConfig,
        layer: int,
        window: int | None,
        *,
        causal: bool,
        shows: bool,
    ) -> None:
        super().__init__()
        self.config, self.window, self.causal, self.shows = config, window, causal, shows
        self.kept: Kept | None = None
        self.value_dim = value_dim = config.value_dim(width)
        projections = {"asymmetric": config.q_size + config.kv_size, "symmetric": config.q_size, "raw": 0}
        rows = projections[config.similarity] + config.n_kv_heads * value_dim
        self.qkv = Linear(width, rows, bias=config.qkv_bias)
        self.out = (
            None
            if config.full_rank_values
            else Linear(config.n_heads * value_dim, width, bias=config.out_bias)
        )
        self.q_norm = Norm(config.head_dim, config.qk_norm) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.qk_norm) if config.qk_norm else None
        self.relative = None
        if config.relative is not None:
            self.relative = RelativePositions(
                config.relative, config.n_heads, config.head_dim, value_dim, causal=causal
            )
        features = config.random_features
        if features is not None:  # drawn in float64, whatever the default dtype is
            draw = torch.Generator().manual_seed(features.seed + layer)
            drawn = torch.randn(features.features, config.head_dim, generator=draw, dtype=torch.float64)
            self.register_buffer("directions", (drawn * features.sigma).to(torch.get_default_dtype()))

    def forward(self, x: Tensor, reads: Reads, state: list[Tensor]) -> Mixed:
        q_norm = self.q_norm.weight if self.q_norm is not None else None
        k_norm = self.k_norm.weight if self.k_norm is not None else None
        if self.config.random_features is not None:
            mask = None if reads.attention_mask is None else ops.new_mask(reads.attention_mask, x)
            past = FeatureState(state[0], state[1], state[2] if len(state) > 2 else None) if state else None
            y, present = random_feature_attention(
                self.project(x), self.directions, mask, reads.position_ids, reads.rotary, q_norm, k_norm, past,
                self.config, value_dim=self.value_dim, causal=self.causal,
            )  # fmt: skip
            return Mixed(self.combine(y), [part for part in present if part is not None], None)
        attended = attention(
            self.project(x), (state[0], state[1]) if state else None, reads.attention_mask, reads.position_ids,
            reads.rotary, q_norm, k_norm, self.config, relative=self.relative() if self.relative else None,
            value_dim=self.value_dim, causal=self.causal, window=self.window, with_weights=self.shows,
            kept=self.kept,
        )  # fmt: skip
        return Mixed(self.combine(attended.y), [attended.key, attended.value], attended.weights)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values, side by side."""
        projected: Tensor = self.qkv(x)
        if self.config.similarity == "asymmetric":
            return projected
        if self.config.similarity == "raw":
            return torch.cat((x, x, projected), dim=-1)
        shared, values = torch.split(
            projected, [self.config.q_size, projected.shape[-1] - self.config.q_size], dim=-1
        )
        return torch.cat((shared, shared, values), dim=-1)

    def combine(self, y: Tensor) -> Tensor:
        """The heads' results (B, T, H Dv) become one vector each."""
        if self.config.combination == "concat":
            assert self.out is not None
            combined: Tensor = self.out(y)
            return combined
        heads = torch.split(y, [self.value_dim] * self.config.n_heads, dim=-1)
        if self.out is not None:  # Σ_h W_h^T y_h: each head has its columns of W_O
            ends = range(self.value_dim, y.shape[-1] + 1, self.value_dim)
            columns = (self.out.weight[:, end - self.value_dim : end] for end in ends)
            heads = tuple(F.linear(head, part) for head, part in zip(heads, columns, strict=True))
        total = heads[0]
        for head in heads[1:]:
            total = total + head
        return total if self.out is None or self.out.bias is None else total + self.out.bias


class CrossAttention(nn.Module):
    """Attention to an encoder's output; its keys and values are computed once, by `remember`."""

    def __init__(self, width: int, encoder_width: int, config: AttentionConfig, *, shows: bool) -> None:
        super().__init__()
        self.config, self.shows = config, shows
        self.query = Linear(width, config.q_size, bias=config.qkv_bias)
        self.key = Linear(encoder_width, config.kv_size, bias=config.qkv_bias)
        self.value = Linear(encoder_width, config.kv_size, bias=config.qkv_bias)
        self.out = Linear(config.q_size, width, bias=config.out_bias)

    def remember(self, encoded: Tensor) -> list[Tensor]:
        """Keys and values of the encoder's output (B, S, N), each (B, H_kv, S, D)."""
        shape = (self.config.n_kv_heads, self.config.head_dim)
        return [ops.by_head(part(encoded), *shape) for part in (self.key, self.value)]

    def forward(self, x: Tensor, reads: Reads, state: list[Tensor]) -> Mixed:
        y, weights = cross_attention(
            self.query(x),
            state[0],
            state[1],
            reads.encoder_attention_mask,
            self.config,
            with_weights=self.shows,
        )
        return Mixed(self.out(y), [], weights)


class Lstm(nn.Module):
    """h and c from step to step; gates see the input and h."""

    def __init__(self, width: int, config: LstmConfig) -> None:
        super().__init__()
        self.config = config
        self.input_weight = nn.Parameter(torch.empty(4 * width, width).uniform_(-1, 1) * width**-0.5)
        self.hidden_weight = nn.Parameter(torch.empty(4 * width, width).uniform_(-1, 1) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(4 * width)) if config.bias else None

    def forward(self, x: Tensor, reads: Reads, state: list[Tensor]) -> Mixed:
        assert reads.attention_mask is not None
        y, hidden, cell = lstm(
            x, ops.new_mask(reads.attention_mask, x), state[0], state[1], self.input_weight, self.hidden_weight,
            self.bias, self.config.candidate, self.config.output,
        )  # fmt: skip
        return Mixed(y, [hidden, cell], None)


class AblatedLstm(nn.Module):
    """c from step to step, gates see the input only: a weighted sum of all contents so far."""

    def __init__(self, width: int, config: LstmConfig, *, shows: bool) -> None:
        super().__init__()
        self.config, self.shows = config, shows
        self.gates = Linear(width, 3 * width, bias=config.bias)  # candidate, i, f

    def forward(self, x: Tensor, reads: Reads, state: list[Tensor]) -> Mixed:
        assert reads.attention_mask is not None
        candidate, i, f = torch.split(self.gates(x), [x.shape[-1]] * 3, dim=-1)
        mask = ops.new_mask(reads.attention_mask, x)
        real = mask[..., None].bool()
        content = ops.activation(candidate, self.config.candidate)
        keep = torch.where(real, f.sigmoid(), 1.0)
        add = torch.where(real, i.sigmoid() * content, 0.0)
        cells, cell = recurrence(keep, add, state[0])
        weights = recurrence_weights(f, i, mask) if self.shows else None
        return Mixed(ops.activation(cells, self.config.output), [cell], weights)
