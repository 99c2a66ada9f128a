"""A text classifier around PyTorch's own `nn.TransformerEncoder`.

    tfmx export examples/own/transformer_encoder.py:build -o classifier
    tfmx run classifier --ids 1,2,3

Two lines say what it takes and gives. It asks for `attention_mask` by name, so inputs of different lengths run together; each
row's real tokens come first, so positions are counted from 0 and the first output may stand for the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfmx.tfm_model.declarations import Answer, Elements, classes, tokens

WIDTH, LONGEST = 48, 128


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=96, batch_first=True)
        self.tokens = nn.Embedding(96, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(WIDTH, 3)

    def inputs(self) -> Elements:
        return tokens(vocab_size=96, length=LONGEST)

    def outputs(self) -> Answer:
        return classes(3, labels=("bad", "so so", "good"))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        return self.head(x[:, 0])


def build() -> Classifier:
    torch.manual_seed(1234)  # yours would load a checkpoint here
    return Classifier()
