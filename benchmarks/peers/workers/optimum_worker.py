"""optimum-onnx: its exported decoder under its own ORTModelForCausalLM, float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnxruntime
import torch
from measure import Stepwise, main
from optimum.onnxruntime import ORTModelForCausalLM


class Optimum(Stepwise):
    def __init__(self, model: str, threads: int, capacity: int) -> None:  # noqa: ARG002 - the cache grows
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.model = ORTModelForCausalLM.from_pretrained(model, session_options=options, use_cache=True)
        self.cache: Any = None
        self.length = 0

    def start(self, prompt: Sequence[int]) -> int:
        self.cache, self.length = None, 0
        return self._forward(prompt)

    def step(self, token: int) -> int:
        return self._forward([token])

    def _forward(self, tokens: Sequence[int]) -> int:
        past, self.length = self.length, self.length + len(tokens)
        out = self.model(
            input_ids=torch.tensor([tokens]),
            attention_mask=torch.ones(1, self.length, dtype=torch.int64),
            position_ids=torch.arange(past, self.length).unsqueeze(0),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache = out.past_key_values
        return int(out.logits[0, -1].argmax())


if __name__ == "__main__":
    main(Optimum)
