"""Do quantised bundles of SmolLM2 answer as the float32 one does, and what do they cost?

    python benchmarks/bench_answers.py [BUNDLE ...]

Greedy answers to six questions of the demo's kind, which float32 answers rightly: whether the fact is in the answer, and whether
it is float32's in the first token, the first 16 and as a whole (64 at most). Divergence and top-1 on four windows of 512 tokens
of the text that `tfmx verify --quality` reads, from the float32 bundle. Decoding: CPU time of a step with one thread, as a
share of the first bundle's, medians of interleaved rounds: other load changes it less than a clock on the wall.

Of the first question float32 itself is not sure: its first token leads by 0.08 of a logit. Others lead by 0.4 to 4.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import smollm2

import tfmx
from tfmx.export.quality_windows import read_text, text_windows
from tfmx.runtime.bundle import Bundle
from tfmx.runtime.devices import choose_device
from tfmx.runtime.engine import Graphs, open_engine

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is 2 + 2?": " 4",
    "What is the opposite of hot?": "cold",
    "How many days are in a week?": "7",
    "What is the chemical symbol for water?": "H2O",
}
VARIANTS = {
    "answers-int4": ("--quant", "int4"),
    "answers-int4-act8": ("--quant", "int4", "--quant-activations", "int8"),
    "answers-int8": ("--quant", "int8", "--requantise"),
    "answers-int8-symmetric": ("--quant", "int8", "--requantise", "--quant-symmetric"),
    "answers-int8-act8": (
        "--quant",
        "int8",
        "--requantise",
        "--quant-symmetric",
        "--quant-activations",
        "int8",
    ),
    "answers-int4-again": ("--quant", "int4", "--requantise"),
    "answers-int4-uniform": ("--quant", "int4", "--requantise", "--quant-uniform"),
}
LONGEST, WINDOWS, STEPS, ROUNDS = 64, 4, 24, 5

Logits = npt.NDArray[np.float64]
Answer = tuple[list[int], str]


def answers(bundle: Path) -> list[Answer]:
    found = []
    with tfmx.load(bundle) as model:
        for question in QUESTIONS:
            steps = list(model.chat([{"role": "user", "content": question}], max_new_tokens=LONGEST))
            ids = [step.token_id for step in steps if step.token_id is not None]
            found.append((ids, "".join(step.text for step in steps)))
    return found


def graphs_of(bundle: Path, threads: int | None = None) -> Graphs:
    opened = Bundle.open(bundle, check=False)
    return Graphs(opened, choose_device("cpu", opened), threads=threads)


def log_softmax(logits: npt.NDArray[np.float32]) -> Logits:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


def logits_on_text(plain: Path, bundle: Path) -> Iterator[npt.NDArray[np.float32]]:
    """Window by window, (T, V)."""
    windows = text_windows(Bundle.open(plain, check=False), read_text(None)).token_ids
    graphs = graphs_of(bundle)
    for row in windows[:: len(windows) // WINDOWS][:WINDOWS]:
        yield open_engine(graphs, 1, len(row)).score(row)["logits"]


def on_text(truth: list[npt.NDArray[np.float32]], plain: Path, bundle: Path) -> tuple[float, float]:
    """Mean KL divergence from float32's predictions, and how often the best token is the same."""
    divergences, agreements = [], []
    for expected, found in zip(truth, logits_on_text(plain, bundle), strict=True):
        log_p, log_q = log_softmax(expected), log_softmax(found)
        divergences.append((np.exp(log_p) * (log_p - log_q)).sum(axis=-1))
        agreements.append(log_p.argmax(axis=-1) == log_q.argmax(axis=-1))
    return float(np.mean(divergences)), float(np.mean(agreements))


def step_times(bundles: list[Path]) -> list[float]:
    """Each bundle's CPU time a step, divided by the first's of the same round."""
    engines = [open_engine(graphs_of(bundle, threads=1), 1, 512) for bundle in bundles]
    for engine in engines:
        engine.prefill([list(range(100, 164))])
    rounds = []
    for _ in range(ROUNDS + 1):
        times = []
        for engine in engines:
            started = time.process_time()
            for token in range(STEPS):
                engine.decode([1000 + token])
            times.append(time.process_time() - started)
        rounds.append([seconds / times[0] for seconds in times])
    return [statistics.median(column) for column in zip(*rounds[1:], strict=True)]  # the first round warms


def main() -> None:
    plain = smollm2.bundle("answers-fp32")
    given = [Path(argument) for argument in sys.argv[1:]]
    bundles = given or [smollm2.bundle(name, *options) for name, options in VARIANTS.items()]
    wanted = answers(plain)
    for question, (_, text) in zip(QUESTIONS, wanted, strict=True):
        print(f"{question} {text!r}")
    print(
        "\n| bundle | facts | first token | first 16 | whole | KL divergence | same top token | CPU time of a step | MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    wrong, truth = [], list(logits_on_text(plain, plain))
    for bundle, ratio in zip(bundles, step_times(bundles), strict=True):
        found = answers(bundle)
        facts = [fact in text for fact, (_, text) in zip(QUESTIONS.values(), found, strict=True)]
        wrong += [
            f"{bundle.name}: {text!r}" for right, (_, text) in zip(facts, found, strict=True) if not right
        ]
        same = [
            sum(ours[:n] == theirs[:n] for (ours, _), (theirs, _) in zip(found, wanted, strict=True))
            for n in (1, 16, LONGEST)
        ]
        divergence, agreement = on_text(truth, plain, bundle)
        size = (bundle / "weights.bin").stat().st_size / 1e6
        print(
            f"| {bundle.name} | {sum(facts)} of {len(facts)} | {same[0]} | {same[1]} | {same[2]} | {divergence:.4f} | "
            f"{agreement:.1%} | {ratio:.2f} | {size:.0f} |",
            flush=True,
        )
    print(*wrong, sep="\n")


if __name__ == "__main__":
    main()
