"""Manifests of every kind: what cannot be right is refused when it is made or opened, with what is wrong."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import tiny_kinds
from command_line import reseal
from onnx import helper, numpy_helper
from test_bundle import rewrite
from tiny_bundle import write_bundle

import tfmx
from tfmx.runtime.bundle import Bundle, BundleError

KINDS = ("token_classifier", "vector_regressor", "image_classifier", "recurrent_regressor", "encoder_decoder")


@pytest.fixture
def folder(request, tmp_path):
    write = getattr(tiny_kinds, f"write_{request.param}", None)
    write(tmp_path / "b") if write else write_bundle(tmp_path / "b", request.param)
    return tmp_path / "b"


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_a_manifest_survives_writing_and_reading(folder):
    manifest = Bundle.open(folder).manifest
    assert type(manifest).from_bytes(manifest.to_bytes()) == manifest
    assert manifest.format == 3


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_only_an_encoder_decoder_generates(folder):
    manifest = Bundle.open(folder).manifest
    assert manifest.generates == (manifest.kind == "encoder-decoder")
    assert manifest.vocab_size == (40 if manifest.generates else None)


def tensor(content, role, name, side="inputs"):
    return next(t for t in content["graphs"][role][side] if t["name"] == name)


def add(role, side, name, shape, dtype="float32"):
    def change(content):
        content["graphs"][role][side].append({"name": name, "dtype": dtype, "shape": shape})

    return change


def drop(role, side, name):
    def change(content):
        content["graphs"][role][side].remove(tensor(content, role, name, side))

    return change


def put(part, **values):
    def change(content):
        content[part].update(values)

    return change


def state(index, **values):
    def change(content):
        content["state"][index].update(values)

    return change


def shape(role, name, dims, side="inputs"):
    def change(content):
        tensor(content, role, name, side)["shape"] = dims

    return change


FAULTS = [
    ("token_classifier", lambda c: c.update(kind="maker"), r"kind is 'maker', expected 'decoder' or 'encoder'"),
    ("token_classifier", lambda c: c.pop("kind"), r"kind is missing$"),
    ("token_classifier", lambda c: c.update(kind="decoder"), r"outputs of kind decoder cannot be pooled"),
    ("vector_regressor", lambda c: c.update(kind="decoder"), r"graphs are \['encode'\], expected decode and prefill$"),
    ("token_classifier", lambda c: c["graphs"].update(prefill=c["graphs"]["encode"]), r"expected encode$"),
    ("recurrent_regressor", lambda c: c["graphs"].update(select=c["graphs"]["decode"]), r"expected decode and prefill$"),
    ("encoder_decoder", lambda c: c["graphs"].pop("encode"), r"expected decode and encode and prefill \(and select"),
    ("token_classifier", lambda c: c.update(vocab_size=4), r"vocab_size is 4, but the outputs are 4 classes$"),
    ("encoder_decoder", lambda c: c.update(vocab_size=None), r"vocab_size is None, but the outputs are 40 tokens$"),
    ("capacity", lambda c: c["outputs"].update(size=321), r"vocab_size is 320, but the outputs are 321 tokens$"),
    ("token_classifier", lambda c: c.update(max_context=3), r"inputs may be 24 long, but max_context is 3$"),
    # inputs
    ("vector_regressor", put("inputs", vocab_size=3), r"inputs of kind vectors must have features and no others$"),
    ("vector_regressor", put("inputs", features=None), r"inputs of kind vectors must have features and no others$"),
    ("vector_regressor", put("inputs", features=0), r"the sizes of inputs must be at least 1$"),
    ("vector_regressor", put("inputs", features=4), r"the encode graph must take float32 input_features with \[4\] in"),
    ("vector_regressor", put("inputs", length=0), r"the sizes of inputs must be at least 1$"),
    ("image_classifier", put("inputs", std=None), r"inputs of kind images must have image, mean, std and no others$"),
    ("image_classifier", put("inputs", image=[8, 12]), r"an image is channels, height, width, .*; found \[8, 12\], 3 and 3"),
    ("image_classifier", put("inputs", mean=[0.5]), r"found \[3, 8, 12\], 1 and 3$"),
    ("image_classifier", put("inputs", std=[0.5, 0.0, 0.5]), r"mean and std must be finite, and std above 0$"),
    ("image_classifier", put("inputs", image=[3, 8, 8]), r"must take float32 pixel_values with \[3, 8, 8\] in each$"),
    ("image_classifier", add("encode", "inputs", "attention_mask", ["batch_size", 7], "int64"), r"which nothing gives it$"),
    ("token_classifier", put("inputs", kind="texts"), r"inputs\.kind is 'texts', expected"),
    ("token_classifier", shape("encode", "attention_mask", ["batch_size"]), r"take int64 attention_mask of 2 dimensions$"),
    ("recurrent_regressor", shape("prefill", "attention_mask", []), r"take int64 attention_mask of 2 dimensions$"),
    ("append", shape("decode", "position_ids", ["batch_size"]), r"take int64 position_ids of 2 dimensions$"),
    ("append", shape("prefill", "num_logits_to_keep", [1]), r"take int64 num_logits_to_keep of 0 dimensions$"),
    # outputs
    ("recurrent_regressor", shape("prefill", "values", ["batch_size", 0, 2], "outputs"), r"values of the prefill graph has 0 columns"),
    ("append", shape("decode", "logits", ["batch_size", 3, 320], "outputs"), r"logits of the decode graph has 3 columns, expected 1"),
    ("token_classifier", put("outputs", name="scores"), r"outputs of kind classes are named logits, not scores$"),
    ("token_classifier", put("outputs", labels=["a"]), r"outputs have 1 labels for 4 classes$"),
    ("vector_regressor", put("outputs", labels=["a", "b"]), r"outputs have 2 labels for 2 values$"),
    ("token_classifier", put("outputs", size=0, labels=None), r"outputs\.size is 0, it must be at least 1$"),
    ("token_classifier", put("outputs", size=5, labels=None), r"logits of the encode graph must have 5 at its end$"),
    ("token_classifier", put("outputs", pooled=False), r"the encode graph must give float32 logits of 3 dimensions$"),
    ("recurrent_regressor", put("outputs", pooled=True), r"outputs of kind decoder cannot be pooled, only an encoder's$"),
    ("encoder_decoder", put("outputs", pooled=True), r"outputs of kind tokens cannot be pooled$"),
    ("vector_regressor", drop("encode", "outputs", "values"), r"the encode graph must give float32 values of 3 dim"),
    ("encoder_decoder", drop("encode", "outputs", "last_hidden_state"), r"must give float32 last_hidden_state of 3 dim"),
    # graph inputs and outputs that nobody feeds or reads
    ("token_classifier", add("encode", "inputs", "mood", ["batch_size"]), r"the encode graph takes mood, which nothing gives"),
    ("vector_regressor", add("encode", "inputs", "num_logits_to_keep", [], "int64"), r"takes num_logits_to_keep, which"),
    ("recurrent_regressor", add("decode", "inputs", "encoder_attention_mask", ["batch_size", "S"], "int64"), r"which nothing gives"),
    ("token_classifier", add("encode", "outputs", "mood", ["batch_size"]), r"the encode graph gives mood, which nothing reads$"),
    ("token_classifier", shape("encode", "attentions.0", ["batch_size", 2, "T"], "outputs"), r"gives attentions\.0, which"),
    ("token_classifier", add("encode", "outputs", "cross_attentions.0", [1, 2, 3, 4]), r"gives cross_attentions\.0, which"),
    ("encoder_decoder", add("encode", "outputs", "attentions.0", [1, 2, 3, 4]), r"the encode graph gives attentions\.0, which"),
    ("capacity", add("prefill", "outputs", "attentions.0", [1, 2, 3, 4]), r"growth capacity cannot go with attention maps$"),
    ("vector_regressor", drop("encode", "inputs", "input_features"), r"the encode graph must take float32 input_features"),
    ("encoder_decoder", drop("decode", "inputs", "input_ids"), r"the decode graph must take int64 input_ids$"),
    # state
    ("encoder_decoder", drop("prefill", "inputs", "cross.key"), r"the prefill graph lacks cross\.key of the state$"),
    ("encoder_decoder", drop("encode", "outputs", "cross.key"), r"the encode graph lacks cross\.key of the state$"),
    ("encoder_decoder", add("decode", "outputs", "cross.key", ["batch_size", 2, "S", 4]), r"gives cross\.key, which nothing reads$"),
    ("encoder_decoder", state(2, dtype="float16"), r"the prefill graph and the state disagree about cross\.key$"),
    ("encoder_decoder", state(2, shape=["batch_size", 2, 3, 4]), r"state cross\.key of growth fixed has the shape"),
    ("encoder_decoder", state(0, growth="capacity"), r"state mixes growth append and capacity$"),
    ("capacity", state(0, growth="fixed"), r"state mixes growth fixed and capacity$"),
    ("append", state(0, growth="fixed"), r"a decoder alone cannot have state of growth fixed$"),
    ("token_classifier", lambda c: c.update(state=[STATE]), r"an encoder carries no state$"),
    ("capacity", state(0, present="attentions.0"), r"state past_key_values\.0\.key is given as attentions\.0, the name of an attention map$"),
    # generation
    ("encoder_decoder", put("generation", decoder_start_token_id=None), r"decoder_start_token_id is None in a bundle of kind encoder-decoder$"),
    ("append", put("generation", decoder_start_token_id=1), r"decoder_start_token_id is 1 in a bundle of kind decoder$"),
    ("encoder_decoder", put("generation", decoder_start_token_id=40), r"generation names token 40, the vocabulary has 40$"),
    ("image_classifier", put("generation", bos_token_id=0), r"generation names token 0, the vocabulary has 0$"),
]  # fmt: skip
STATE = {"past": "p", "present": "q", "dtype": "float32", "shape": ["batch_size", 4], "growth": "constant"}


@pytest.mark.parametrize(("folder", "change", "line"), FAULTS, indirect=["folder"])
def test_a_manifest_that_cannot_be_right_names_what_is_wrong(folder, change, line):
    rewrite(folder, change)
    with pytest.raises(BundleError, match=line) as caught:
        Bundle.open(folder)
    assert "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_first_format_is_refused(tmp_path):
    write_bundle(tmp_path / "b", "append")
    path = tmp_path / "b" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(
        BundleError, match=r"manifest\.json has format 1, this tfmx reads 3; export it again$"
    ):
        Bundle.open(tmp_path / "b")


@pytest.mark.parametrize(
    ("takes", "gives", "line"),
    [
        ("vectors", "tokens", r"a decoder cannot take vectors and give tokens$"),
        ("images", "values", r"a decoder cannot take images and give values$"),
    ],
)
def test_a_decoder_takes_what_it_can_continue(tmp_path, takes, gives, line):
    from tfmx.runtime.bundle import OutputInfo

    name = "logits" if gives == "tokens" else "values"
    with pytest.raises(BundleError, match=line):
        tiny_kinds.write_kind(
            tmp_path / "b",
            {},
            kind="decoder",
            inputs=tiny_kinds.vector_input() if takes == "vectors" else tiny_kinds.image_input(),
            outputs=OutputInfo(kind=gives, name=name, size=2, pooled=False, labels=None),
            max_context=24,
        )


def test_an_encoder_decoder_gives_tokens(tmp_path):
    from tfmx.runtime.bundle import OutputInfo

    with pytest.raises(BundleError, match=r"an encoder-decoder gives tokens, not values$"):
        tiny_kinds.write_kind(
            tmp_path / "b",
            {},
            kind="encoder-decoder",
            inputs=tiny_kinds.vector_input(),
            outputs=OutputInfo(kind="values", name="values", size=2, pooled=False, labels=None),
            max_context=24,
        )


@pytest.mark.parametrize(
    ("axis", "end", "found"), [(1, 0, r"\[batch_size, 0, 2\]"), (2, 1, r"\[batch_size, T, 1\]")]
)
def test_a_recurrent_graph_whose_output_lacks_columns_or_numbers_is_told(tmp_path, axis, end, found):
    """It declares the shape that the manifest says, and computes another."""
    tiny_kinds.write_recurrent_regressor(tmp_path / "b")
    path = tmp_path / "b" / "prefill.onnx"
    model = onnx.load(path, load_external_data=False)
    giver = next(node for node in model.graph.node if "values" in node.output)
    giver.output[list(giver.output).index("values")] = "whole"
    for name, value in {"begin": 0, "end": end, "axis": axis}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray([value], np.int64), name))
    model.graph.node.append(helper.make_node("Slice", ["whole", "begin", "end", "axis"], ["values"]))
    path.write_bytes(model.SerializeToString())
    reseal(tmp_path / "b")
    with pytest.raises(BundleError, match=rf"its output 'values' is float32 {found}, declared as float32 "):
        tfmx.load(tmp_path / "b", threads=1)
