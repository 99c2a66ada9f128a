"""What a module has to offer to be exported: nothing registered, nothing inherited.

    class MyModel(nn.Module):
        vocab_size = 32000
        max_context = 1024

        def state_spec(self) -> StateSpec: ...
        def forward(self, input_ids, attention_mask, position_ids, state): ...

`examples/own_model.py` is one, and `tfmx export examples/own_model.py:build -o bundle` exports it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .state import StateSpec


class ExportableModule(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    def state_spec(self) -> StateSpec:
        """The tensors that `forward` takes as `state` and returns, in order."""

    def forward(
        self,
        input_ids: Tensor,  # int64 (B, T)
        attention_mask: Tensor,  # int64 (B, P+T), 1 = real; past columns first
        position_ids: Tensor,  # int64 (B, T): how many real tokens stand before each in its row
        state: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits (B, T, vocab_size) and the new state. Pads must not change what real tokens get."""

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]: ...

    def to(self, dtype: torch.dtype) -> ExportableModule: ...

    def eval(self) -> ExportableModule: ...
