"""What `tfmx bench` measured as a picture: bars of tokens a second by context, each before its limit."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .console import percent

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

    from ..runtime.bench import AtLength, Spread

_MARGIN, _GAP = 28, 60
_PLOT = 300  # pixels of a panel's height
_BAR, _SPACE = 46, 26  # widths
_LEAST = 300  # of a panel's width, for its title
_SIZES = {"title": 18, "name": 15, "text": 13}
_LINE = 1.45  # of a font's size
_INK, _GREY, _LIMIT = "#1c1c1e", "#5c5f66", "#e4e6eb"
_COLOURS = {"prefill": "#3b6fb6", "decode": "#c8692c"}


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    rate: Spread
    limit: float | None  # tokens a second

    @property
    def top(self) -> float:
        return max(self.rate.most, self.limit or 0)


def draw_bench(title: str, facts: Sequence[tuple[str, str]], lengths: Sequence[AtLength]) -> bytes:
    """A PNG file."""
    from PIL import Image, ImageDraw, ImageFont

    fonts = {name: ImageFont.load_default(size) for name, size in _SIZES.items()}  # Pillow's own: ASCII
    panels = {
        "prefill": [_bar(e.length, e.prefill_tokens_per_second, e.prefill_share) for e in lengths],
        "decode": [_bar(e.length, e.decode_tokens_per_second, e.decode_share) for e in lengths],
    }
    notes = [f"{name}: {value}" for name, value in facts]
    notes.append(
        "Bars are medians, lines go from the least to the most; grey, and per cent of it: the machine's limit."
    )
    panel = max(_LEAST, len(lengths) * (_BAR + _SPACE) + _SPACE)
    wide = max(round(fonts["text"].getlength(text)) for text in notes)
    width = 2 * _MARGIN + max(2 * panel + _GAP, wide, round(fonts["title"].getlength(title)))
    top = _MARGIN + _line("title") + _line("name") + 24
    below = top + _PLOT + 2 * _line("text") + 24
    image = Image.new("RGB", (width, below + len(notes) * _line("text") + _MARGIN), "white")
    draw = ImageDraw.Draw(image)
    draw.text((_MARGIN, _MARGIN), _ascii(title), _INK, fonts["title"])
    for index, (name, bars) in enumerate(panels.items()):
        _paint_panel(draw, fonts, (_MARGIN + index * (panel + _GAP), top), panel, name, bars)
    for row, note in enumerate(notes):
        draw.text((_MARGIN, below + row * _line("text")), _ascii(note), _GREY, fonts["text"])
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def _bar(length: int, rate: Spread, share: float | None) -> Bar:
    return Bar(f"{length:,}", rate, rate.median / share if share else None)


def _paint_panel(
    draw: ImageDraw.ImageDraw,
    fonts: dict[str, ImageFont.FreeTypeFont | ImageFont.ImageFont],
    place: tuple[int, int],
    width: int,
    name: str,
    bars: Sequence[Bar],
) -> None:
    left, top = place
    floor = top + _PLOT
    draw.text((left, top - _line("name") - 20), f"{name}, tokens/s at a context of", _INK, fonts["name"])
    highest = max(bar.top for bar in bars)
    for index, bar in enumerate(bars):
        x = left + _SPACE + index * (_BAR + _SPACE)

        def y(rate: float) -> float:
            return floor - rate / highest * _PLOT

        if bar.limit is not None:
            draw.rectangle((x - 6, y(bar.limit), x + _BAR + 6, floor), fill=_LIMIT)
        draw.rectangle((x, y(bar.rate.median), x + _BAR, floor), fill=_COLOURS[name])
        middle = x + _BAR / 2
        draw.line((middle, y(bar.rate.least), middle, y(bar.rate.most)), fill=_INK, width=2)
        number = f"{bar.rate.median:,.0f}" if bar.rate.median >= 100 else f"{bar.rate.median:.1f}"
        draw.text((middle, y(bar.rate.most) - 4), number, _INK, fonts["text"], anchor="ms")
        draw.text((middle, floor + 6), bar.label, _INK, fonts["text"], anchor="ma")
        if bar.limit is not None:
            share = percent(bar.rate.median / bar.limit)
            draw.text((middle, floor + 6 + _line("text")), share, _GREY, fonts["text"], anchor="ma")
    draw.line((left, floor, left + width, floor), fill=_INK)


def _line(font: str) -> int:
    return round(_SIZES[font] * _LINE)


def _ascii(text: str) -> str:
    """Pillow's own font has no other letters."""
    return text.encode("ascii", "backslashreplace").decode()
