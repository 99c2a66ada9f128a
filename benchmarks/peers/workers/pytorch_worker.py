"""PyTorch: transformers' own model in float32, with its DynamicCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from measure import Stepwise, main
from transformers import AutoModelForCausalLM


class PyTorch(Stepwise):
    def __init__(self, model: str, threads: int, capacity: int) -> None:  # noqa: ARG002 - the cache grows
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.cache: Any = None

    def start(self, prompt: Sequence[int]) -> int:
        self.cache = None
        return self._forward(prompt)

    def step(self, token: int) -> int:
        return self._forward([token])

    def _forward(self, tokens: Sequence[int]) -> int:
        out = self.model(torch.tensor([tokens]), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return int(out.logits[0, -1].argmax())


if __name__ == "__main__":
    main(PyTorch)
