"""A module of the protocol that is right, and the same with one mistake in each way that people make them.

None of the mistakes is in the translation: PyTorch and its graphs agree with each other about all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

GPT = """
import torch
from torch import nn
from torch.nn import functional as F
from tfmx.tfm_model.state import StateTensor

WIDTH, HEADS, LAYERS, WINDOW = 16, 2, 2, 40

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x, seen, past_key, past_value):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        key, value = torch.cat((past_key, k), dim=2), torch.cat((past_value, v), dim=2)
        scores = q @ key.transpose(-1, -2) * key.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen[:, None], torch.finfo(x.dtype).min).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return x, key, value

class Model(nn.Module):
    vocab_size = 23
    max_context = 128

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(23, WIDTH), nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 23)

    def state_spec(self):
        return tuple(
            StateTensor(past=f"past.{i}.{part}", present=f"present.{i}.{part}",
                        shape=("batch_size", HEADS, "past_sequence_length", WIDTH // HEADS))
            for i in range(LAYERS) for part in ("key", "value")
        )

    def forward(self, input_ids, attention_mask, position_ids, state):
        total, new = attention_mask.shape[1], input_ids.shape[1]
        order = attention_mask.cumsum(1)
        now = order[:, total - new:, None]
        seen = (order[:, None] <= now) & (order[:, None] > now - WINDOW) & (attention_mask[:, None] == 1)
        x = self.tokens(input_ids) + self.positions(position_ids)
        present = []
        for i, block in enumerate(self.blocks):
            x, key, value = block(x, seen, state[2 * i], state[2 * i + 1])
            present += [key, value]
        return self.head(self.norm(x)), present

def build():
    torch.manual_seed(5)
    return Model()
"""

RNN = """
import torch
from torch import nn
from tfmx.tfm_model.state import StateTensor

class Model(nn.Module):
    vocab_size, max_context = 23, 64

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(23, 16), nn.Linear(16, 23)

    def state_spec(self):
        return (StateTensor(past="past.sums", present="present.sums", shape=("batch_size", 16), growth="constant"),)

    def forward(self, input_ids, attention_mask, position_ids, state):
        real = attention_mask[:, -input_ids.shape[1]:, None].to(state[0].dtype)
        sums = state[0][:, None] + (self.tokens(input_ids) * real).cumsum(1)
        return self.head(torch.tanh(sums)), [sums[:, -1]]

def build():
    torch.manual_seed(5)
    return Model()
"""


@dataclass(frozen=True, slots=True)
class Broken:
    base: str
    change: tuple[str, str]
    way: str  # the way of feeding that must be named first, or what else gives it away

    @property
    def text(self) -> str:
        old, new = self.change
        assert old in self.base, old
        return self.base.replace(old, new)


PRESENT = "present += [key, value]"
EMBED = "self.tokens(input_ids) + self.positions(position_ids)"
LAST = "        return self.head(self.norm(x)), present"
BLOCK = "block(x, seen, state[2 * i], state[2 * i + 1])"
# what steps alone do, without a branch on a shape, which torch would bake in
IN_STEPS = "(torch.arange(total) * 0 + new == 1)[None, None]"

BROKEN = {
    "no state: a step sees its own token only": Broken(
        GPT.replace("for i in range(LAYERS) for part", "for i in range(0) for part"),
        (
            BLOCK + "\n            " + PRESENT,
            "block(x, seen[:, :, total - new:], *torch.zeros(2, len(x), HEADS, 0, WIDTH // HEADS, dtype=x.dtype))",
        ),
        "a prefill, then steps",
    ),
    "the past is not kept": Broken(
        GPT, (PRESENT, "kept = (torch.arange(total) >= total - new)[:, None]; present += [key * kept, value * kept]"), "a prefill, then steps"
    ),
    "keys and values swapped in the state": Broken(GPT, (PRESENT, "present += [value, key]"), "a prefill, then steps"),
    "the layers' states swapped": Broken(GPT, (LAST, LAST + "[2:] + present[:2]"), "a prefill, then steps"),
    "what is new stands before the past": Broken(
        GPT, (PRESENT, "present += [key.roll(new, 2), value]"), "a prefill, then steps"
    ),
    "the state is rounded to half precision": Broken(
        GPT, (PRESENT, "present += [key.half().to(key.dtype), value]"), "a prefill, then steps"
    ),
    "positions from 0 in each call": Broken(
        GPT, (EMBED, EMBED.replace("position_ids", "torch.arange(new)[None]")), "a prefill, then steps"
    ),
    "positions from columns": Broken(
        GPT, (EMBED, EMBED.replace("position_ids", "torch.arange(total - new, total)[None]")), "a ragged batch, padded left"
    ),
    "pads are seen": Broken(GPT, (" & (attention_mask[:, None] == 1)", ""), "a ragged batch, padded left"),
    "pads are nearly unseen": Broken(
        GPT, ("torch.finfo(x.dtype).min", "torch.where(seen.any(), -12.0, -12.0).to(x.dtype)"), "a changed later element"
    ),
    "pads on the right are taken for the past": Broken(
        GPT.replace("order = attention_mask.cumsum(1)", "order = torch.arange(total)[None].expand(len(input_ids), -1)"),
        ("self.positions(position_ids)", "self.positions((attention_mask * 0 + 1).cumsum(1)[:, total - new:] - 1)"),
        "a ragged batch, padded left",
    ),
    "later elements are seen": Broken(GPT, ("(order[:, None] <= now) & ", ""), "a changed later element"),
    "one later element is seen": Broken(GPT, ("<= now)", "<= now + 1)"), "a changed later element"),
    "the mean of the sequence is taken off": Broken(
        GPT, (EMBED, f"{EMBED}; x = x - 0.1 * x.mean(1, keepdim=True)"), "a changed later element"
    ),
    "a window that is one wider in steps": Broken(
        GPT, ("> now - WINDOW)", f"> now - WINDOW - {IN_STEPS}.to(now.dtype))"), "a long prefill in chunks, then steps"
    ),
    "positions end at 64": Broken(
        GPT, (EMBED, f"{EMBED} + self.tokens.weight[3] * 0.01 * (total > 64) * (new == 1)"), "a long prefill in chunks, then steps"
    ),
    "dropout left on": Broken(
        GPT, ("x = x + self.mlp", "x = F.dropout(x, 0.1, training=True) + self.mlp"), "draws random numbers, though the module is in eval mode"
    ),
    "random numbers": Broken(GPT, (EMBED, f"{EMBED} + 0.01 * self.tokens.weight[__import__('random').randrange(9)]"), "a second run of the same"),
    "something is kept between calls": Broken(
        GPT,
        (LAST, "        self.calls = getattr(self, 'calls', 0) + 1\n        x = x + 0.01 * self.calls * self.tokens.weight[3]\n" + LAST),
        "a second run of the same",
    ),
    "batch norm in training mode": Broken(
        GPT,
        (
            EMBED,
            f"F.batch_norm(({EMBED}).mT, *self.head.weight.new_ones(2, WIDTH), training=True).mT",
        ),
        "normalises by the batch's own mean and variance",
    ),
    "the batch's mean is taken off": Broken(
        GPT, (EMBED, f"{EMBED}; x = x - 0.1 * x.mean(0, keepdim=True)"), "a batch without pads"
    ),
    "one row's state for all": Broken(
        GPT, (PRESENT, "present += [key[:1].expand_as(key), value]"), "a batch without pads, then steps"
    ),
    "rows change places in the state": Broken(GPT, (PRESENT, "present += [key, value.flip(0)]"), "a batch without pads, then steps"),
    "a recurrent state takes in pads": Broken(RNN, (" * real", ""), "a ragged batch, padded left"),
    "a recurrent state is the last column's": Broken(
        RNN,
        ("[sums[:, -1]]", "[(state[0] + (self.tokens(input_ids) * real).sum(1)) * real[:, -1]]"),
        "a ragged batch, padded right, then steps",
    ),
    "a recurrent state begins anew": Broken(RNN, ("state[0][:, None] + ", "0 * state[0][:, None] + "), "a prefill, then steps"),
    "a recurrent state decays with the columns": Broken(
        RNN,
        ("(self.tokens(input_ids) * real).cumsum(1)", "(self.tokens(input_ids) * real * 0.9).cumsum(1) * 0.99 ** real.shape[1]"),
        "a prefill, then steps",
    ),
}  # fmt: skip
