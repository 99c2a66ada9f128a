"""What `tfmx attend` draws: a grid of maps over the same tokens, and the colours of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# White to dark blue, and white to dark red for weights below 0 (a module of your own may give them): evenly
# spaced in CIELAB lightness from 100 to 22, so that equal steps of weight look equal.
ABOVE = ("#ffffff", "#d2daee", "#a4b6e0", "#7693cf", "#4872b8", "#13529a", "#003478")
BELOW = ("#ffffff", "#f1d4cc", "#e3a89a", "#cf7e6b", "#b35743", "#913323", "#6c0e05")
_USUAL = 0.995  # the share of weights that has room on the colour scale


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMap:
    """Maps of every chosen layer (a row of the grid) and head (a column), all of one shape."""

    title: str
    notes: tuple[str, ...]  # lines below the title: how to read it, what was left out
    layers: tuple[str, ...]  # names, such as "layer 0"
    heads: tuple[str, ...]  # names, such as "head 3" or "mean"
    rows: tuple[str, ...]  # tokens that look
    columns: tuple[str, ...]  # tokens that are looked at
    weights: npt.NDArray[np.float32]  # (layers, heads, rows, columns)

    @property
    def peak(self) -> float:
        """The largest weight, by its size."""
        return float(abs(self.weights).max()) or 1.0

    def darkest(self) -> float:
        """The weight from which on the colour is the darkest.

        That is the peak, unless few weights come near it: the first token can only look at itself, and where
        a thousand others share their attention, a scale up to its 1 would leave all of them white.
        """
        import numpy as np

        sizes = np.abs(self.weights[self.weights != 0])
        usual = float(np.quantile(sizes, _USUAL)) if sizes.size else 1.0
        return usual if self.peak > 2 * usual else self.peak

    @property
    def has_negative(self) -> bool:
        return bool((self.weights < 0).any())


def colours(shares: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Shares of the darkest weight, cut at -1 and 1, as RGB: (..., 3)."""
    import numpy as np

    shares = shares.clip(-1, 1)
    found = np.empty((*shares.shape, 3), np.uint8)
    for side, anchors in ((shares >= 0, ABOVE), (shares < 0, BELOW)):
        table = np.array([list(bytes.fromhex(anchor[1:])) for anchor in anchors], np.float32)
        place = np.abs(shares[side]) * (len(anchors) - 1)
        low = np.minimum(place.astype(np.int64), len(anchors) - 2)
        part = (place - low)[:, None]
        found[side] = np.rint(table[low] * (1 - part) + table[low + 1] * part)
    return found


def readable(token: str) -> str:
    """A token as a label of one line: blanks and controls become visible."""
    shown = "".join(_VISIBLE.get(letter, letter) for letter in token)
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in shown)


_VISIBLE = {" ": "·", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
