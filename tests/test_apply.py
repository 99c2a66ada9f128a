"""`Model.apply`: every kind of bundle against numpy, alone and in ragged batches, and inputs that cannot be used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_kinds
from tiny_bundle import reference_logits, tiny_weights, write_bundle
from tiny_kinds import (
    CONTEXT,
    FEATURES,
    IMAGE,
    LENGTH,
    TARGETS,
    decoder_logits,
    fused_values,
    image_classes,
    kind_weights,
    pair_outputs,
    running_values,
    token_classes,
    vector_values,
)

import tfmx
from tfmx import InputError
from tfmx.runtime import append_engine, capacity_engine
from tfmx.runtime.engine import open_engine
from tfmx.runtime.tokenizer import PromptError

W = kind_weights()
RNG = np.random.default_rng(3)
IDS = [[5, 9, 17, 3, 22], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
VECTORS = [RNG.standard_normal((T, FEATURES)) for T in (4, 1, 9)]
IMAGES = [RNG.standard_normal(IMAGE) for _ in range(3)]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """A loaded model of each kind, by the name of the function that writes it."""
    models, folder = {}, tmp_path_factory.mktemp("kinds")
    for name in (
        "token_classifier",
        "vector_regressor",
        "image_classifier",
        "recurrent_regressor",
        "showing_decoder",
        "encoder_decoder",
    ):
        getattr(tiny_kinds, f"write_{name}")(folder / name)
        models[name] = tfmx.load(folder / name, threads=1)
    return models


def close(found, expected, allowed=2e-5):
    found = np.asarray(found)
    assert found.shape == np.shape(expected)
    assert np.abs(found.astype(np.float64) - expected).max() <= allowed


# --- encoders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", IDS)
def test_an_encoder_over_tokens_gives_classes_and_its_attention(bundles, ids):
    found = bundles["token_classifier"].apply(ids)
    logits, maps = token_classes(W, ids)
    assert list(found) == ["logits", "attentions.0"]
    close(found["logits"], logits)
    close(found["attentions.0"], maps)
    assert found["logits"].dtype == np.float32


def test_a_text_is_encoded_as_a_prompt_is(bundles):
    model = bundles["token_classifier"]
    close(model.apply("Hi you")["logits"], token_classes(W, model.encode("Hi you"))[0])


def test_a_ragged_batch_gives_each_row_what_it_gets_alone(bundles):
    for found, ids in zip(bundles["token_classifier"].apply_batch(IDS), IDS, strict=True):
        logits, maps = token_classes(W, ids)
        close(found["logits"], logits)
        close(found["attentions.0"], maps)  # without the columns and rows of pads
    for found, vectors in zip(bundles["vector_regressor"].apply_batch(VECTORS), VECTORS, strict=True):
        close(found["values"], vector_values(W, vectors))


def test_a_set_without_positions_is_permutation_equivariant(bundles):
    order = [3, 1, 0, 2]
    model = bundles["vector_regressor"]
    close(model.apply(VECTORS[0][order])["values"], model.apply(VECTORS[0])["values"][order])


def test_vectors_may_be_whole_numbers_or_lists(bundles):
    rows = [[1, 2, 3], [4, 5, 6]]
    close(bundles["vector_regressor"].apply(rows)["values"], vector_values(W, rows), 1e-4)
    close(
        bundles["vector_regressor"].apply(np.asarray(rows, np.int32))["values"], vector_values(W, rows), 1e-4
    )


def test_a_batch_may_be_one_array(bundles):
    batch = RNG.standard_normal((3, 5, FEATURES))
    for found, vectors in zip(bundles["vector_regressor"].apply_batch(batch), batch, strict=True):
        close(found["values"], vector_values(W, vectors))


def test_half_precision_vectors_are_given_as_the_graph_takes_them(tmp_path):
    tiny_kinds.write_vector_regressor(tmp_path / "b", dtype="fp16")
    model = tfmx.load(tmp_path / "b", threads=1)
    found = model.apply(VECTORS[2])["values"]
    assert found.dtype == np.float32
    close(found, vector_values(W, VECTORS[2]), 0.1)  # values reach 10; float16 has 11 bits
    with pytest.raises(InputError, match=r"^the input is not finite in float16 at \(0, 1\): 70000\.0$"):
        model.apply([[0.0, 7e4, 0.0]])


def test_images_as_arrays_give_classes_and_attention_with_the_class_token(bundles):
    for found, image in zip(bundles["image_classifier"].apply_batch(IMAGES), IMAGES, strict=True):
        logits, maps = image_classes(W, image)
        close(found["logits"], logits, 5e-5)
        close(found["attentions.0"], maps)


def test_an_encoder_opens_one_session(bundles):
    assert set(bundles["image_classifier"]._graphs._sessions) == {"encode"}


# --- decoders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_a_recurrent_regressor_gives_a_value_for_each_position(bundles, chunk, monkeypatch):
    monkeypatch.setattr(append_engine, "CHUNK", chunk)
    for found, vectors in zip(bundles["recurrent_regressor"].apply_batch(VECTORS), VECTORS, strict=True):
        assert list(found) == ["values"]
        close(found["values"], running_values(W, vectors))


@pytest.mark.parametrize("chunk", [2, 512])
def test_a_graph_that_gives_the_last_position_gives_one_row(tmp_path, chunk, monkeypatch):
    monkeypatch.setattr(append_engine, "CHUNK", chunk)
    tiny_kinds.write_recurrent_regressor(tmp_path / "b", last_only=True)
    found = tfmx.load(tmp_path / "b", threads=1).apply(VECTORS[2])["values"]
    close(found, running_values(W, VECTORS[2])[-1:])


@pytest.mark.parametrize("chunk", [2, 512])
@pytest.mark.parametrize("last_only", [False, True])
def test_a_cache_of_fixed_capacity_takes_vectors_too(tmp_path, last_only, chunk, monkeypatch):
    monkeypatch.setattr(capacity_engine, "CHUNK", chunk)
    tiny_kinds.write_fused_regressor(tmp_path / "b", last_only=last_only)
    model = tfmx.load(tmp_path / "b", threads=1)
    expected = fused_values(W, VECTORS[2])
    close(model.apply(VECTORS[2])["values"], expected[-1:] if last_only else expected)
    graphs = model._graphs
    assert isinstance(open_engine(graphs, 1, 1), capacity_engine.CapacityEngine)
    check_steps(open_engine(graphs, len(VECTORS), 1), fused_values)


def test_a_recurrent_engine_takes_vectors_step_by_step(bundles):
    check_steps(open_engine(bundles["recurrent_regressor"]._graphs, len(VECTORS), 1), running_values)


def check_steps(engine, reference):
    """Ragged rows of vectors, then one vector more for each row, twice; a row is dropped between."""
    rows = list(VECTORS)
    found = engine.prefill(rows).numpy()
    for step in range(2):
        close(found, [reference(W, row)[-1] for row in rows])
        if step == 1:
            engine.keep([0, 2])
            rows = [rows[0], rows[2]]
        new = RNG.standard_normal((len(rows), FEATURES))
        rows = [np.vstack((row, more)) for row, more in zip(rows, new, strict=True)]
        found = engine.decode(new).numpy()
    close(found, [reference(W, row)[-1] for row in rows])


@pytest.mark.parametrize("chunk", [1, 2, 4, 512])
def test_attention_maps_are_whole_whatever_the_chunk(bundles, chunk, monkeypatch):
    monkeypatch.setattr(append_engine, "CHUNK", chunk)
    found = bundles["showing_decoder"].apply(IDS[2])
    logits, maps = decoder_logits(W, IDS[2])
    close(found["logits"], logits, 5e-5)
    close(found["attentions.0"], maps)
    assert (found["attentions.0"] == np.tril(found["attentions.0"])).all()  # the future is 0


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_a_language_model_can_be_applied_too(flavour, tmp_path):
    write_bundle(tmp_path / "b", flavour)
    found = tfmx.load(tmp_path / "b", threads=1).apply([5, 9, 17, 3])
    assert list(found) == ["logits"]
    close(found["logits"], reference_logits(tiny_weights(), [5, 9, 17, 3]), 3e-5)


# --- encoder-decoders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [None, [], [4], [4, 8, 15, 16, 23]])
@pytest.mark.parametrize("chunk", [2, 512])
def test_an_encoder_decoder_gives_the_outputs_of_both_sides(bundles, target, chunk, monkeypatch):
    monkeypatch.setattr(append_engine, "CHUNK", chunk)
    found = bundles["encoder_decoder"].apply(IDS[0], target=target)
    expected = pair_outputs(W, IDS[0], target or [])
    assert set(found) == set(expected)
    for name, array in expected.items():
        close(found[name], array, 5e-5)


def test_each_source_of_a_batch_has_its_target(bundles):
    targets = [[3], [4, 5], []]
    for found, source, target in zip(
        bundles["encoder_decoder"].apply_batch(IDS, targets=targets), IDS, targets, strict=True
    ):
        close(found["logits"], pair_outputs(W, source, target)["logits"], 5e-5)


# --- what cannot be used ---------------------------------------------------------------------------------

NOT_FINITE = np.ones((2, FEATURES))
NOT_FINITE[1, 2] = np.nan


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "vector_regressor",
            np.ones((4, 2)),
            r"^the input has the shape \(4, 2\), this bundle takes \(T, 3\)$",
        ),
        ("vector_regressor", np.ones(3), r"^the input has the shape \(3,\), this bundle takes \(T, 3\)$"),
        ("vector_regressor", np.ones((1, 4, 3)), r"^the input has the shape \(1, 4, 3\)"),
        ("vector_regressor", 1.5, r"^the input has the shape \(\), this bundle takes \(T, 3\)$"),
        ("vector_regressor", np.ones((0, 3)), r"^the input is empty$"),
        ("vector_regressor", [], r"^the input is empty$"),
        ("vector_regressor", NOT_FINITE, r"^the input is not finite in float32 at \(1, 2\): nan$"),
        (
            "vector_regressor",
            np.full((2, 3), 1e60),
            r"^the input is not finite in float32 at \(0, 0\): 1e\+60$",
        ),
        (
            "vector_regressor",
            [[1, 2, 3], [4, 5]],
            r"^the input cannot be made an array; this bundle takes numbers",
        ),
        ("vector_regressor", "some text", r"^the input holds <U9; this bundle takes numbers, \(T, 3\)$"),
        (
            "vector_regressor",
            np.ones((2, 3), complex),
            r"^the input holds complex128; this bundle takes numbers",
        ),
        ("vector_regressor", [[None] * 3], r"^the input holds object; this bundle takes numbers"),
        (
            "vector_regressor",
            np.ones((LENGTH + 1, 3)),
            r"^the input has 25 positions, this bundle takes at most 24$",
        ),
        (
            "recurrent_regressor",
            np.ones((CONTEXT + 1, 3)),
            r"^the input has 21 positions, this bundle takes at most 20$",
        ),
        ("token_classifier", [], r"^the input is empty$"),
        (
            "token_classifier",
            [1, 260],
            r"^token 260 at place 1 of the input is outside the vocabulary of 260$",
        ),
        ("token_classifier", [-1], r"^token -1 at place 0 of the input is outside the vocabulary of 260$"),
        ("token_classifier", [1, 2.5], r"^the input has 2\.5 at place 1, where a token id must be$"),
        ("token_classifier", [[1, 2]], r"^the input has \[1, 2\] at place 0, where a token id must be$"),
        ("token_classifier", 7, r"^the input must be a text or token ids, not int$"),
        ("token_classifier", [1] * 25, r"^the input has 25 tokens, the context holds 24; shorten it$"),
        (
            "token_classifier",
            "x" * 2000,
            r"^the prompt has at least \d+ tokens, the context holds 24; shorten it$",
        ),
        (
            "image_classifier",
            np.ones((8, 12, 3)),
            r"^the input has the shape \(8, 12, 3\), this bundle takes channels",
        ),
        (
            "image_classifier",
            np.ones(IMAGE, np.uint8),
            r"^the input holds uint8; this bundle takes a path, a Pillow",
        ),
        (
            "image_classifier",
            np.full(IMAGE, np.inf),
            r"^the input is not finite in float32 at \(0, 0, 0\): inf$",
        ),
        ("encoder_decoder", [300], r"^token 300 at place 0 of the input is outside the vocabulary of 260$"),
    ],
)
def test_an_input_that_cannot_be_used_is_one_clear_line(bundles, name, value, line):
    with pytest.raises(InputError, match=line) as caught:
        bundles[name].apply(value)
    assert "\n" not in str(caught.value)


def test_in_a_batch_the_bad_input_is_named(bundles):
    with pytest.raises(InputError, match=r"^input 1 has the shape \(4, 2\)"):
        bundles["vector_regressor"].apply_batch([VECTORS[0], np.ones((4, 2))])
    with pytest.raises(InputError, match=r"^there are no inputs$"):
        bundles["vector_regressor"].apply_batch([])


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (
            [TARGETS],
            r"^token 40 at place 1 of the target \(with its start token\) is outside the vocabulary of 40$",
        ),
        ([3] * CONTEXT, r"has 21 tokens, the context holds 20; shorten it$"),
        (["a"], r"^the target has 'a' at place 0, where a token id must be$"),
    ],
)
def test_a_target_that_cannot_be_used_is_one_clear_line(bundles, target, line):
    with pytest.raises(PromptError, match=line):
        bundles["encoder_decoder"].apply([5], target=target)


def test_a_target_needs_an_encoder_decoder_and_an_input(bundles):
    with pytest.raises(
        InputError, match=r"^a target is for an encoder-decoder; this bundle is an encoder that takes"
    ):
        bundles["token_classifier"].apply([5], target=[1])
    with pytest.raises(InputError, match=r"^there are 2 inputs and 1 targets$"):
        bundles["encoder_decoder"].apply_batch([[5], [6]], targets=[[1]])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("token_classifier", "an encoder that takes tokens and gives classes"),
        ("vector_regressor", "an encoder that takes vectors and gives values"),
        ("image_classifier", "an encoder that takes images and gives classes"),
        ("recurrent_regressor", "a decoder that takes vectors and gives values"),
    ],
)
def test_what_does_not_generate_says_so(bundles, name, what):
    model, line = bundles[name], rf"^this bundle is {what}: it does not generate; call apply$"
    for call in (
        lambda: model.generate([1]),
        lambda: model.stream_batch([[1]]),
        lambda: model.generate_batch([[1]]),
        lambda: model.chat([{"role": "user", "content": "Hi"}]),
        lambda: model.logits([1]),
    ):
        with pytest.raises(InputError, match=line):
            call()


def test_a_closed_model_cannot_be_applied(tmp_path):
    tiny_kinds.write_vector_regressor(tmp_path / "b")
    with tfmx.load(tmp_path / "b", threads=1) as model:
        model.apply(VECTORS[0])
    with pytest.raises(tfmx.TfmxError, match=r"^the model b was closed; load it again$"):
        model.apply(VECTORS[0])


def test_one_feature_may_be_given_flat(bundles):
    from tfmx.runtime.inputs import InputReader

    manifest = bundles["vector_regressor"].manifest
    reader = InputReader(manifest, None)
    reader.info = replace(manifest.inputs, features=1)
    assert reader.read([1.5, 2, 3]).tolist() == [[1.5], [2], [3]]
