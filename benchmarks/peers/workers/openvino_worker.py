"""OpenVINO GenAI: its LLMPipeline is given token ids; the clock is read by the streamer, once a token."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai
from measure import differences, main


class Clock(openvino_genai.StreamerBase):
    """Notes when each token arrives; text is never made."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, tokens: int | list[int]) -> openvino_genai.StreamingStatus:
        count = 1 if isinstance(tokens, int) else len(tokens)
        self.times += [time.perf_counter()] * count
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class OpenVino:
    def __init__(self, model: str, threads: int, capacity: int) -> None:  # noqa: ARG002 - the cache grows
        settings = {"INFERENCE_NUM_THREADS": threads}
        if model.endswith(
            "fp32"
        ):  # or it computes in bfloat16 where the processor can: other bits than all else here
            settings["INFERENCE_PRECISION_HINT"] = "f32"
        self.pipeline = openvino_genai.LLMPipeline(model, "CPU", **settings)

    def run(self, prompt: Sequence[int], steps: int) -> list[float]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = steps + 1
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([prompt], np.int64))
        clock = Clock()
        begin = time.perf_counter()
        self.pipeline.generate(ids, config, clock)
        found = len(clock.times)
        if found != steps + 1:
            raise RuntimeError(f"OpenVINO gave {found} tokens, wanted {steps + 1}")
        return differences([begin, *clock.times])


if __name__ == "__main__":
    main(OpenVino)
