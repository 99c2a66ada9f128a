"""onnxruntime-genai: one Generator, rewound to its beginning before each run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime_genai as og
from measure import Stepwise, main


class GenAi(Stepwise):
    def __init__(self, model: str, threads: int, capacity: int) -> None:
        config = og.Config(model)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = og.Model(config)
        self.params = og.GeneratorParams(self.model)
        # min_length: the end token must not end a run
        self.params.set_search_options(do_sample=False, max_length=capacity, min_length=capacity)
        self.generator: Any = None

    def start(self, prompt: Sequence[int]) -> int:
        if self.generator is None:
            self.generator = og.Generator(self.model, self.params)
        else:
            self.generator.rewind_to(0)
        self.generator.append_tokens(np.array([prompt], np.int32))
        return self._next()

    def step(self, token: int) -> int:  # noqa: ARG002 - the generator remembers it
        return self._next()

    def _next(self) -> int:
        self.generator.generate_next_token()
        return int(self.generator.get_next_tokens()[0])


if __name__ == "__main__":
    main(GenAi)
