"""A vision transformer that reads digits, drawn in any place, size and angle, with noise over them.

    python examples/train_vit.py
    tfmx run .demo/vit/digits .demo/vit/digit.png
    tfmx attend .demo/vit/digits .demo/vit/digit.png -o digit-map.png

The images are drawn as they are needed, with Pillow's own font, so that no two are the same: those that it is
tested on were never seen. The bundle takes image files: how pixels become numbers is part of its manifest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
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
    PatchInputs,
    PositionConfig,
)
from tfmx.tfm_model.transformer import Transformer

STEPS, BATCH, HELD_OUT = 700, 64, 1000
DIGITS = tuple("0123456789")
SIZE, PATCH = 28, 7  # 16 patches
HEIGHTS = (18, 26)  # of a digit's font
TURN = 12.0  # degrees, to either side
NOISE = 25.0  # of a pixel's 255
MEAN, STD = 0.2, 0.3  # about those of the pixels
WANTED = 0.95  # accuracy

CONFIG = ModelConfig(
    inputs=PatchInputs(
        channels=1,
        height=SIZE,
        width=SIZE,
        patch=PATCH,
        bias=True,
        class_token=True,
        mean=(MEAN,),
        std=(STD,),
    ),
    width=64,
    n_layers=3,
    context=(SIZE // PATCH) ** 2 + 1,
    mixer=AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=16),
    norm=NormConfig(kind="layer", bias=True),
    mlp=MlpConfig(hidden=128, activation="gelu", gated=False, bias=True),
    causal=False,
    positions=PositionConfig(kind="learned"),
    head=HeadConfig(kind="classes", size=len(DIGITS), pooling="class_token", bias=True, labels=DIGITS),
)

Pixels = npt.NDArray[np.uint8]


def draw_digit(digit: int, random: np.random.Generator) -> Pixels:
    """(H, W): light on dark."""
    image = Image.new("L", (SIZE, SIZE))
    x, y = random.uniform(0.4, 0.6, 2) * SIZE
    font = ImageFont.load_default(int(random.integers(*HEIGHTS)))
    ImageDraw.Draw(image).text((x, y), DIGITS[digit], 255, font, anchor="mm")
    turned = image.rotate(random.uniform(-TURN, TURN), Image.Resampling.BILINEAR)
    noisy = np.asarray(turned) * random.uniform(0.6, 1) + np.abs(random.normal(0, NOISE, (SIZE, SIZE)))
    return noisy.clip(0, 255).astype(np.uint8)


def draw_digits(count: int, random: np.random.Generator) -> tuple[list[Pixels], npt.NDArray[np.int64]]:
    digits = random.integers(len(DIGITS), size=count)
    return [draw_digit(int(digit), random) for digit in digits], digits


def as_input(images: list[Pixels]) -> FloatArray:
    """(B, 1, H, W): what the runtime makes of image files."""
    pixels = np.stack(images)[:, None].astype(np.float32)
    return ((pixels / 255 - MEAN) / STD).astype(np.float32)


def main(folder: Path, steps: int = STEPS) -> Outcome:
    random = seeded()
    model = Transformer(CONFIG)

    def loss_of_batch() -> Tensor:
        images, digits = draw_digits(BATCH, random)
        return F.cross_entropy(
            model.apply_to(torch.from_numpy(as_input(images))).main, torch.from_numpy(digits)
        )

    first, last = fit(model, loss_of_batch, steps, rate=1e-3, title="training on digits")
    bundle = make_bundle(model, folder, "digits", attentions="all")

    images, digits = draw_digits(HELD_OUT, random)
    Image.fromarray(images[0]).save(folder / "digit.png")
    inputs = as_input(images)
    with torch.no_grad():
        ours = model.apply_to(torch.from_numpy(inputs)).main
    with tfmx.load(bundle) as loaded:
        theirs = np.stack([found["logits"] for found in loaded.apply_batch(list(inputs))])
        from_file = loaded.apply(folder / "digit.png")["logits"]
    outcome = Outcome(
        name="digits",
        model=model,
        bundle=bundle,
        first_loss=first,
        last_loss=last,
        pytorch=accuracy(ours, digits),
        exported=accuracy(theirs, digits),
    )
    said = DIGITS[int(from_file.argmax())]
    print(outcome.loss_line)
    print(
        f"accuracy on {HELD_OUT} held-out images  PyTorch {outcome.pytorch:.2%}   exported {outcome.exported:.2%}"
    )
    print(f"{folder / 'digit.png'} is a {DIGITS[digits[0]]}, the bundle reads a {said}")
    if steps >= STEPS:
        claim(outcome.exported > WANTED, f"an accuracy over {WANTED:.0%}, found {outcome.exported:.2%}")
        claim(outcome.exported >= outcome.pytorch - 1 / HELD_OUT, "as many right as PyTorch")
        claim(bool(np.allclose(from_file, theirs[0], atol=1e-4)), "a file gives what its pixels give")
    return outcome


if __name__ == "__main__":
    command_line(main, __doc__ or "", "vit", STEPS)
