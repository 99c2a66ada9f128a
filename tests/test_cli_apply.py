"""`tfmx run` on bundles that do not generate: files in, classes and numbers out, and every wrong option told."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_kinds
from command_line import copied, flip, program_without, tfmx, workplace
from PIL import Image

import tfmx as package
from tfmx.cli.apply import output_lines
from tfmx.runtime.manifest import OutputInfo


def lines(kind: str, main: list, *, pooled: bool, labels=None, tokenizer=None) -> list[str]:
    """What is printed for a main output."""
    array = np.array(main, np.float32)
    name = {"classes": "logits", "tokens": "logits", "hidden": "last_hidden_state"}.get(kind, kind)
    outputs = OutputInfo(kind=kind, name=name, size=array.shape[-1], pooled=pooled, labels=labels)
    model = SimpleNamespace(manifest=SimpleNamespace(outputs=outputs), tokenizer=tokenizer)
    return list(output_lines(model, array))


# --- what is printed -------------------------------------------------------------------------------------


def test_classes_of_the_whole_input_come_best_first():
    logits = np.log([0.1, 0.2, 0.4, 0.3])
    assert lines("classes", logits, pooled=True) == ["2  0.4000", "3  0.3000", "1  0.2000", "0  0.1000"]
    labels = ("a", "bb", "a cat", "d")
    assert lines("classes", logits, pooled=True, labels=labels) == [
        "a cat  0.4000",
        "d      0.3000",
        "bb     0.2000",
        "a      0.1000",
    ]


def test_of_many_classes_five_are_shown():
    assert len(lines("classes", np.arange(20), pooled=True)) == 5


def test_classes_of_positions_are_a_line_each():
    found = lines("classes", np.log([[0.25, 0.75], [0.5, 0.5]]), pooled=False, labels=("no", "yes"))
    assert found == ["yes  0.7500", "no  0.5000"]


def test_huge_logits_do_not_overflow():
    assert lines("classes", [3e38, -3e38], pooled=True) == ["0  1.0000", "1  0.0000"]


def test_tokens_of_positions_are_named_by_the_tokenizer():
    tokenizer = SimpleNamespace(token={0: "yes", 1: None}.get)
    found = lines("tokens", np.log([[0.75, 0.25], [0.25, 0.75]]), pooled=False, tokenizer=tokenizer)
    assert found == ["yes  0.7500", "1  0.7500"]


@pytest.mark.parametrize("kind", ["values", "embedding", "hidden"])
def test_numbers_have_six_digits_and_commas(kind):
    assert lines(kind, [1 / 3, -2, 1e-9], pooled=True) == ["0.333333,-2,1e-09"]
    assert lines(kind, [[1, 2], [3, 4.5]], pooled=False) == ["1,2", "3,4.5"]


# --- bundles of every kind -------------------------------------------------------------------------------

W = tiny_kinds.kind_weights()
KINDS = {
    "tokens": tiny_kinds.write_token_classifier,
    "vectors": tiny_kinds.write_vector_regressor,
    "images": tiny_kinds.write_image_classifier,
    "recurrent": tiny_kinds.write_recurrent_regressor,
    "decoder": tiny_kinds.write_showing_decoder,
    "pair": tiny_kinds.write_encoder_decoder,
}


@functools.cache
def kind(name: str) -> Path:
    folder = workplace() / "kinds" / name
    KINDS[name](folder)
    return folder


@pytest.fixture
def vectors(tmp_path):
    array = np.random.default_rng(1).standard_normal((4, 3))
    np.save(tmp_path / "x.npy", array)
    rows = [",".join(map(repr, row)) for row in array.tolist()]
    (tmp_path / "x.csv").write_text("\n".join(["a,b,c", *rows]))
    return array


def numbers(text: str) -> np.ndarray:
    return np.array([[float(cell) for cell in line.split(",")] for line in text.splitlines()])


def test_an_encoder_over_tokens_takes_text_or_ids():
    with package.load(kind("tokens")) as model:
        ids = model.encode("Hello")
    logits, _ = tiny_kinds.token_classes(W, ids)
    order = np.argsort(-logits)
    done = tfmx("run", kind("tokens"), "Hello")
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()] == [tiny_kinds.LABELS[i] for i in order]
    for arguments in (["--ids", ",".join(map(str, ids))], ["-"]):
        assert tfmx("run", kind("tokens"), *arguments, stdin=b"Hello\n").out == done.out


@pytest.mark.parametrize("name", ["vectors", "recurrent"])
def test_vectors_come_from_npy_and_csv(name, vectors, tmp_path):
    reference = {"vectors": tiny_kinds.vector_values, "recurrent": tiny_kinds.running_values}[name]
    done = tfmx("run", kind(name), tmp_path / "x.npy")
    assert (done.code, done.err) == (0, "")
    np.testing.assert_allclose(numbers(done.out), reference(W, vectors), rtol=1e-4, atol=1e-4)
    assert tfmx("run", kind(name), tmp_path / "x.csv").out == done.out
    assert tfmx("run", kind(name), "--file", tmp_path / "x.csv").out == done.out


def test_an_image_is_brought_to_its_size_and_it_says_so(tmp_path):
    pixels = np.random.default_rng(2).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    normal = (pixels / 255 - tiny_kinds.MEAN) / tiny_kinds.STD
    logits, _ = tiny_kinds.image_classes(W, normal.transpose(2, 0, 1))
    done = tfmx("run", kind("images"), tmp_path / "x.png")
    assert (done.code, done.err) == (0, "")
    assert done.out.split()[0] == tiny_kinds.LABELS[int(logits.argmax())]
    Image.fromarray(pixels).resize((24, 16)).save(tmp_path / "large.png")
    done = tfmx("run", kind("images"), tmp_path / "large.png")
    assert (done.code, done.err) == (0, f"{tmp_path}/large.png: 24 x 16 pixels, resized to 12 x 8\n")
    assert tfmx("run", kind("images"), tmp_path / "large.png", "-q").err == ""


def test_an_encoder_decoder_answers_a_source():
    with package.load(kind("pair")) as model:
        ids = model.encode("Hello")
    wanted = tiny_kinds.pair_greedy(W, ids, 6)
    found = json.loads(tfmx("run", kind("pair"), "Hello", "--json", "--max-tokens", 6).out)
    assert found["token_ids"] == wanted
    done = tfmx("run", kind("pair"), "--ids", ",".join(map(str, ids)), "--max-tokens", 6)
    assert done.out == found["text"] + "\n"


def test_json_has_every_output():
    done = tfmx("run", kind("tokens"), "--ids", "5,6,7", "--json")
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    found = json.loads(done.out)
    logits, maps = tiny_kinds.token_classes(W, [5, 6, 7])
    assert (found["kind"], found["output"], found["device"]) == ("classes", "logits", "cpu")
    assert found["labels"] == list(tiny_kinds.LABELS)
    np.testing.assert_allclose(found["outputs"]["logits"], logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["outputs"]["attentions.0"], maps, atol=1e-5)


def test_outputs_are_saved_as_arrays(tmp_path):
    logits, maps = tiny_kinds.token_classes(W, [5, 6, 7])
    done = tfmx("run", kind("tokens"), "--ids", "5,6,7", "-o", tmp_path / "x.npy")
    assert (done.code, done.out) == (0, "")
    assert done.err == f"saved to {tmp_path}/x.npy: logits (4)\n"
    found = np.load(tmp_path / "x.npy")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    done = tfmx("run", kind("tokens"), "--ids", "5,6,7", "--out", tmp_path / "x.npz", "-q")
    assert (done.code, done.out, done.err) == (0, "", "")
    with np.load(tmp_path / "x.npz") as arrays:
        assert arrays.files == ["logits", "attentions.0"]
        np.testing.assert_allclose(arrays["attentions.0"], maps, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "x.npz"]


@pytest.mark.parametrize(
    ("name", "arguments", "parts"),
    [
        ("tokens", ["Hi", "--max-tokens", "3"], ["--max-tokens is for bundles that generate", "gives classes"]),
        ("tokens", ["Hi", "--temperature", "0"], ["--temperature is for bundles that generate"]),
        ("tokens", ["Hi", "--stop", "x"], ["--stop is for bundles that generate"]),
        ("tokens", ["Hi", "--chat"], ["--chat is for bundles that generate"]),
        ("tokens", ["--chat"], ["--chat is for bundles that generate"]),
        ("tokens", ["Hi", "--system", "x"], ["--system is for bundles that generate"]),
        ("tokens", ["Hi", "--json", "-o", "x.npy"], ["--json prints and --out saves"]),
        ("tokens", ["Hi", "-o", "x.csv"], ["--out is 'x.csv'", ".npy or .npz"]),
        ("tokens", ["Hi", "-o", "/no/such/x.npy"], ["there is no folder /no/such"]),
        ("tokens", ["x" * 200], ["201 tokens", "holds 24"]),
        ("tokens", ["--ids", "260"], ["token 260 at place 0", "vocabulary of 260"]),
        ("tokens", [""], ["is empty"]),
        ("vectors", [], ["takes vectors; give a .npy or .csv file"]),
        ("vectors", ["Hello"], ["Hello", "ends in .npy or .csv"]),
        ("vectors", ["--ids", "1,2"], ["--ids is for bundles that take tokens", "vectors"]),
        ("vectors", ["a.npy", "--file", "b.npy"], ["given twice"]),
        ("vectors", ["none.csv"], ["none.csv cannot be read", "No such file"]),
        ("images", [], ["takes images; give an image file"]),
        ("images", ["none.png"], ["none.png", "No such file"]),
        ("images", ["--ids", "1"], ["--ids is for bundles that take tokens", "images"]),
        ("images", ["x.png", "--top-k", "3", "--temperature", "1"], ["is for bundles that generate"]),
        ("recurrent", ["x.npy", "--max-tokens", "3"], ["--max-tokens is for bundles that generate", "gives values"]),
        ("decoder", ["--ids", "3", "-o", "x.npy"], ["--out is for bundles that do not generate"]),
        ("pair", ["Hi", "-o", "x.npz"], ["--out is for bundles that do not generate"]),
        ("pair", ["Hi", "--chat"], ["no chat template"]),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_line(name, arguments, parts):
    tfmx("run", kind(name), *arguments).fails(2, *parts)


def test_no_input_at_a_terminal_is_one_line():
    done = tfmx("run", kind("tokens"), terminal="in")
    done.fails(2, "there is no prompt")
    assert "--chat" not in done.err


@pytest.mark.parametrize(
    ("array", "parts"),
    [
        (np.ones((4, 2)), ["shape (4, 2)", "(T, 3)"]),
        (np.ones(3), ["shape (3,)", "(T, 3)"]),
        (np.ones((0, 3)), ["is empty"]),
        (np.ones((25, 3)), ["25 positions", "at most 24"]),
        (np.full((2, 3), np.nan), ["not finite", "(0, 0)"]),
        (np.full((2, 3), 1e300), ["not finite"]),
    ],
)
def test_vectors_that_do_not_fit_are_one_line(array, parts, tmp_path):
    np.save(tmp_path / "x.npy", array)
    tfmx("run", kind("vectors"), tmp_path / "x.npy").fails(2, *parts)


def test_a_file_that_is_no_image_is_one_line(tmp_path):
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    tfmx("run", kind("images"), tmp_path / "x.png").fails(2, "x.png")
    (tmp_path / "x.txt").write_text("hello")
    tfmx("run", kind("images"), tmp_path / "x.txt").fails(2, "x.txt is no image")


def test_options_are_refused_before_weights_are_read():
    with copied(kind("tokens")) as folder:
        flip(folder / "tokenizer.json", 50)
        tfmx("run", folder, "Hi", "--chat").fails(2, "--chat is for bundles that generate")
        tfmx("run", folder, "Hi").fails(1, "tokenizer.json was changed")


def test_a_model_that_gives_no_numbers_is_one_line(tmp_path):
    tiny_kinds.write_token_classifier(
        tmp_path / "nan", weights=W | {"classes": np.full_like(W["classes"], np.inf)}
    )
    for option in ([], ["--json"], ["-o", tmp_path / "x.npy"]):
        tfmx("run", tmp_path / "nan", "Hi", *option).fails(1, "logits", "not finite")
    assert not (tmp_path / "x.npy").exists()


def test_images_without_pillow_are_one_line(tmp_path):
    Image.new("RGB", (12, 8)).save(tmp_path / "x.png")
    program_without("PIL", "run", kind("images"), tmp_path / "x.png").fails(2, "pip install '.[images]'")
    assert program_without("PIL", "run", kind("tokens"), "Hi").code == 0


# --- inspect and verify ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("tokens", ["kind encoder", "inputs tokens of 260, up to 24", "context 24 positions",
                    "outputs classes, 4 numbers (logits) for the whole input: cat, dog, owl, yak"]),
        ("vectors", ["inputs vectors of 3 numbers, up to 24", "outputs values, 2 numbers (values) for each position"]),
        ("images", ["inputs images of 3 x 8 x 12 (channels, height, width), 7 positions",
                    "pixels (value / 255 - mean) / std, mean 0.5, 0.4, 0.3, std 0.2, 0.25, 0.5"]),
        ("recurrent", ["kind decoder", "constant state: of one shape for ever", "state of one sequence 32 B"]),
        ("decoder", ["append state: each step's columns are put behind it", "cache of one sequence, a token 64 B"]),
        ("pair", ["kind encoder-decoder", f"vocabulary 40 tokens; start token {tiny_kinds.START}, end tokens {tiny_kinds.END}", "context 20 tokens",
                  "fixed state: computed once by encode, then only read", "cross.key float32 [batch_size, 2, S, 4]",
                  "keys and values of one source, 24 positions 1.5 KB"]),
    ],
)  # fmt: skip
def test_inspect_shows_every_kind(name, wanted):
    done = tfmx("inspect", kind(name))
    assert (done.code, done.err) == (0, "")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    for line in wanted:
        assert line in lines
    assert max(map(len, done.out.splitlines()[1:])) <= 100


def golden(**arrays: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.savez(content, **{f"case.{name}": array for name, array in arrays.items()})
    return content.getvalue()


@pytest.mark.parametrize(("offset", "code"), [(0.0, 0), (0.1, 1)])
def test_verify_replays_every_kind(offset, code, tmp_path):
    ids, mask = np.array([[5, 6, 7]]), np.ones((1, 3), np.int64)
    own = {"input_ids": ids, "attention_mask": mask, "budget": np.float32(1e-3)}
    classes = tiny_kinds.token_classes(W, ids[0])[0][None]
    tiny_kinds.write_token_classifier(tmp_path / "tokens", golden=golden(**own, expected=classes + offset))
    logits = tiny_kinds.pair_outputs(W, ids[0], [9, 8])["logits"][:, None]  # (T, B, size)
    decoded = {"target_ids": np.array([[tiny_kinds.START]]), "decode_ids": np.array([[9], [8]])}
    tiny_kinds.write_encoder_decoder(
        tmp_path / "pair", golden=golden(**own, **decoded, expected=logits + offset)
    )
    for name, steps in (("tokens", "1"), ("pair", "3")):
        done = tfmx("verify", tmp_path / name)
        assert done.code == code, done
        assert done.out.splitlines()[2].split()[:2] == ["case", steps]
