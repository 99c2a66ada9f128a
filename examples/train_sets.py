"""An encoder that tells what shape a set of points was drawn from; the order of a set means nothing to it.

    python examples/train_sets.py
    tfmx run .demo/sets/points .demo/sets/ring.csv
    tfmx attend .demo/sets/points .demo/sets/ring.csv -o ring.png

Sets of 16 to 48 points, drawn from one of six shapes at any place, size and angle, with noise. The encoder has
no positions, so that it sees a set: the same points in another order give the same answer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from training import FloatArray, Outcome, accuracy, claim, command_line, fit, make_bundle, seeded

import tfmx
from tfmx.tfm_model.config import (
    AttentionConfig,
    HeadConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    VectorInputs,
)
from tfmx.tfm_model.transformer import Transformer

STEPS, BATCH, HELD_OUT = 1000, 32, 600
SHAPES = ("blob", "ring", "arc", "line", "cross", "two blobs")
SIZES = (16, 48)  # of a set
NOISE = 0.05  # of a point, where its shape is of size 1
WANTED = 0.95  # accuracy
SAME = 1e-4  # how far logits may be moved by another order: float32 sums have one

Points = npt.NDArray[np.float64]

CONFIG = ModelConfig(
    inputs=VectorInputs(features=2, bias=True),
    width=64,
    n_layers=2,
    context=256,
    mixer=AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=16),
    norm=NormConfig(kind="layer", bias=True),
    mlp=MlpConfig(hidden=128, activation="gelu", gated=False, bias=True),
    causal=False,
    head=HeadConfig(kind="classes", size=len(SHAPES), pooling="mean", bias=True, labels=SHAPES),
)


def draw_shape(shape: str, count: int, random: np.random.Generator) -> Points:
    """(T, 2), of about size 1."""
    t, zero = random.uniform(-1, 1, count), np.zeros(count)
    if shape == "blob":
        return random.standard_normal((count, 2)) * 0.5
    if shape == "two blobs":
        sides = np.stack([random.choice([-0.8, 0.8], count), zero], 1)
        return sides + random.standard_normal((count, 2)) * 0.15
    if shape == "cross":
        upright = random.random(count) < 0.5
        return np.stack([np.where(upright, 0, t), np.where(upright, t, 0)], 1)
    if shape == "line":
        return np.stack([t, zero], 1)
    angle = np.pi * t if shape == "ring" else np.pi / 2 * t  # an arc is half of a ring
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def draw_points(shape: str, count: int, random: np.random.Generator) -> FloatArray:
    """(T, 2): a shape that was blurred, turned, stretched and moved."""
    angle = random.uniform(0, 2 * np.pi)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    points = draw_shape(shape, count, random) + NOISE * random.standard_normal((count, 2))
    placed: Points = points @ turn * random.uniform(0.5, 2) + random.uniform(-1, 1, 2)
    return placed.astype(np.float32)


def draw_sets(count: int, random: np.random.Generator) -> tuple[list[FloatArray], list[int]]:
    classes = random.integers(len(SHAPES), size=count).tolist()
    sizes = random.integers(SIZES[0], SIZES[1] + 1, count).tolist()
    return [draw_points(SHAPES[k], size, random) for k, size in zip(classes, sizes, strict=True)], classes


def together(sets: list[FloatArray]) -> tuple[Tensor, Tensor]:
    """Sets of different sizes as one batch (B, T, 2), and its mask (B, T)."""
    T = max(map(len, sets))
    points = torch.zeros(len(sets), T, 2)
    mask = torch.zeros(len(sets), T, dtype=torch.int64)
    for row, given in enumerate(sets):
        points[row, : len(given)], mask[row, : len(given)] = torch.from_numpy(given), 1
    return points, mask


def main(folder: Path, steps: int = STEPS) -> Outcome:
    random = seeded()
    model = Transformer(CONFIG)

    def loss_of_batch() -> Tensor:
        sets, classes = draw_sets(BATCH, random)
        return F.cross_entropy(model.apply_to(*together(sets)).main, torch.tensor(classes))

    first, last = fit(model, loss_of_batch, steps, rate=2e-3, title="training on sets")
    bundle = make_bundle(model, folder, "points", attentions="all")
    np.savetxt(
        folder / "ring.csv", draw_points("ring", 32, random), "%.4f", delimiter=",", header="x,y", comments=""
    )

    sets, classes = draw_sets(HELD_OUT, random)
    with torch.no_grad():
        ours = model.apply_to(*together(sets)).main
    with tfmx.load(bundle) as loaded:
        theirs = np.stack([found["logits"] for found in loaded.apply_batch(sets)])
        shuffled = [random.permutation(points, axis=0) for points in sets]
        moved = np.stack([found["logits"] for found in loaded.apply_batch(shuffled)])
    outcome = Outcome(
        name="points",
        model=model,
        bundle=bundle,
        first_loss=first,
        last_loss=last,
        pytorch=accuracy(ours, classes),
        exported=accuracy(theirs, classes),
    )
    change = float(np.abs(moved - theirs).max())
    print(outcome.loss_line)
    print(
        f"accuracy on {HELD_OUT} held-out sets  PyTorch {outcome.pytorch:.2%}   exported {outcome.exported:.2%}"
    )
    print(f"shuffled sets: logits move by at most {change:.1e}")
    if steps >= STEPS:
        claim(outcome.exported > WANTED, f"an accuracy over {WANTED:.0%}, found {outcome.exported:.2%}")
        claim(outcome.exported >= outcome.pytorch - 1 / HELD_OUT, "as many right as PyTorch")
        claim(change < SAME, f"shuffling a set changes nothing, found {change:.1e}")
    return outcome


if __name__ == "__main__":
    command_line(main, __doc__ or "", "sets", STEPS)
