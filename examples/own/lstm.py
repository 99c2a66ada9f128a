"""A language model around PyTorch's own `nn.LSTM`: a decoder whose state never grows.

    tfmx export examples/own/lstm.py:build -o lstm
    tfmx run lstm --ids 1,2,3

`nn.LSTM` itself would also read pads. `run_lstm` runs its weights, as they are, so that pads leave the state alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfmx.tfm_model.declarations import Answer, Elements, token_logits, tokens
from tfmx.tfm_model.state import StateSpec, StateTensor
from tfmx.tfm_model.torch_lstm import run_lstm

VOCABULARY, WIDTH, LAYERS = 96, 48, 2


class LstmModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def inputs(self) -> Elements:
        return tokens(vocab_size=VOCABULARY, length=512)

    def outputs(self) -> Answer:
        return token_logits(VOCABULARY)

    def state_spec(self) -> StateSpec:
        shape = ("batch_size", LAYERS, WIDTH)
        return tuple(
            StateTensor(past=f"past_{name}", present=f"present_{name}", shape=shape, growth="constant")
            for name in ("hidden", "cell")
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        y, (hidden, cell) = run_lstm(self.lstm, self.embed(input_ids), attention_mask, (state[0], state[1]))
        return self.head(y), [hidden, cell]


def build() -> LstmModel:
    torch.manual_seed(1234)  # yours would load a checkpoint here
    return LstmModel()
