"""llama.cpp with a cache of 8 bits."""

from __future__ import annotations

from llama_worker import Llama
from measure import main


class LlamaQ8Cache(Llama):
    cache = "Q8_0"


if __name__ == "__main__":
    main(LlamaQ8Cache)
