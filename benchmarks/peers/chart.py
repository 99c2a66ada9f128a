"""Draws the results as one picture: a row of panels a precision, a bar an engine, tfmx in colour.

python benchmarks/peers/chart.py results.json results.png [SHAPE]
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import CANDIDATES
from PIL import Image, ImageDraw, ImageFont
from report import NAMES, PRECISIONS

SCALE = 2  # drawn large, for screens that show it so
WIDTH, LABELS, PANEL, BAR, GAP, MARGIN = 1180, 235, 225, 15, 5, 24
INK, FAINT, PEER, OURS = (30, 30, 34), (120, 120, 128), (178, 184, 194), (214, 84, 36)
# (key, title, digits, whether more is better)
PANELS = [
    ("decode_512", "decode at 512, tokens/s", 0, True),
    ("prefill_512", "prefill 512, tokens/s", 0, True),
    ("first_token", "start to first token, s", 2, False),
    ("peak_memory", "peak memory, MB", 0, False),
]
READING = "Of speed more is better, of time and memory less."
PREFERRED = ("smollm2", "S", "M")  # which shape is drawn, if none is asked for


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    values: dict[str, float]
    ours: bool


def draw(results: dict[str, Any], path: Path, shape: str | None = None) -> None:
    shape = shape or next(name for name in PREFERRED if name in results["shapes"])
    found = results["shapes"][shape]
    groups = [
        (precision, bars) for precision in PRECISIONS if (bars := _bars(found["candidates"], precision))
    ]
    height = 100 + sum(44 + len(bars) * (BAR + GAP) + 14 for _, bars in groups)
    image = Image.new("RGB", (WIDTH * SCALE, height * SCALE), "white")
    canvas = _Canvas(ImageDraw.Draw(image))
    canvas.text((MARGIN, 20), NAMES[shape].removeprefix("Shape S: ").removeprefix("Shape M: "), 19, INK)
    machine = found["machine"]
    where = f"{machine['cpu']} ({machine['vectors']}), {found['threads']} threads, {machine['memory']}"
    how = f"batch 1, greedy; medians of {found['rounds']}"
    canvas.text((MARGIN, 48), f"{found['date']}, {where}; {how}. {READING}", 12, FAINT)
    top = 80
    for precision, bars in groups:
        top = _group(canvas, top, precision, bars)
    image.save(path, optimize=True)


def _bars(candidates: dict[str, Any], precision: str) -> list[Bar]:
    """Fastest to decode first."""
    bars = [
        Bar(_short(name), entry["median"], CANDIDATES[name].is_ours)
        for name, entry in candidates.items()
        if entry["precision"] == precision
    ]
    return sorted(bars, key=lambda bar: -bar.values["decode_512"])


def _short(name: str) -> str:
    label = CANDIDATES[name].label
    return label.replace("shared_embeddings, prune_lm_head, accuracy_level 4", "tuned").replace(
        "shared_embeddings, prune_lm_head", "tuned"
    )


def _group(canvas: _Canvas, top: int, precision: str, bars: list[Bar]) -> int:
    canvas.text((MARGIN, top + 8), precision, 17, INK)
    for column, (key, title, digits, more) in enumerate(PANELS):
        left = MARGIN + LABELS + column * PANEL
        canvas.text((left, top + 10), title, 12, FAINT)
        largest = max(bar.values[key] for bar in bars)
        best = (max if more else min)(bar.values[key] for bar in bars)
        for row, bar in enumerate(bars):
            at = top + 36 + row * (BAR + GAP)
            value = bar.values[key]
            length = max(2, round(value / largest * (PANEL - 70)))
            canvas.bar((left, at, left + length, at + BAR), OURS if bar.ours else PEER)
            colour = INK if value == best else FAINT
            canvas.text((left + length + 5, at + 1), f"{value:.{digits}f}", 11, colour)
            if column == 0:
                canvas.text((MARGIN, at + 1), bar.label, 11, OURS if bar.ours else INK)
    return top + 44 + len(bars) * (BAR + GAP) + 14


class _Canvas:
    """Pillow's drawing, in units of a pixel on a plain screen."""

    def __init__(self, pen: ImageDraw.ImageDraw) -> None:
        self._pen = pen

    def text(self, at: tuple[float, float], text: str, size: int, colour: tuple[int, int, int]) -> None:
        font = ImageFont.load_default(size * SCALE)
        self._pen.text((at[0] * SCALE, at[1] * SCALE), text, font=font, fill=colour)

    def bar(self, box: tuple[int, int, int, int], colour: tuple[int, int, int]) -> None:
        self._pen.rectangle([edge * SCALE for edge in box], fill=colour)


if __name__ == "__main__":
    source, target, *shape_named = sys.argv[1:]
    draw(json.loads(Path(source).read_text()), Path(target), *shape_named)
