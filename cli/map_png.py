"""Attention maps as a picture: a row of panels a layer, a column a head, one colour scale for all."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import InputError
from .attention_map import AttentionMap, colours

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

WIDEST = 4000  # pixels of a side: what viewers still show without trouble
_COMFORT = 1600  # pixels of a side that a screen shows whole; more if every token's label then has its line
_CELL = 26  # pixels of a weight at most
_SLOT = 60  # pixels of a panel at least: the head's name stands above it
_MARGIN, _GAP = 24, 14
_SIZES = {"title": 20, "note": 13, "name": 13, "label": 12}
_LINE = 1.35  # of a font's size
_LONGEST = 14  # letters of a token's label
_SCALE = (14, 160)  # the colour scale's width and height
_LEAST = 480  # pixels of the picture's width, for the title
_INK, _GREY, _FRAME = "#1c1c1e", "#5c5f66", "#b4b8c0"


class PictureError(InputError):
    """There are more maps than a picture can hold."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are, in pixels; a panel's own size may be less than the slot that it has."""

    panel: tuple[int, int]
    slot: tuple[int, int]
    left: int  # of the first panel
    top: int
    size: tuple[int, int]
    cell: float
    every: int  # one of so many tokens has a label


def draw_png(found: AttentionMap) -> tuple[bytes, list[str]]:
    """The picture, and what had to be left out of it."""
    from PIL import Image, ImageDraw

    painter = Painter(found, {name: _font(size) for name, size in _SIZES.items()})
    layout = painter.lay_out()
    image = Image.new("RGB", layout.size, "white")
    painter.paint(image, ImageDraw.Draw(image), layout)
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue(), painter.losses(layout)


class Painter:
    def __init__(self, found: AttentionMap, fonts: dict[str, ImageFont.FreeTypeFont]) -> None:
        self._map, self._fonts, self._darkest = found, fonts, found.darkest()
        self._lacking: set[str] = set()  # letters that the font does not have
        self._rows = [self._label(token) for token in found.rows]
        self._columns = [self._label(token) for token in found.columns]

    # --- where things go -----------------------------------------------------------------------------------

    def lay_out(self) -> Layout:
        rows, columns = self._map.weights.shape[2:]
        n_layers, n_heads = len(self._map.layers), len(self._map.heads)
        left = _MARGIN + self._line("name") + _GAP + self._text("label", self._rows)
        right = _GAP + _SCALE[0] + 60 + _MARGIN  # the scale and its numbers
        below = self._text("label", self._columns) + 8 + _MARGIN
        header = self._header(_LEAST - 2 * _MARGIN) + self._line("name") + 4
        room_x = (WIDEST - left - right) // n_heads - _GAP
        room_y = (WIDEST - header - below) // n_layers - _GAP
        if room_x < _SLOT or room_y < _SLOT:
            raise PictureError(
                f"{n_layers} layers with {n_heads} heads each are more maps than a picture of {WIDEST} pixels "
                "holds; choose with --layers and --heads"
            )
        comfort = min(_COMFORT / n_heads / columns, _COMFORT / n_layers / rows)
        cell = min(_CELL, max(comfort, self._line("label")), room_x / columns, room_y / rows)
        cell = float(int(cell)) if cell >= 1 else cell
        panel = max(1, int(columns * cell)), max(1, int(rows * cell))
        names = self._text("name", self._map.heads), self._text("name", self._map.layers)
        slot = max(panel[0], names[0]), max(panel[1], names[1])
        width = max(_LEAST, left + n_heads * (slot[0] + _GAP) - _GAP + right)
        top = self._header(width - 2 * _MARGIN) + self._line("name") + 4
        height = top + max(n_layers * (slot[1] + _GAP) - _GAP + below, _SCALE[1] + 2 * _MARGIN)
        step = -(-self._line("label") // cell)  # labels must not touch
        return Layout(panel, slot, left, top, (width, height), cell, int(step))

    def losses(self, layout: Layout) -> list[str]:
        found = []
        if layout.cell < 1:
            found.append(
                f"a pixel stands for {1 / layout.cell:.1f} tokens; fewer --layers or --heads, or .html, show them all"
            )
        if layout.every > 1:
            found.append(f"of {layout.every} tokens one is labelled; .html shows each under the mouse")
        if self._lacking:
            letters = ", ".join(sorted(self._lacking)[:5])
            found.append(
                f"the picture's font lacks letters ({letters}), shown by their codes; .html has them"
            )
        return found

    def _header(self, width: int) -> int:
        """The height of title and notes."""
        lines = len(self._wrap("title", self._map.title, width)) * self._line("title")
        notes = sum(len(self._wrap("note", note, width)) for note in self._map.notes)
        return _MARGIN + lines + notes * self._line("note") + _GAP

    def _line(self, font: str) -> int:
        return round(_SIZES[font] * _LINE)

    def _text(self, font: str, texts: Sequence[str]) -> int:
        """The width of the longest."""
        return max(round(self._fonts[font].getlength(text)) for text in texts)

    def _wrap(self, font: str, text: str, width: int) -> list[str]:
        lines = [""]
        for word in self._drawable(text).split():
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and self._text(font, [longer]) > width:
                lines.append(word)
            else:
                lines[-1] = longer
        return lines

    # --- letters -------------------------------------------------------------------------------------------

    def _label(self, token: str) -> str:
        shown = self._drawable(token)
        return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"

    def _drawable(self, text: str) -> str:
        return "".join(letter if self._has(letter) else f"\\u{ord(letter):04x}" for letter in text)

    def _has(self, letter: str) -> bool:
        if letter.isascii() or letter in "·…":
            return True
        self._lacking.add(letter)  # Pillow's own font knows no others
        return False

    # --- ink -----------------------------------------------------------------------------------------------

    def paint(self, image: Image.Image, draw: ImageDraw.ImageDraw, layout: Layout) -> None:
        self._paint_header(draw, layout)
        for row, column in itertools.product(range(len(self._map.layers)), range(len(self._map.heads))):
            place = self._place(layout, row, column)
            self._paint_panel(image, draw, layout, place, (row, column))
            if column == 0:
                self._paint_row_labels(image, draw, layout, place, self._map.layers[row])
            if row == 0:
                centre = place[0] + layout.panel[0] / 2, place[1] - 5
                draw.text(centre, self._map.heads[column], _INK, self._fonts["name"], anchor="ms")
            if row == len(self._map.layers) - 1:
                self._paint_column_labels(image, layout, place)
        self._paint_scale(image, draw, layout)

    def _place(self, layout: Layout, row: int, column: int) -> tuple[int, int]:
        x = layout.left + column * (layout.slot[0] + _GAP) + (layout.slot[0] - layout.panel[0]) // 2
        return x, layout.top + row * (layout.slot[1] + _GAP)

    def _paint_header(self, draw: ImageDraw.ImageDraw, layout: Layout) -> None:
        y, width = _MARGIN, layout.size[0] - 2 * _MARGIN
        for line in self._wrap("title", self._map.title, width):
            draw.text((_MARGIN, y), line, _INK, self._fonts["title"])
            y += self._line("title")
        for line in (line for note in self._map.notes for line in self._wrap("note", note, width)):
            draw.text((_MARGIN, y), line, _GREY, self._fonts["note"])
            y += self._line("note")

    def _paint_panel(
        self,
        image: Image.Image,
        draw: ImageDraw.ImageDraw,
        layout: Layout,
        place: tuple[int, int],
        index: tuple[int, int],
    ) -> None:
        from PIL import Image

        panel = Image.fromarray(colours(self._map.weights[index] / self._darkest))
        how = Image.Resampling.NEAREST if layout.cell >= 1 else Image.Resampling.BOX
        image.paste(panel.resize(layout.panel, how), place)
        x, y = place
        draw.rectangle((x - 1, y - 1, x + layout.panel[0], y + layout.panel[1]), outline=_FRAME)

    def _paint_row_labels(
        self,
        image: Image.Image,
        draw: ImageDraw.ImageDraw,
        layout: Layout,
        place: tuple[int, int],
        name: str,
    ) -> None:
        x, y = place
        for i in range(0, len(self._rows), layout.every):
            edge = x - 7, y + (i + 0.5) * layout.cell
            draw.text(edge, self._rows[i], _INK, self._fonts["label"], anchor="rm")
        self._paint_upright(image, "name", name, (_MARGIN, y + layout.panel[1] / 2), at_top=False)

    def _paint_column_labels(self, image: Image.Image, layout: Layout, place: tuple[int, int]) -> None:
        x, y = place
        for i in range(0, len(self._columns), layout.every):
            left = x + (i + 0.5) * layout.cell - self._line("label") / 2
            self._paint_upright(
                image, "label", self._columns[i], (left, y + layout.panel[1] + 6), at_top=True
            )

    def _paint_upright(
        self, image: Image.Image, font: str, text: str, place: tuple[float, float], *, at_top: bool
    ) -> None:
        """Text that reads upwards, from its left edge; `at_top`: it ends at the place, else it is centred there."""
        from PIL import Image, ImageDraw

        width, height = self._text(font, [text]) + 2, self._line(font)
        mask = Image.new("L", (width, height))
        ImageDraw.Draw(mask).text((width - 1, height / 2), text, 255, self._fonts[font], anchor="rm")
        upright = mask.transpose(Image.Transpose.ROTATE_90)
        y = place[1] if at_top else place[1] - width / 2
        image.paste(_INK, (round(place[0]), round(y)), upright)

    def _paint_scale(self, image: Image.Image, draw: ImageDraw.ImageDraw, layout: Layout) -> None:
        import numpy as np
        from PIL import Image

        width, height = _SCALE
        x = layout.left + len(self._map.heads) * (layout.slot[0] + _GAP) + _GAP
        lowest = -1.0 if self._map.has_negative else 0.0
        shares = np.linspace(1, lowest, height, dtype=np.float32)[:, None].repeat(width, 1)
        image.paste(Image.fromarray(colours(shares)), (x, layout.top))
        draw.rectangle((x - 1, layout.top - 1, x + width, layout.top + height), outline=_FRAME)
        for share in (1.0, (1 + lowest) / 2, lowest):
            y = layout.top + (1 - share) / (1 - lowest) * (height - 1)
            more = "+" if abs(share) == 1 and self._map.peak > self._darkest else ""
            number = f"{share * self._darkest:.2g}{more}"
            draw.text((x + width + 6, y), number, _INK, self._fonts["label"], anchor="lm")


def _font(size: int) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    font = ImageFont.load_default(size)  # it comes with Pillow: the picture is the same everywhere
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font
