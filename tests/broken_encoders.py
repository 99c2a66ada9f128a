"""An encoder of one's own and an encoder-decoder that are right, and the same with mistakes that people make in them."""

from __future__ import annotations

ENCODER = """
import torch
from torch import nn
from tfmx.tfm_model.declarations import classes, tokens

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(23, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def inputs(self):
        return tokens(vocab_size=23, length=64)

    def outputs(self):
        return classes(3)

    def forward(self, input_ids, attention_mask):
        x, real = self.table(input_ids), attention_mask[:, :, None].to(self.head.weight.dtype)
        mean = (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        x = torch.tanh(self.mix(x + mean))
        return self.head((x * real).sum(1) / real.sum(1))

def build():
    torch.manual_seed(5)
    return Model()
"""

BROKEN_ENCODERS = {
    "pads count in the pooled mean": (("self.head((x * real).sum(1) / real.sum(1))", "self.head(x.mean(1))"), "ragged batch"),
    "pads are mixed in": (
        ("mean = (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)", "mean = x.mean(1, keepdim=True)"),
        "ragged batch",
    ),
    "the length is the whole batch's": (("/ real.sum(1))", "/ real.sum(1).amax(0))"), "ragged batch"),
    "the batch is normalised": (
        ("x = torch.tanh(", "x = nn.functional.layer_norm(x.transpose(0, 2), x.shape[:1]).transpose(0, 2); x = torch.tanh("),
        "a batch without pads",
    ),
    "random numbers": (("return self.head(", "x = x + 0.01 * torch.rand(16)\n        return self.head("), "draws random numbers"),
}  # fmt: skip
