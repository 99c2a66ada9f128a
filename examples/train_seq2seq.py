"""An encoder-decoder that rewrites dates, as people write them, as ISO 8601 ones, character by character.

    python examples/train_seq2seq.py
    tfmx run .demo/seq2seq/dates "March 3, 2021"                     # 2021-03-03
    tfmx attend .demo/seq2seq/dates "March 3, 2021" -o dates-map.png # where each digit was looked up

Dates of 1900 to 2099 in eight spellings. One day in twenty is held out: the model never sees it, in any spelling.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from training import IGNORED, Characters, Outcome, claim, command_line, fit, make_bundle, padded, seeded

import tfmx
from tfmx.tfm_model.checkpoint import GenerationDefaults
from tfmx.tfm_model.config import (
    AttentionConfig,
    HeadConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    PositionConfig,
    TokenInputs,
)
from tfmx.tfm_model.transformer import Transformer

STEPS, BATCH, HELD_OUT = 500, 64, 500
FIRST, LAST = dt.date(1900, 1, 1), dt.date(2099, 12, 31)
HELD_EVERY = 20  # days
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
SPELLINGS = (  # d, m, y: numbers; month: its name, mon: the first three letters of it
    "{month} {d}, {y}", "{mon} {d}, {y}", "{d} {month} {y}", "{d} {mon} {y}",
    "{d}. {month} {y}", "{m}/{d}/{y}", "{d:02}.{m:02}.{y}", "the {d} of {month}, {y}",
)  # fmt: skip
START, END = "<start>", "<end>"
CHARACTERS = Characters("".join(MONTHS) + "0123456789 ,./-thef", [START, END])
LONGEST = 40  # characters, of a source or an answer
WANTED = 0.95  # exact matches
EXAMPLE = "March 3, 2021"

_DECODER = ModelConfig(
    inputs=TokenInputs(vocab_size=len(CHARACTERS)),
    width=64,
    n_layers=2,
    context=LONGEST,
    mixer=AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=16),
    norm=NormConfig(kind="layer", bias=True),
    mlp=MlpConfig(hidden=128, activation="relu", gated=False, bias=True),
    positions=PositionConfig(kind="sinusoidal"),
)
CONFIG = replace(_DECODER, encoder=replace(_DECODER, causal=False, head=HeadConfig(kind="hidden")))


def spelled(day: dt.date, spelling: str) -> str:
    month = MONTHS[day.month - 1]
    return spelling.format(d=day.day, m=day.month, y=day.year, month=month, mon=month[:3])


def days() -> tuple[list[dt.date], list[dt.date]]:
    """To train on, and held out."""
    all_days = [FIRST + dt.timedelta(days=day) for day in range((LAST - FIRST).days + 1)]
    order = np.random.default_rng(0).permutation(len(all_days))
    held = [all_days[i] for i in order[::HELD_EVERY]]
    return sorted(set(all_days) - set(held)), held


def draw_pairs(some: Sequence[dt.date], count: int, random: np.random.Generator) -> list[tuple[str, str]]:
    """Sources and answers."""
    chosen = [some[i] for i in random.integers(len(some), size=count)]
    spellings = [SPELLINGS[i] for i in random.integers(len(SPELLINGS), size=count)]
    return [(spelled(day, how), day.isoformat()) for day, how in zip(chosen, spellings, strict=True)]


def pair_loss(model: Transformer, pairs: Sequence[tuple[str, str]]) -> Tensor:
    """Each character of the answer from the source and the characters before it."""
    start, end = CHARACTERS.special(START), CHARACTERS.special(END)
    sources = [CHARACTERS.ids(source) for source, _ in pairs]
    answers = [CHARACTERS.ids(answer) for _, answer in pairs]
    mask = padded([[1] * len(source) for source in sources], 0)
    read = padded([[start, *answer] for answer in answers], end)
    wanted = padded([[*answer, end] for answer in answers], IGNORED)
    logits = model.apply_to(read, source=padded(sources, 0), source_mask=mask).main
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def greedy(model: Transformer, sources: Sequence[str]) -> list[str]:
    """What PyTorch answers: all of it anew for each character, which is slow and plain."""
    end = CHARACTERS.special(END)
    source_ids = [CHARACTERS.ids(source) for source in sources]
    mask, source = padded([[1] * len(ids) for ids in source_ids], 0), padded(source_ids, 0)
    said = torch.full((len(sources), 1), CHARACTERS.special(START))
    for _ in range(LONGEST - 1):
        logits = model.apply_to(said, source=source, source_mask=mask).main[:, -1]
        said = torch.cat((said, logits.argmax(-1, keepdim=True)), dim=1)
        if (said == end).any(1).all():
            break
    rows = [row[1:] for row in said.tolist()]
    return [CHARACTERS.text(row[: row.index(end)] if end in row else row) for row in rows]


def exact_matches(answers: Sequence[str], pairs: Sequence[tuple[str, str]]) -> float:
    return sum(answer == wanted for answer, (_, wanted) in zip(answers, pairs, strict=True)) / len(pairs)


def main(folder: Path, steps: int = STEPS, count: int = HELD_OUT) -> Outcome:
    random = seeded()
    model = Transformer(CONFIG)
    seen, held_out = days()

    def loss_of_batch() -> Tensor:
        return pair_loss(model, draw_pairs(seen, BATCH, random))

    first, last = fit(model, loss_of_batch, steps, rate=2e-3, title="training on dates")
    ends = GenerationDefaults(
        eos_token_ids=(CHARACTERS.special(END),), decoder_start_token_id=CHARACTERS.special(START)
    )
    bundle = make_bundle(
        model, folder, "dates", tokenizer_json=CHARACTERS.json, generation=ends, attentions="all"
    )

    pairs = draw_pairs(held_out, count, random)
    sources = [source for source, _ in pairs]
    ours = greedy(model, sources)
    with tfmx.load(bundle) as loaded:
        theirs = [result.text for result in loaded.generate_batch(sources)]
        example = loaded.generate_batch([EXAMPLE])[0].text
    outcome = Outcome(
        name="dates",
        model=model,
        bundle=bundle,
        first_loss=first,
        last_loss=last,
        pytorch=exact_matches(ours, pairs),
        exported=exact_matches(theirs, pairs),
    )
    print(outcome.loss_line)
    print(f"exact on {count} held-out dates  PyTorch {outcome.pytorch:.2%}   exported {outcome.exported:.2%}")
    print(f"{EXAMPLE} -> {example}")
    if steps >= STEPS:
        claim(outcome.exported > WANTED, f"over {WANTED:.0%} exact, found {outcome.exported:.2%}")
        claim(outcome.exported >= outcome.pytorch - 1 / count, "as many right as PyTorch")
    return outcome


if __name__ == "__main__":
    command_line(main, __doc__ or "", "seq2seq", STEPS)
