"""PyTorch's own `nn.LSTM`, run so that pads leave its state alone and so that it exports: for modules of your own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checks import ConfigError
from .ops import new_mask
from .recurrent_ops import lstm as lstm_op


def run_lstm(
    lstm: nn.LSTM,
    x: Tensor,  # (B, T, in), whatever `batch_first` says
    attention_mask: Tensor,  # (B, T) or (B, P+T), 1 = real; pads may stand anywhere
    state: tuple[Tensor, Tensor] | None = None,  # h and c, (B, layers, N); zeros to begin with
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What `lstm` gives: y (B, T, N), and h and c after each row's last real element (batch first, unlike PyTorch's).

    A bidirectional one has two layers each, forward and backward, and gives (B, T, 2N).
    """
    if lstm.proj_size:
        raise ConfigError(f"the LSTM has proj_size={lstm.proj_size}, which cannot be run; leave it 0")
    mask, directions = new_mask(attention_mask, x), 2 if lstm.bidirectional else 1
    if state is None:
        zeros = x[:, :1, :1] * 0.0  # (B, 1, 1)
        zeros = zeros.expand(-1, lstm.num_layers * directions, lstm.hidden_size)
        state = zeros, zeros
    ends = []
    for layer in range(lstm.num_layers):
        rows = []
        for direction in range(directions):
            name = f"l{layer}_reverse" if direction else f"l{layer}"
            index = layer * directions + direction
            parts = (x.flip(1), mask.flip(1)) if direction else (x, mask)
            y, *end = lstm_op(
                *parts, state[0][:, index], state[1][:, index], _by_gate(lstm, f"weight_ih_{name}"),
                _by_gate(lstm, f"weight_hh_{name}"), _bias(lstm, name), "tanh", "tanh",
            )  # fmt: skip
            rows.append(y.flip(1) if direction else y)
            ends.append(end)
        x = torch.cat(rows, dim=-1)
        if layer + 1 < lstm.num_layers:
            x = F.dropout(x, lstm.dropout, lstm.training)
    hidden, cell = (torch.stack(parts, dim=1) for parts in zip(*ends, strict=True))
    return x, (hidden, cell)


def _by_gate(lstm: nn.LSTM, name: str) -> Tensor:
    """PyTorch's order is i, f, candidate, o; the op's, as ONNX's, i, o, f, candidate."""
    i, f, candidate, o = getattr(lstm, name).chunk(4)
    return torch.cat((i, o, f, candidate))


def _bias(lstm: nn.LSTM, name: str) -> Tensor | None:
    return _by_gate(lstm, f"bias_ih_{name}") + _by_gate(lstm, f"bias_hh_{name}") if lstm.bias else None
