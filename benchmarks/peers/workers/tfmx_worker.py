"""tfmx: the engine below `generate`, on token ids."""

from __future__ import annotations

from collections.abc import Sequence

from measure import Stepwise, main

import tfmx
from tfmx.runtime.engine import Engine, open_engine


class Tfmx(Stepwise):
    def __init__(self, model: str, threads: int, capacity: int) -> None:
        self.graphs = tfmx.load(model, threads=threads)._open_graphs()  # noqa: SLF001 - below the samplers
        self.capacity = capacity
        self.engine: Engine | None = None

    def start(self, prompt: Sequence[int]) -> int:
        if self.engine is None:
            self.engine = open_engine(self.graphs, 1, self.capacity)
        self.engine.trim(0)
        return int(self.engine.prefill([prompt]).greedy()[0][0])

    def step(self, token: int) -> int:
        assert self.engine is not None
        return int(self.engine.decode([token]).greedy()[0][0])


if __name__ == "__main__":
    main(Tfmx)
