"""CTranslate2: its Generator calls back for each token, which is when the clock is read."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
from measure import differences, main


class CTranslate2:
    def __init__(self, model: str, threads: int, capacity: int) -> None:  # noqa: ARG002 - the cache grows
        self.generator = ctranslate2.Generator(
            model, device="cpu", inter_threads=1, intra_threads=threads, compute_type="default"
        )
        self.vocabulary = json.loads((Path(model) / "vocabulary.json").read_text(encoding="utf-8"))

    def run(self, prompt: Sequence[int], steps: int) -> list[float]:
        times = [time.perf_counter()]

        def noted(_: Any) -> bool:
            times.append(time.perf_counter())
            return False

        self.generator.generate_batch(
            [[self.vocabulary[token] for token in prompt]],
            max_length=steps + 1,
            min_length=steps + 1,  # the end token must not end a run
            sampling_topk=1,
            include_prompt_in_result=False,  # or the prompt would be run token by token
            callback=noted,
        )
        found = len(times) - 1
        if found != steps + 1:
            raise RuntimeError(f"CTranslate2 gave {found} tokens, wanted {steps + 1}")
        return differences(times)


if __name__ == "__main__":
    main(CTranslate2)
