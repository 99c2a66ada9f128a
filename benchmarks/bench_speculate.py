"""What speculation brings: tokens/s with and without it, on answers that repeat their prompt and on free text.

    python benchmarks/bench_speculate.py [BUNDLE] [--draft BUNDLE] [--rounds N] [--tokens N]

Batch 1, one process, the two ways in turn for each task, medians of the rounds; the ratio is the median of each
round's. "given": what a model that is up to the task would say is run token by token, for SmolLM2-135M soon repeats
itself instead of its prompt, which is too easy to guess. "own": what the model says, to its own end. Without BUNDLE,
SmolLM2-135M in float32 is exported into .cache/bench.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import smollm2

import tfmx
from tfmx.runtime.draft_length import RunCosts
from tfmx.runtime.engine import Engine, open_engine
from tfmx.runtime.model import Model
from tfmx.runtime.sampling import SamplingOptions
from tfmx.runtime.speculation import Speculation, SpeculativeEngine, open_drafter

STORY = (
    "The old lighthouse keeper climbed the stairs every evening at six. He carried a lamp, a loaf of bread and a book "
    "that he had read many times. The sea was calm in summer and wild in winter, and he wrote down each ship that "
    "passed. On the third of May the Margaret came in with torn sails. On the ninth of May the Albatross passed "
    "without stopping. On the twelfth of May nobody came, and the keeper wrote: nothing to report. His daughter Anna "
    "visited on Sundays and brought apples, letters and news from the town of Westport."
)
PEOPLE = """\
Anna Miller, 34, teacher, London, anna.miller@example.com, speaks English and French
Bob Stone, 51, carpenter, Washington, bob.stone@example.org, speaks English
Carla Reyes, 28, nurse, Madrid, carla.reyes@example.net, speaks Spanish and English
David Okafor, 45, engineer, Lagos, d.okafor@example.com, speaks English and Yoruba
Emma Larsen, 39, translator, Copenhagen, emma.larsen@example.dk, speaks Danish and German
Felix Braun, 62, gardener, Vienna, felix.braun@example.at, speaks German
Grace Kim, 31, pilot, Seoul, grace.kim@example.kr, speaks Korean and English
Hugo Martin, 47, baker, Lyon, hugo.martin@example.fr, speaks French
"""
CODE = '''\
class Stack:
    """A pile of things: the last one in is the first one out."""

    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
        """Put an item on top."""
        self.items.append(item)

    def pop(self):
        """Take the top item off."""
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def __len__(self):
        return len(self.items)
'''


@dataclass(frozen=True)
class Task:
    name: str
    prompt: str
    answer: str | None = None  # None: the model's own
    is_drawn: bool = False

    @property
    def kind(self) -> str:
        return "own" if self.answer is None else "given"


FREE = {
    "a story": "Write a long story about a fox who learns to sail.",
    "an explanation": "Explain how photosynthesis works, in detail.",
    "an essay": "Write an essay on the causes of the French Revolution.",
    "advice": "How can I sleep better? Give me a detailed answer.",
}
TASKS = (
    Task("repeats: a copy", f"Repeat this text:\n\n{STORY}", STORY),
    Task(
        "repeats: an edited text",
        f"Change the keeper to a guard, Anna to Maria and May to June in this text:\n\n{STORY}",
        STORY.replace("keeper", "guard").replace("Anna", "Maria").replace("May", "June"),
    ),
    Task(
        "repeats: an edited file", f"Rename push to put in this file:\n\n{CODE}", CODE.replace("push", "put")
    ),
    Task(
        "repeats: an extracted list",
        f"List the name and the email of each person:\n\n{PEOPLE}",
        "\n".join(f"{line.split(', ')[0]}: {line.split(', ')[4]}" for line in PEOPLE.splitlines()),
    ),
    Task("repeats: a copy", f"Repeat the following text exactly:\n\n{STORY}"),
    *(Task(f"free: {name}, drawn", prompt, is_drawn=True) for name, prompt in FREE.items()),
    *(Task(f"free: {name}, greedy", prompt) for name, prompt in FREE.items()),
)


@dataclass(frozen=True)
class Run:
    token_ids: list[int]
    speed: float  # tokens/s after the first
    drafted: int
    accepted: int


def generate(model: Model, ids: list[int], task: Task, speculation: Speculation | None, tokens: int) -> Run:
    drawn = SamplingOptions(temperature=0.8, top_p=0.95, seed=1)
    model.speculate(speculation)
    options = drawn if task.is_drawn else SamplingOptions()
    steps = list(model.generate(ids, options, max_new_tokens=tokens))
    found = steps[-1].statistics
    return Run(
        [step.token_id for step in steps],
        found.decode_tokens_per_second,
        found.drafted_tokens,
        found.accepted_tokens,
    )


def follow(model: Model, ids: list[int], answer: list[int], speculation: Speculation | None) -> Run:
    """As `generate` goes, but for the choice: the next token is that of the answer."""
    end = len(ids) + len(answer)
    engine: Engine = open_engine(model._open_graphs(), 1, end)  # noqa: SLF001 (what `generate` runs on)
    ahead: SpeculativeEngine | None = None
    if speculation is not None:
        draft = speculation.draft._open_graphs() if speculation.draft else None  # noqa: SLF001
        engine = ahead = SpeculativeEngine(engine, open_drafter(draft, ids, end), RunCosts(), end)
    engine.prefill([ids]).greedy()
    started = time.perf_counter()
    for token in answer[:-1]:
        engine.decode([token]).greedy()
    speed = (len(answer) - 1) / (time.perf_counter() - started)
    return Run(answer, speed, ahead.drafted if ahead else 0, ahead.accepted if ahead else 0)


def measure(model: Model, task: Task, speculation: Speculation, rounds: int, tokens: int) -> str:
    ids = model.chat_ids([{"role": "user", "content": task.prompt}])
    wanted = model.encode(task.answer) if task.answer else []
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for _ in range(rounds):
        for speculates, done in runs.items():
            chosen = speculation if speculates else None
            done.append(
                follow(model, ids, wanted, chosen) if wanted else generate(model, ids, task, chosen, tokens)
            )
    ratio = statistics.median(new.speed / old.speed for old, new in zip(*runs.values(), strict=True))
    plain, fast = (statistics.median(run.speed for run in done) for done in runs.values())
    last = runs[True][-1]
    return (
        f"| {task.name} ({task.kind}) | {len(last.token_ids)} | {plain:.1f} | {fast:.1f} | {ratio:.2f} "
        f"| {last.accepted} of {last.drafted} | {agreement(runs[False][-1].token_ids, last.token_ids)} |"
    )


def agreement(plain: list[int], found: list[int]) -> str:
    """Whether the answers are the same; kernels for one token and for several round differently."""
    place = next((i for i, (one, other) in enumerate(zip(plain, found, strict=False)) if one != other), None)
    return f"to token {place}" if place is not None else "yes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192)
    given = parser.parse_args()
    with tfmx.load(given.bundle or smollm2.bundle("ort"), check=False) as model:
        draft = tfmx.load(given.draft, check=False) if given.draft else None
        list(model.generate([1] * 32, max_new_tokens=8))  # warm
        print("| answer | tokens | plain (tokens/s) | speculative | ratio | guesses right | the same |")
        print("|---|---|---|---|---|---|---|")
        for task in TASKS:
            print(
                measure(model, task, Speculation(draft=draft), given.rounds, given.tokens),
                flush=True,
            )


if __name__ == "__main__":
    main()
