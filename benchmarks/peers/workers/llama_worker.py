"""llama.cpp by its C functions: `llama_decode` on token ids, the largest logit by numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llama_binding import Context
from measure import Stepwise, main


class Llama(Stepwise):
    cache: str | None = None

    def __init__(self, model: str, threads: int, capacity: int) -> None:
        self.context = Context(model, threads, capacity, self.cache)

    def start(self, prompt: Sequence[int]) -> int:
        self.context.forget()
        self.context.decode(list(prompt))
        return self._greedy()

    def step(self, token: int) -> int:
        self.context.decode([token])
        return self._greedy()

    def _greedy(self) -> int:
        logits = self.context.binding.llama_get_logits_ith(self.context.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.context.vocab_size,)).argmax())


if __name__ == "__main__":
    main(Llama)
