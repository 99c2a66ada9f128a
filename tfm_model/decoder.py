"""The decoder-only transformer, one definition for every published relative of Llama.

It keeps no state: keys and values are arguments and results, described by `state_spec`. It also is an
example of the protocol (`protocol.py`) that anybody's module can follow to be exported.

    token_ids ─ embedding ─ block ─ block ─ ... ─ head ─ logits
                              │  ╲
                     past key/value, present key/value
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import ops
from .config import AttentionConfig, MlpConfig, ModelConfig, NormConfig
from .rotary import dynamic_rotary, rotary_tables
from .state import StateSpec, key_value_spec

Rotary = tuple[Tensor, Tensor] | None


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


class Attention(nn.Module):
    def __init__(self, width: int, config: AttentionConfig, window: int | None) -> None:
        super().__init__()
        self.config, self.window = config, window
        self.qkv = Linear(width, config.q_size + 2 * config.kv_size, bias=config.qkv_bias)
        self.out = Linear(config.q_size, width, bias=config.out_bias)
        self.q_norm = Norm(config.head_dim, config.qk_norm) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.qk_norm) if config.qk_norm else None

    def forward(
        self, x: Tensor, mask: Tensor, position_ids: Tensor, rotary: Rotary, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_norm = self.q_norm.weight if self.q_norm is not None else None
        k_norm = self.k_norm.weight if self.k_norm is not None else None
        y, key, value = ops.attention(
            self.qkv(x), key, value, mask, position_ids, rotary, q_norm, k_norm, self.config, self.window
        )
        return self.out(y), key, value


class Mlp(nn.Module):
    def __init__(self, width: int, config: MlpConfig) -> None:
        super().__init__()
        self.config = config
        self.up = Linear(width, config.hidden * (2 if config.gated else 1), bias=config.bias)
        self.down = Linear(config.hidden, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        act = ops.gated_activation if self.config.gated else ops.activation
        y: Tensor = self.down(act(self.up(x), self.config.activation))
        return y


class Block(nn.Module):
    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.attention_norm = Norm(config.width, config.norm)
        self.attention = Attention(config.width, config.attention, window)
        self.mlp_norm = Norm(config.width, config.norm)
        self.mlp = Mlp(config.width, config.mlp)

    def forward(
        self, x: Tensor, mask: Tensor, position_ids: Tensor, rotary: Rotary, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, key, value = self.attention(self.attention_norm(x), mask, position_ids, rotary, key, value)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), key, value


class Decoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, config.window(layer)) for layer in range(config.n_layers))
        self.norm = Norm(config.width, config.norm)
        self.head = Linear(config.width, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.head.weight = self.embed.weight
        if self.has_rotary_tables:
            self.set_rotary_tables(torch.get_default_dtype())

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_context(self) -> int:
        return self.config.context

    @property
    def has_rotary_tables(self) -> bool:
        rotary = self.config.attention.rotary
        return rotary is not None and (rotary.scaling is None or rotary.scaling.kind != "dynamic")

    def set_rotary_tables(self, dtype: torch.dtype) -> None:
        """Round the tables to the dtype once, from float64; `.to(dtype)` would round what is rounded already."""
        assert self.config.attention.rotary is not None
        cos, sin = rotary_tables(self.config.attention.rotary, self.config.context)
        self.register_buffer("cos", cos.to(dtype), persistent=False)
        self.register_buffer("sin", sin.to(dtype), persistent=False)

    def state_spec(self) -> StateSpec:
        attention = self.config.attention
        return key_value_spec(self.config.n_layers, attention.n_kv_heads, attention.head_dim)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.embedding(input_ids)
        rotary = self.rotary(position_ids)
        present: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            key, value = state[2 * layer : 2 * layer + 2]
            x, key, value = block(x, attention_mask, position_ids, rotary, key, value)
            present += (key, value)
        return self.logits(x), present

    def embedding(self, input_ids: Tensor) -> Tensor:
        x = ops.embedding(input_ids, self.embed.weight)
        return x if self.config.embedding_scale is None else x * self.config.embedding_scale

    def rotary(self, position_ids: Tensor) -> Rotary:
        config = self.config.attention.rotary
        if config is None:
            return None
        if self.has_rotary_tables:
            return self.cos, self.sin
        return dynamic_rotary(config, position_ids, self.embed.weight.dtype)

    def logits(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
