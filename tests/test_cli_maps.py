"""The pictures of `tfmx attend`: even colours, tidy layouts of any size, pages that no token can break."""

from __future__ import annotations

import base64
import html.parser
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from tfmx import InputError
from tfmx.cli.attention_map import ABOVE, BELOW, AttentionMap, colours, readable
from tfmx.cli.map_html import draw_html
from tfmx.cli.map_png import WIDEST, draw_png


def make_map(
    n_layers=2, n_heads=3, rows=5, columns=5, *, token="word", lowest=0.0, **changes
) -> AttentionMap:
    weights = np.random.default_rng(0).uniform(lowest, 1, (n_layers, n_heads, rows, columns))
    fields = {
        "title": "tiny: attention weights",
        "notes": ("what each token (rows) looks at (columns)",),
        "layers": tuple(f"layer {i}" for i in range(n_layers)),
        "heads": tuple(f"head {i}" for i in range(n_heads)),
        "rows": tuple(f"{token}{i}" for i in range(rows)),
        "columns": tuple(f"{token}{i}" for i in range(columns)),
        "weights": weights.astype(np.float32),
    }
    return AttentionMap(**fields | changes)


def open_png(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


# --- colours ---------------------------------------------------------------------------------------------


def lightness(rgb: np.ndarray) -> np.ndarray:
    """CIELAB L*, of sRGB."""
    part = rgb / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    y = linear @ [0.2126, 0.7152, 0.0722]
    return np.where(y > (6 / 29) ** 3, 116 * np.cbrt(y) - 16, y * (29 / 3) ** 3)


@pytest.mark.parametrize("sign", [1, -1])
def test_equal_steps_of_weight_are_equal_steps_of_lightness(sign):
    found = lightness(colours(np.linspace(0, sign, 101, dtype=np.float32)).astype(np.float64))
    assert found[0] == pytest.approx(100, abs=0.1)
    assert np.abs(found - np.linspace(100, 22, 101)).max() < 2


def test_the_ends_and_the_middle_have_their_anchors():
    found = ["#" + bytes(colour).hex() for colour in colours(np.array([-1, 0, 0.5, 1], np.float32))]
    assert found == [BELOW[-1], "#ffffff", ABOVE[3], ABOVE[-1]]


def test_weights_that_few_come_near_do_not_set_the_scale():
    weights = np.full((1, 1, 100, 100), 0.01, np.float32)
    weights[0, 0, 0, 0] = 1
    assert make_map(1, 1, 100, 100, weights=weights).darkest() == pytest.approx(0.01)
    weights[0, 0, :, 0] = 0.9  # a token that all look at is what the scale is for
    assert make_map(1, 1, 100, 100, weights=weights).darkest() == pytest.approx(0.9)
    assert make_map(weights=np.zeros((2, 3, 5, 5), np.float32)).darkest() == 1


@pytest.mark.parametrize(
    ("token", "label"),
    [(" the", "·the"), ("a\n\t\r", "a\\n\\t\\r"), ("\x1b", "\\u001b"), ("日本", "日本"), ("\u2028", "\\u2028"), ("", "")],
)  # fmt: skip
def test_tokens_become_labels_of_one_line(token, label):
    assert readable(token) == label


# --- pictures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "notes"),
    [
        ((1, 1, 1, 1), 0),
        ((2, 3, 5, 5), 0),
        ((1, 1, 2, 40), 0),
        ((1, 1, 40, 2), 0),
        ((4, 12, 70, 70), 1),  # labels are thinned out
        ((1, 4, 1200, 1200), 2),  # and weights share pixels
        ((30, 30, 4, 4), 0),
    ],
)
def test_a_picture_of_any_shape_has_a_size_that_viewers_take(shape, notes):
    content, found = draw_png(make_map(*shape))
    image = open_png(content)
    assert max(image.size) <= WIDEST
    assert len(found) == notes, found


def test_more_maps_than_a_picture_holds_are_refused():
    with pytest.raises(InputError, match=r"1 layers with 100 heads .* --layers and --heads"):
        draw_png(make_map(1, 100, 2, 2))


def test_the_darkest_and_the_lightest_weight_are_where_they_belong():
    weights = np.zeros((1, 1, 2, 2), np.float32)
    weights[0, 0, 0, 1] = 0.25  # the peak of this map, so it has the darkest colour
    found = make_map(1, 1, 2, 2, weights=weights)
    pixels = np.asarray(open_png(draw_png(found)[0]))
    darkest = (pixels == list(bytes.fromhex(ABOVE[-1][1:]))).all(-1)
    columns = darkest.sum(0)
    [left] = np.flatnonzero(columns == 26)[:1]  # a cell of 26 pixels; the scale has one row of it
    top = int(np.flatnonzero(darkest[:, left])[0])
    assert (pixels[top : top + 26, left : left + 26] == pixels[top, left]).all()
    assert (pixels[top + 26 : top + 51, left : left + 25] == 255).all()  # below it
    assert (pixels[top : top + 25, left - 26 : left] == 255).all()  # left of it


def test_weights_below_zero_are_red():
    def red(lowest: float) -> bool:
        pixels = np.asarray(open_png(draw_png(make_map(lowest=lowest))[0])).astype(int)
        return bool((pixels[..., 0] > pixels[..., 2] + 60).any())

    assert red(-1.0)
    assert not red(0.0)


def test_maps_of_nothing_but_zeros_are_white():
    content, _ = draw_png(make_map(weights=np.zeros((2, 3, 5, 5), np.float32)))
    assert open_png(content).size[0] > 100


def test_labels_do_not_touch_and_stay_inside():
    """Ink between two neighbours would join their rows; ink at the edge would be cut."""
    image = open_png(draw_png(make_map(1, 1, 12, 12, token="gMjy|"))[0])
    dark = np.asarray(image.convert("L")) < 128
    for edge in (dark[:8], dark[-8:], dark[:, :8], dark[:, -8:]):
        assert not edge.any()
    left = next(
        x for x in range(image.width) if (np.asarray(image)[:, x] == (0xB4, 0xB8, 0xC0)).all(-1).sum() > 200
    )
    top = int(np.flatnonzero((np.asarray(image)[:, left] == (0xB4, 0xB8, 0xC0)).all(-1))[0])
    gutter = dark[top + 1 : top + 1 + 12 * 26, left - 45 : left].any(1).reshape(12, 26)
    assert gutter.any(1).all()  # each row has its label
    assert not gutter[:, [0, -1]].any()  # which keeps to its own row


def test_letters_that_the_font_lacks_are_codes_and_no_crash():
    content, notes = draw_png(make_map(token="日本語の🎉"))
    assert open_png(content).size[0] > 100
    assert len(notes) == 1
    assert "shown by their codes" in notes[0]


# --- pages -----------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags, self.outside = [], []
        self.feed(content.decode("ascii"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [value for name, value in attrs if name in {"src", "href", "srcset", "action"}]


def page_data(content: bytes) -> dict:
    return json.loads(re.search(rb'<script id="data"[^>]*>(.*?)</script>', content, re.DOTALL)[1])


def test_a_page_holds_the_weights_and_the_tokens():
    found = make_map(lowest=-0.5)
    data = page_data(draw_html(found))
    assert data["rows"] == list(found.rows)
    assert data["heads"] == ["head 0", "head 1", "head 2"]
    shares = np.frombuffer(base64.b64decode(data["shares"]), "<i2").reshape(found.weights.shape)
    np.testing.assert_allclose(shares / 32767 * data["peak"], found.weights, atol=1e-4)


def test_a_page_needs_no_network():
    content = draw_html(make_map())
    assert Page(content).outside == []
    assert b"default-src 'none'" in content
    assert not re.search(rb"https?:|//[a-z]+\.|@import|url\(", content)


@pytest.mark.parametrize(
    "token",
    ["</script><img src=x onerror=alert(1)>", "<!--<script>", "\"'&<>`${1}", "@TITLE@", "@DATA@", "日本\u2028", "\\u003c"],
)  # fmt: skip
def test_no_token_or_title_breaks_a_page(token):
    plain = Page(draw_html(make_map()))
    content = draw_html(make_map(token=token, title=f"{token}: attention", notes=(token,)))
    assert Page(content).tags == plain.tags
    assert content.count(b'"shares"') == 1
    assert page_data(content)["rows"][0] == f"{token}0"
