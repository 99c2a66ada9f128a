"""Your clone of nanoGPT or minGPT, untouched, with a cache.

    NANOGPT=path/to/nanoGPT tfmx export examples/own/nanogpt.py:build -o gpt
    MINGPT=path/to/minGPT tfmx export examples/own/nanogpt.py:build_mingpt -o gpt
    tfmx run gpt --ids 1,2,3

Their GPT computes the whole text anew for each token. `CachedGpt` holds one and calls the parts of its blocks, so that keys and values
come in as `state` and go out again; the modules and their weights stay theirs. (Hugging Face's GPT2LMHeadModel has parts of the same names.)
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfmx.tfm_model.declarations import Answer, Elements, token_logits, tokens
from tfmx.tfm_model.state import StateSpec, StateTensor


class CachedGpt(nn.Module):
    def __init__(self, gpt: nn.Module, heads: int) -> None:
        super().__init__()
        self.gpt, self.heads = gpt, heads
        self.vocab_size, width = gpt.transformer.wte.weight.shape
        self.max_context, self.head_dim = gpt.transformer.wpe.weight.shape[0], width // heads

    def inputs(self) -> Elements:
        return tokens(vocab_size=self.vocab_size, length=self.max_context)

    def outputs(self) -> Answer:
        return token_logits(self.vocab_size)

    def state_spec(self) -> StateSpec:
        shape = ("batch_size", self.heads, "past_sequence_length", self.head_dim)
        return tuple(
            StateTensor(past=f"past_key_values.{i}.{part}", present=f"present.{i}.{part}", shape=shape)
            for i in range(len(self.gpt.transformer.h))
            for part in ("key", "value")
        )

    def forward(
        self, idx: Tensor, attention_mask: Tensor, position_ids: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        parts, presents = self.gpt.transformer, []
        x = parts.wte(idx) + parts.wpe(position_ids)  # (B, T, C)
        seen = seen_columns(attention_mask, idx.shape[1])[:, None]
        for block, key, value in zip(parts.h, state[::2], state[1::2], strict=True):
            qkv = block.attn.c_attn(block.ln_1(x)).unflatten(-1, (3, self.heads, self.head_dim))
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, D)
            k, v = torch.cat((key, k), dim=2), torch.cat((value, v), dim=2)  # (B, H, P+T, D)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + block.attn.c_proj(y.transpose(1, 2).flatten(2))
            x = x + run_mlp(block.mlp, block.ln_2(x))
            presents += [k, v]
        return self.gpt.lm_head(parts.ln_f(x)), presents


def run_mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    if isinstance(mlp, nn.ModuleDict):  # minGPT's is a dictionary of parts
        return mlp.c_proj(mlp.act(mlp.c_fc(x)))
    return mlp(x)


def seen_columns(attention_mask: Tensor, new: int) -> Tensor:
    """(B, T, P+T): what is real and came before. A pad sees itself: a row of nothing would give NaN."""
    columns = torch.arange(attention_mask.shape[1])
    rows = torch.arange(new)[:, None] + (attention_mask.shape[1] - new)
    return (columns == rows) | ((columns < rows) & (attention_mask[:, None] == 1))


def build() -> CachedGpt:
    sys.path.insert(0, os.environ["NANOGPT"])
    from model import GPT, GPTConfig

    torch.manual_seed(1234)  # yours would load a checkpoint here
    config = GPTConfig(block_size=64, vocab_size=96, n_layer=2, n_head=4, n_embd=48)
    return CachedGpt(GPT(config), config.n_head)


def build_mingpt() -> CachedGpt:
    sys.path.insert(0, os.environ["MINGPT"])
    from mingpt.model import GPT

    torch.manual_seed(1234)
    config = GPT.get_default_config()
    config.model_type, config.vocab_size, config.block_size = "gpt-nano", 96, 64
    return CachedGpt(GPT(config), config.n_head)
