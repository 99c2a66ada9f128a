"""The process that `bench.py` measures: it says what it has done as lines of JSON on stdout, and nothing else.

    python -m tfmx.runtime.bench_worker start|run|machine '{"bundle": ...}'

start: load, and one token; who started it takes the time. run: prefill and decode at each length, again and again.
machine: the limits.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from .. import TfmxError

if TYPE_CHECKING:
    from .model import Model


def main(job: str, given: dict[str, Any]) -> None:
    jobs = {"start": _start, "run": _run, "machine": _machine}
    try:
        jobs[job](given)
    except TfmxError as error:
        _say(error=str(error))


def _start(given: dict[str, Any]) -> None:
    begin = time.perf_counter()
    model = _load(given)
    _say(loaded=time.perf_counter() - begin)
    next(iter(model.stream_batch(_prompts(given, model), max_new_tokens=1)))
    _say(first=True)
    _say_peak()


def _run(given: dict[str, Any]) -> None:
    model = _load(given)
    _rounds(
        model, given | {"length": given["lengths"][0]}
    )  # a run that does not count: everything is touched once
    for _ in range(given["repeats"]):
        for length in given["lengths"]:
            prefill, *steps = _rounds(model, given | {"length": length})
            _say(length=length, prefill=prefill, steps=steps)
    _say_peak()


def _machine(given: dict[str, Any]) -> None:
    from .machine import measure_limits

    found = measure_limits(given["threads"])
    _say(read_bytes_per_second=found.read_bytes_per_second, flops_per_second=found.flops_per_second)


def _load(given: dict[str, Any]) -> Model:
    from .loading import load

    return load(given["bundle"], threads=given["threads"])


def _rounds(model: Model, given: dict[str, Any]) -> list[float]:
    """Seconds to each row's first token, then of each step of the batch: what a user of `stream_batch` sees."""
    from .sampling import SamplingOptions

    prompts = _prompts(given, model)
    options = SamplingOptions(ignore_eos=True, max_new_tokens=given["steps"] + 1)
    found, before = [], time.perf_counter()
    for count, _ in enumerate(model.stream_batch(prompts, options), 1):
        if count % len(prompts) == 0:  # the last row of this round
            now = time.perf_counter()
            found.append(now - before)
            before = now
    return found


def _prompts(given: dict[str, Any], model: Model) -> list[list[int]]:
    """Tokens all over the vocabulary, other ones in each row."""
    size = model.manifest.inputs.vocab_size
    assert size is not None
    length, batch = given["length"], given["batch"]
    return [[(place * 7919 + row * 104729) % size for place in range(length)] for row in range(batch)]


def _say_peak() -> None:
    from .machine import peak_memory

    _say(peak=peak_memory())


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
