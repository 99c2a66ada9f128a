"""A model of your own, exported without registering it anywhere:

    tfmx export examples/own/gpt.py:build -o own-model
    tfmx run own-model --ids 1,2,3

The module is plain PyTorch: a small GPT with learned positions and PyTorch's own layers. What makes it
exportable is that it keeps no cache of its own: keys and values come in as `state` and go out again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfmx.tfm_model.state import StateSpec, StateTensor

WIDTH, HEADS, LAYERS = 64, 4, 2
HEAD_DIM = WIDTH // HEADS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, seen: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, HEAD_DIM))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, D)
        key, value = torch.cat((key, k), dim=2), torch.cat((value, v), dim=2)  # (B, H, P+T, D)
        y = F.scaled_dot_product_attention(q, key, value, attn_mask=seen[:, None])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x)), key, value


class OwnModel(nn.Module):
    vocab_size = 256
    max_context = 128

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocab_size, WIDTH)
        self.positions = nn.Embedding(self.max_context, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def state_spec(self) -> StateSpec:
        shape = ("batch_size", HEADS, "past_sequence_length", HEAD_DIM)
        return tuple(
            StateTensor(past=f"past_key_values.{i}.{part}", present=f"present.{i}.{part}", shape=shape)
            for i in range(LAYERS)
            for part in ("key", "value")
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        total, new = attention_mask.shape[1], input_ids.shape[1]
        columns = torch.arange(total, device=input_ids.device)
        seen = (columns[None, :] <= columns[total - new :, None]) & (
            attention_mask[:, None, :] == 1
        )  # (B, T, P+T)
        x = self.tokens(input_ids) + self.positions(position_ids)
        present: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x, key, value = block(x, seen, state[2 * i], state[2 * i + 1])
            present += [key, value]
        return F.linear(self.norm(x), self.tokens.weight), present  # the head is the embedding


def build() -> OwnModel:
    torch.manual_seed(1234)  # yours would load a checkpoint here
    return OwnModel()
