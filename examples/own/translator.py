"""PyTorch's own `nn.Transformer` as an encoder-decoder that answers token by token.

    tfmx export examples/own/translator.py:build -o translator
    tfmx run translator --ids 5,6,7

Its encoder runs once. Its decoder layers are PyTorch's, called part by part: what a layer has seen so far comes in as `state`
(`append`: it grows with the answer), and so does what encode has left (`fixed`: it stays).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfmx.tfm_model.declarations import Answer, Elements, token_logits, tokens
from tfmx.tfm_model.state import StateSpec, StateTensor

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 96, 48, 4, 2, 64


class Translator(nn.Module):
    max_context = LONGEST  # of an answer
    decoder_start_token_id = 1
    eos_token_ids = (2,)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def inputs(self) -> Elements:
        return tokens(vocab_size=VOCABULARY, length=LONGEST)

    def outputs(self) -> Answer:
        return token_logits(VOCABULARY)

    def state_spec(self) -> StateSpec:
        seen = ("batch_size", "past_sequence_length", WIDTH)
        source = ("batch_size", "encoder_sequence_length", WIDTH)
        return (
            *(StateTensor(past=f"past.{i}", present=f"present.{i}", shape=seen) for i in range(LAYERS)),
            StateTensor(past="past.source", present="present.source", shape=source, growth="fixed"),
        )

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        memory = self.transformer.encoder(x, src_key_padding_mask=attention_mask == 0)
        return memory, [memory]

    def forward(
        self,
        target_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        state: list[Tensor],
        encoder_attention_mask: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        *pasts, memory = state
        x = self.tokens(target_ids) + self.positions(position_ids)  # (B, T, W)
        hidden = hidden_columns(attention_mask, target_ids.shape[1]).repeat_interleave(HEADS, dim=0)
        presents = []
        for layer, past in zip(self.transformer.decoder.layers, pasts, strict=True):
            seen = torch.cat((past, x), dim=1)  # (B, P+T, W)
            x = layer.norm1(x + layer.self_attn(x, seen, seen, attn_mask=hidden, need_weights=False)[0])
            found, _ = layer.multihead_attn(
                x, memory, memory, key_padding_mask=encoder_attention_mask == 0, need_weights=False
            )
            x = layer.norm2(x + found)
            x = layer.norm3(x + layer.linear2(layer.activation(layer.linear1(x))))
            presents.append(seen)
        return self.head(self.transformer.decoder.norm(x)), presents


def hidden_columns(attention_mask: Tensor, new: int) -> Tensor:
    """(B, T, P+T): what comes later, and pads. A pad may see itself: a row of nothing would give NaN."""
    total = attention_mask.shape[1]
    columns = torch.arange(total)
    rows = torch.arange(new)[:, None] + (total - new)
    return (columns > rows) | ((attention_mask[:, None] == 0) & (columns != rows))


def build() -> Translator:
    torch.manual_seed(1234)  # yours would load a checkpoint here
    return Translator()
