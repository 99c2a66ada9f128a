"""Two models of x-transformers (`pip install x-transformers`): a classifier, and a language model with its own cache.

    tfmx export examples/own/x_transformers_models.py:build_encoder -o encoder
    tfmx export examples/own/x_transformers_models.py:build_decoder -o decoder
    tfmx run decoder --ids 1,2,3

Its modules call the mask `mask`, and it is of bools; the rest of this file is that, and x-transformers' cache as `state`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from x_transformers import Decoder, Encoder, TransformerWrapper
from x_transformers.x_transformers import Intermediates, LayerIntermediates

from tfmx.tfm_model.declarations import Answer, Elements, embedding, token_logits, tokens
from tfmx.tfm_model.state import StateSpec, StateTensor

VOCABULARY, WIDTH, HEADS, HEAD_DIM, LAYERS, LONGEST = 96, 48, 4, 16, 2, 128


class SentenceEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = Encoder(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=HEAD_DIM, attn_flash=True)
        self.model = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LONGEST, attn_layers=layers)

    def inputs(self) -> Elements:
        return tokens(vocab_size=VOCABULARY, length=LONGEST)

    def outputs(self) -> Answer:
        return embedding(WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        vectors = self.model(
            input_ids, attn_mask=(attention_mask == 1)[:, None, None], return_embeddings=True
        )
        return vectors[:, 0]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = Decoder(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=HEAD_DIM, attn_flash=True)
        self.model = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LONGEST, attn_layers=layers)

    def inputs(self) -> Elements:
        return tokens(vocab_size=VOCABULARY, length=LONGEST)

    def outputs(self) -> Answer:
        return token_logits(VOCABULARY)

    def state_spec(self) -> StateSpec:
        shape = ("batch_size", HEADS, "past_sequence_length", HEAD_DIM)
        return tuple(
            StateTensor(past=f"past.{i}.{part}", present=f"present.{i}.{part}", shape=shape)
            for i in range(LAYERS)
            for part in ("key", "value")
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        layers = [Intermediates(cached_kv=pair) for pair in zip(state[::2], state[1::2], strict=True)]
        logits, found = self.model(
            input_ids,
            mask=attention_mask == 1,
            pos=position_ids,
            cache=LayerIntermediates(attn_intermediates=layers),
            input_not_include_cache=True,
            cache_age=0,  # all of the input is new
            return_intermediates=True,
        )
        kept = [layer.cached_kv for layer in found.attn_intermediates]
        return logits, [part for pair in kept for part in pair]


def build_encoder() -> SentenceEncoder:
    torch.manual_seed(1234)  # yours would load a checkpoint here
    return SentenceEncoder()


def build_decoder() -> LanguageModel:
    torch.manual_seed(1234)
    return LanguageModel()
