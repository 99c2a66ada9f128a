"""Two language models of characters, alike but for their attention: softmax, and random features (Peng et al. 2021).

    python examples/train_char_lm.py
    tfmx run .demo/char_lm/softmax "The statement " --max-tokens 200 --temperature 0.7
    tfmx run .demo/char_lm/random-features "The statement " --max-tokens 200 --temperature 0.7
    tfmx export .demo/char_lm/softmax-checkpoint -o .demo/char_lm/maps --attentions all
    tfmx attend .demo/char_lm/maps "The statement " -o statement.png

They read what Python's own `help()` has to say about the language (the text comes with every Python; a tenth of its
paragraphs is held out). Softmax attention carries the keys and values of all that it has read, random features a
state of constant size. So the second does not slow down as the text grows, and pays for it: its loss stays higher.
(It approximates the softmax with noise that grows with the number of keys; whether that is the whole reason was not
tested.) The long contexts are there for the speed only;
models trained on short texts say nothing sensible after long ones.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from training import Characters, Outcome, claim, command_line, fit, make_bundle, seeded

import tfmx
from tfmx.runtime.model import Model
from tfmx.runtime.sampling import SamplingOptions
from tfmx.tfm_model.config import (
    AttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RandomFeatureConfig,
    RotaryConfig,
    TokenInputs,
)
from tfmx.tfm_model.transformer import Transformer

STEPS, BATCH, LENGTH = 400, 8, 64
HELD_OUT = 128  # windows of LENGTH characters
CHARACTERS = Characters("\n" + "".join(map(chr, range(32, 127))))
CONTEXTS = (64, 1024, 16384)  # where speed is measured
DECODED = 64  # tokens, for a measurement
PROMPT = "The statement "
SAME = 1e-4  # bits a character, between PyTorch and the exported model

SOFTMAX = ModelConfig(
    inputs=TokenInputs(vocab_size=len(CHARACTERS)),
    width=128,
    n_layers=2,
    context=CONTEXTS[-1] + DECODED,
    mixer=AttentionConfig(
        n_heads=8, n_kv_heads=8, head_dim=16, qk_norm=NormConfig(), rotary=RotaryConfig(dim=16)
    ),
    norm=NormConfig(),
    mlp=MlpConfig(hidden=256),
)
# Scores start small, where few features tell them well, and grow as the weights of qk_norm learn to.
FEATURES = replace(SOFTMAX.attention, scale=1 / 16, random_features=RandomFeatureConfig(features=128))
MODELS = {"softmax": SOFTMAX, "random-features": replace(SOFTMAX, mixer=FEATURES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Tokens a second."""

    context: int
    prefill: float
    decode: float


def read_texts() -> tuple[str, str]:
    """To train on, and held out: no paragraph is in both, though help texts repeat each other."""
    paragraphs = dict.fromkeys(
        part.strip("\n") for name in sorted(topics) for part in topics[name].split("\n\n")
    )
    kept = [part for part in paragraphs if part.isascii()]
    known = [part for index, part in enumerate(kept) if index % 10]
    return "\n\n".join(known), "\n\n".join(kept[::10])


def held_out_windows(text: str) -> Tensor:
    """(B, LENGTH + 1), side by side."""
    ids = CHARACTERS.ids(text)
    return torch.tensor([ids[start : start + LENGTH + 1] for start in range(0, HELD_OUT * LENGTH, LENGTH)])


def train(
    config: ModelConfig, name: str, text: str, steps: int, random: np.random.Generator
) -> tuple[Transformer, tuple[float, float]]:
    model, ids = Transformer(config), torch.tensor(CHARACTERS.ids(text))

    def loss_of_batch() -> Tensor:
        starts = random.integers(len(ids) - LENGTH, size=BATCH)
        rows = torch.stack([ids[start : start + LENGTH + 1] for start in starts])
        return F.cross_entropy(model.apply_to(rows[:, :-1]).main.flatten(0, 1), rows[:, 1:].flatten())

    return model, fit(model, loss_of_batch, steps, rate=5e-3, title=f"training with {name}")


def bits(logits: Tensor, windows: Tensor) -> float:
    """Bits a character."""
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item() / math.log(2)


def exported_logits(model: Model, windows: Tensor) -> Tensor:
    return torch.from_numpy(np.stack([model.logits(row) for row in windows[:, :-1].tolist()]))


def measure(model: Model, text: str, contexts: Sequence[int]) -> list[Speed]:
    """After contexts of real text."""
    found = []
    options = SamplingOptions(max_new_tokens=DECODED, ignore_eos=True)
    for context in (contexts[0], *contexts):  # the first is run once more, to warm up
        *_, last = model.generate(CHARACTERS.ids(text[:context]), options)
        figures = last.statistics
        found.append(
            Speed(
                context=context,
                prefill=figures.prefill_tokens_per_second,
                decode=figures.decode_tokens_per_second,
            )
        )
    return found[1:]


def sample(model: Model) -> str:
    options = SamplingOptions(temperature=0.7, seed=1, max_new_tokens=160)
    return PROMPT + model.generate_batch([PROMPT], options)[0].text


def main(folder: Path, steps: int = STEPS, contexts: Sequence[int] = CONTEXTS) -> list[Outcome]:
    random = seeded()
    text, held_out = read_texts()
    windows = held_out_windows(held_out)
    print(
        f"text  the help texts of Python {platform.python_version()}: {len(text)} characters, {len(held_out)} held out"
    )
    outcomes: list[Outcome] = []
    speeds: dict[str, list[Speed]] = {}
    samples: dict[str, str] = {}
    for name, config in MODELS.items():
        model, (first, last) = train(config, name, text, steps, random)
        bundle = make_bundle(model, folder, name, tokenizer_json=CHARACTERS.json)
        with torch.no_grad():
            ours = bits(model.apply_to(windows[:, :-1]).main, windows)
        with tfmx.load(bundle, threads=1) as loaded:  # a second one would wait more than it helps
            theirs = bits(exported_logits(loaded, windows), windows)
            speeds[name], samples[name] = measure(loaded, text, contexts), sample(loaded)
        outcomes.append(
            Outcome(
                name=name,
                model=model,
                bundle=bundle,
                first_loss=first,
                last_loss=last,
                pytorch=ours,
                exported=theirs,
            )
        )
        print(outcomes[-1].loss_line)
    print(f"bits a character on {windows[:, 1:].numel()} held-out characters")
    for outcome in outcomes:
        print(f"  {outcome.name:<16}PyTorch {outcome.pytorch:.4f}   exported {outcome.exported:.4f}")
    print("tokens a second of the exported models, after a context of")
    for name, rows in speeds.items():
        for speed in rows:
            print(
                f"  {name:<16}{speed.context:>6}   prefill {speed.prefill:8.0f}   decode {speed.decode:6.0f}"
            )
    for name, said in samples.items():
        print(f"--- {name} says\n{said}")
    if steps >= STEPS:
        for outcome in outcomes:
            gap = outcome.exported - outcome.pytorch
            claim(gap < SAME, f"{outcome.name}: as good as PyTorch, found {gap:.1e} more bits a character")
    return outcomes


if __name__ == "__main__":
    command_line(main, __doc__ or "", "char_lm", STEPS)
