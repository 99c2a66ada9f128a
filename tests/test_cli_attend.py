"""`tfmx attend`: which maps are drawn, over which tokens, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import re

import numpy as np
import pytest
import tiny_kinds
from command_line import bundle, program_without, tfmx
from PIL import Image
from test_cli_apply import W, kind

import tfmx as package
from tfmx import InputError
from tfmx.cli.attend import choose_heads
from tfmx.cli.attention_source import Maps, patch_labels
from tfmx.runtime.manifest import InputInfo


def make_maps(n_heads: int, head: str = "head") -> Maps:
    weights = np.arange(n_heads, dtype=np.float32)[:, None, None].repeat(2, 1).repeat(2, 2)  # head h is all h
    return Maps(
        title="tiny", shows="it", head=head, layers=[0, 2], rows=["a", "b"], columns=["a", "b"], weights=[weights, weights * 2]
    )  # fmt: skip


def test_all_heads_are_drawn_unless_they_are_many():
    found = choose_heads(make_maps(4), None, is_default=True)
    assert found.heads == ("head 0", "head 1", "head 2", "head 3")
    assert found.layers == ("layer 0", "layer 2")
    assert found.notes == ("it",)
    assert found.weights[1, 3, 0, 0] == 6


def test_of_many_heads_the_mean_and_the_first_few_are_drawn_and_it_says_so():
    found = choose_heads(make_maps(65, "dim"), None, is_default=True)
    assert found.heads == ("mean", "dim 0", "dim 1", "dim 2")
    assert "the mean of 65 dims" in found.notes[1]
    assert found.weights[0, :, 0, 0].tolist() == [32, 0, 1, 2]
    assert len(choose_heads(make_maps(65), None, is_default=False).heads) == 65  # --heads all


def test_chosen_heads_come_in_the_order_given():
    found = choose_heads(make_maps(5), [3, -1, 0], is_default=False)
    assert found.heads == ("head 3", "mean", "head 0")
    assert found.weights[0, :, 0, 0].tolist() == [3, 2, 0]
    with pytest.raises(InputError, match="--heads names 5; there are 5: 0 to 4"):
        choose_heads(make_maps(5), [0, 5], is_default=False)


@pytest.mark.parametrize(
    ("size", "length", "first", "last"),
    [
        ((8, 8), 16, "0,0", "3,3"),
        ((8, 8), 17, "class", "3,3"),
        ((8, 16), 8, "0,0", "1,3"),
        ((8, 16), 9, "class", "1,3"),
        ((8, 8), 1, "0,0", "0,0"),
        ((8, 8), 2, "class", "0,0"),
        ((8, 8), 7, "0", "6"),  # no grid of square patches: numbers
    ],
)
def test_patches_are_named_by_row_and_column(size, length, first, last):
    inputs = InputInfo(
        kind="images", vocab_size=None, features=None, image=(1, *size), mean=(0.5,), std=(0.5,), length=length
    )  # fmt: skip
    found = patch_labels(inputs, length)
    assert (found[0], found[-1], len(found)) == (first, last, length)


# --- the command -----------------------------------------------------------------------------------------


def page(folder, *arguments, out) -> tuple[dict, np.ndarray]:
    """What a page holds, and its weights (layers, heads, rows, columns)."""
    done = tfmx("attend", folder, *arguments, "-o", out)
    assert (done.code, done.out) == (0, ""), done
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', out.read_text(), re.DOTALL)[1])
    shape = [len(data[name]) for name in ("layers", "heads", "rows", "columns")]
    shares = np.frombuffer(base64.b64decode(data["shares"]), "<i2").reshape(shape)
    return data, shares / 32767 * data["peak"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "map.html"


def test_an_encoder_shows_its_tokens_and_weights(out):
    data, weights = page(kind("tokens"), "Hi you", out=out)
    assert data["rows"] == data["columns"] == ["<s>", "H", "i", "·", "y", "o", "u"]
    assert (data["layers"], data["heads"]) == (["layer 0"], ["head 0", "head 1"])
    with package.load(kind("tokens")) as model:
        ids = model.encode("Hi you")
    np.testing.assert_allclose(weights[0], tiny_kinds.token_classes(W, ids)[1], atol=1e-4)


def test_a_decoder_without_tokenizer_shows_ids(out):
    data, weights = page(kind("decoder"), "--ids", "3,4,39", "--heads", "1", out=out)
    assert data["rows"] == ["3", "4", "39"]
    assert data["heads"] == ["head 1"]
    np.testing.assert_allclose(weights[0], tiny_kinds.decoder_logits(W, [3, 4, 39])[1][1:], atol=1e-4)


def test_an_image_shows_patches(out, tmp_path):
    Image.new("RGB", (12, 8), (10, 200, 90)).save(tmp_path / "x.png")
    data, _ = page(kind("images"), tmp_path / "x.png", out=out)
    assert data["columns"] == ["class", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]


def test_an_encoder_decoder_shows_what_its_answer_looked_at(out):
    with package.load(kind("pair")) as model:
        ids = model.encode("Hi")
        answer = tiny_kinds.pair_greedy(W, ids, 5)
        said = [model.tokenizer.decode([token_id]) for token_id in answer]
    found = tiny_kinds.pair_outputs(W, ids, answer[:-1])
    source, limit = ["<s>", "H", "i"], ("--max-tokens", 5)
    data, weights = page(kind("pair"), "Hi", *limit, out=out)
    assert (data["rows"], data["columns"]) == (said, source)
    np.testing.assert_allclose(weights[0], found["cross_attentions.0"], atol=1e-4)
    data, weights = page(kind("pair"), "Hi", *limit, "--of", "self", out=out)
    assert data["rows"] == data["columns"]
    assert data["rows"][1:] == said[:-1]
    np.testing.assert_allclose(weights[0], found["attentions.0"], atol=1e-4)
    data, weights = page(kind("pair"), "Hi", *limit, "--of", "encoder", out=out)
    assert data["rows"] == data["columns"] == source
    np.testing.assert_allclose(weights[0], found["encoder_attentions.0"], atol=1e-4)


def test_a_picture_is_written_and_told(tmp_path):
    done = tfmx("attend", kind("tokens"), "Hi", "-o", tmp_path / "map.png")
    assert (done.code, done.out) == (0, "")
    assert done.err == f"saved to {tmp_path}/map.png: 1 x 2 maps of 3 x 3\n"
    with Image.open(io.BytesIO((tmp_path / "map.png").read_bytes())) as image:
        assert image.format == "PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]


def test_notes_of_a_picture_go_to_stderr(tmp_path):
    done = tfmx("attend", kind("tokens"), "日", "-o", tmp_path / "map.png")
    assert done.code == 0
    assert done.err.startswith("note: the picture's font lacks letters")


@pytest.mark.parametrize(
    ("name", "arguments", "parts"),
    [
        ("vectors", ["x.npy"], ["gives no attention weights", "tfmx export SOURCE -o OUT --attentions all"]),
        ("tokens", ["Hi", "--layers", "1"], ["--layers names 1", "of layers 0"]),
        ("tokens", ["Hi", "--layers", "x"], ["--layers is 'x'", "0,2-4"]),
        ("tokens", ["Hi", "--heads", "0,2"], ["--heads names 2; there are 2: 0 to 1"]),
        ("tokens", ["Hi", "--heads", "most"], ["--heads is 'most'", "all, mean or numbers"]),
        ("tokens", ["Hi", "--of", "self"], ["--of is for encoder-decoders", "kind encoder"]),
        ("decoder", ["--ids", "3", "--max-tokens", "2"], ["--max-tokens is for encoder-decoders"]),
        ("pair", ["Hi", "--max-tokens", "0"], ["max_new_tokens is 0"]),
        ("decoder", ["Hi"], ["no tokenizer"]),
        ("decoder", ["--ids", "40"], ["token 40", "vocabulary of 40"]),
        ("images", ["none.png"], ["none.png", "No such file"]),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_one_line(name, arguments, parts, tmp_path):
    tfmx("attend", kind(name), *arguments, "-o", tmp_path / "map.png").fails(2, *parts)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_without_attention_says_how_to_export_one(tmp_path):
    tfmx("attend", bundle(), "Hi", "-o", tmp_path / "map.png").fails(2, "--attentions all")


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    tfmx("attend", kind("tokens"), "Hi", "-o", tmp_path / "map.jpg").fails(2, ".png or .html")
    tfmx("attend", kind("tokens"), "Hi", "-o", tmp_path / "none" / "map.png").fails(2, "there is no folder")
    tfmx("attend", kind("tokens"), "Hi", "-o", "/proc/map.html").fails(1, "/proc/map.html cannot be written")


def test_no_input_at_a_terminal_is_one_line(tmp_path):
    tfmx("attend", kind("tokens"), "-o", tmp_path / "map.png", terminal="in").fails(2, "there is no input")


def test_without_pillow_a_page_can_be_drawn_and_a_picture_not(tmp_path):
    program_without("PIL", "attend", kind("tokens"), "Hi", "-o", tmp_path / "map.png").fails(
        1, "PIL is not installed", "pip install '.[images]'"
    )
    assert program_without("PIL", "attend", kind("tokens"), "Hi", "-o", tmp_path / "map.html").code == 0
