"""Modules of all three shapes with a declaration of a line each: what they may ask for, what is refused, and pads."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from command_line import tfmx as run
from torch import nn

import tfmx
from tfmx import InputError
from tfmx.export.builder import Builder, serialised
from tfmx.export.own_calls import OwnModule, Packing
from tfmx.export.own_probe import open_own
from tfmx.export.pipeline import ExportOptions, export
from tfmx.export.transposed_products import products_first
from tfmx.runtime.bundle import Bundle, BundleError
from tfmx.runtime.devices import import_onnxruntime
from tfmx.runtime.golden import replay_golden
from tfmx.tfm_model.checks import ConfigError
from tfmx.tfm_model.declarations import (
    classes,
    declared,
    embedding,
    hidden,
    images,
    token_logits,
    tokens,
    values,
    vectors,
)
from tfmx.tfm_model.state import StateTensor
from tfmx.tfm_model.torch_lstm import run_lstm

HEADER = """
import torch
from torch import nn
from tfmx.tfm_model.declarations import *
from tfmx.tfm_model.state import StateTensor
from tfmx.tfm_model.torch_lstm import run_lstm

"""


def exported(tmp_path: Path, text: str, **options: object):
    (tmp_path / "model.py").write_text(
        f"{HEADER}{text}\ndef build():\n    torch.manual_seed(3)\n    return Own()\n"
    )
    parity = export(
        f"{tmp_path / 'model.py'}:build", tmp_path / "bundle", ExportOptions(target="portable", **options)
    )
    assert parity is not None
    assert parity.passed
    return tfmx.load(tmp_path / "bundle")


# --- pads ---------------------------------------------------------------------------------------------------

MASKLESS = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(20, 8), nn.Conv1d(8, 4, 3, padding=1)
    def inputs(self): return tokens(vocab_size=20, length=30)
    def outputs(self): return values(4)
    def forward(self, ids, scale=2.0):
        return self.mix(self.embed(ids).transpose(1, 2)).amax(2) * scale
"""


def test_a_module_that_cannot_see_pads_is_never_given_any(tmp_path) -> None:
    rows = [[1, 2, 3], [4], [5, 6, 7], [8, 9]]
    with exported(tmp_path, MASKLESS) as model:
        graph = model.manifest.graphs["encode"]
        assert [tensor.name for tensor in graph.inputs] == ["input_ids"]
        together = [row["values"] for row in model.apply_batch(rows)]
        apart = [model.apply(row)["values"] for row in rows]
        np.testing.assert_allclose(together, apart, atol=1e-6)
    done = replay_golden(
        Bundle.open(tmp_path / "bundle"), model.device
    )  # and stored inputs without masks are read back
    assert all(case.passed for case in done)
    assert len(done) == 2
    assert "tokens of 20, up to 30; cannot see pads, so different lengths run apart" in run(
        "inspect", tmp_path / "bundle"
    ).out.replace("\n", " ")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_vectors_are_sorted_in_half_precision_too(tmp_path, dtype: str) -> None:
    text = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    def inputs(self): return vectors(features=8, length=30)
    def outputs(self): return values(8)
    def forward(self, x, attention_mask):
        return self.encoder(x, src_key_padding_mask=attention_mask == 0)[:, 0]
"""
    rows = np.random.default_rng(1).standard_normal((2, 7, 8)).astype(np.float32)
    with exported(tmp_path, text, dtype=dtype) as model:
        found = model.apply_batch([rows[0], rows[1][:2]])
        np.testing.assert_allclose(
            found[1]["values"], model.apply(rows[1][:2])["values"], atol=1e-5 if dtype == "fp32" else 1e-2
        )


@pytest.mark.parametrize("computed", [False, True])
def test_a_matrix_is_multiplied_before_a_transpose_also_where_it_gives_an_output(computed: bool) -> None:
    """The other way round, half precision ends onnxruntime 1.31 (SIGSEGV while loading)."""
    builder, x = Builder("g", 18), np.random.default_rng(1).standard_normal((2, 3, 4)).astype(np.float32)
    matrix = np.arange(20, dtype=np.float32).reshape(4, 5)
    given = builder.input("x", ir.DataType.FLOAT, ["B", "T", 4])
    turned = builder.op("Transpose", given, perm=[1, 0, 2])
    weight = builder.const_tensor(matrix.T if computed else matrix)
    y = builder.op("MatMul", turned, builder.op("Transpose", weight, perm=[1, 0]) if computed else weight)
    builder.output(y, "y", ir.DataType.FLOAT, ["T", "B", 5])
    products_first(builder)
    model = builder.model()
    assert [node.op_type for node in model.graph][computed:] == ["MatMul", "Transpose"]
    session = import_onnxruntime().InferenceSession(serialised(model), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["y"], {"x": x})[0], x.transpose(1, 0, 2) @ matrix, rtol=1e-6)


def test_an_lstm_that_projects_is_refused() -> None:
    with pytest.raises(ConfigError, match="proj_size=2, which cannot be run"):
        run_lstm(nn.LSTM(3, 4, proj_size=2), torch.zeros(1, 2, 3), torch.ones(1, 2))


PICKS_THE_FIRST = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(20, 8), nn.Embedding(30, 8)
    def inputs(self): return tokens(vocab_size=20, length=30)
    def outputs(self): return {outputs}
    def forward(self, ids, attention_mask, position_ids):
        assert position_ids.shape == ids.shape
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1])) + position_ids[..., None] / 8
        return {result}
"""


@pytest.mark.parametrize(
    ("outputs", "result", "name"),
    [("embedding(8)", "x[:, 0]", "embedding"), ("hidden(8)", "x", "last_hidden_state")],
)
def test_the_first_column_is_each_rows_first_element_wherever_pads_are(
    tmp_path, outputs, result, name
) -> None:
    rows = [[1, 2, 3, 4, 5], [6], [7, 8]]
    with exported(tmp_path, PICKS_THE_FIRST.format(outputs=outputs, result=result)) as model:
        together = [row[name] for row in model.apply_batch(rows)]
        for row, found in zip(rows, together, strict=True):
            np.testing.assert_allclose(found, model.apply(row)[name], atol=1e-6)
            assert found.shape == ((8,) if result == "x[:, 0]" else (len(row), 8))


def test_packing_puts_real_columns_first_and_back() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]])
    x = torch.arange(15).reshape(3, 5)
    packing = Packing(mask)
    assert packing.pack(x).tolist() == [[1, 3, 4, 0, 2], [5, 6, 7, 8, 9], [13, 10, 11, 12, 14]]
    assert packing.mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert packing.unpack(packing.pack(x), 1).equal(x)
    wide = x[:, None, :, None].expand(3, 2, 5, 4)  # (B, H, T, D)
    packed = packing.pack(wide.transpose(1, 2)).transpose(1, 2)
    assert packing.unpack(packed, 2).equal(wide)


def test_a_manifest_without_a_mask_is_refused_where_batches_are_padded(tmp_path) -> None:
    with exported(tmp_path, RECURRENT) as model:
        manifest = model.manifest
    graph = manifest.graphs["prefill"]
    inputs = tuple(tensor for tensor in graph.inputs if tensor.name != "attention_mask")
    with pytest.raises(BundleError, match="the prefill graph must take attention_mask, or pads would count"):
        replace(manifest, graphs={**manifest.graphs, "prefill": replace(graph, inputs=inputs)})


# --- the three shapes -----------------------------------------------------------------------------------------

RECURRENT = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 6, 2), nn.Linear(6, 2)
    def inputs(self): return vectors(features=3, length=40)
    def outputs(self): return values(2)
    def state_spec(self):
        return tuple(StateTensor(past=f"past_{n}", present=f"present_{n}", shape=("batch_size", 2, 6), growth="constant") for n in "hc")
    def forward(self, x, state, attention_mask):
        y, state = run_lstm(self.lstm, x, attention_mask, tuple(state))
        return self.head(y), list(state)
"""


def test_vectors_and_a_state_make_a_recurrent_regressor(tmp_path) -> None:
    x = np.random.default_rng(1).standard_normal((9, 3)).astype(np.float32)
    with exported(tmp_path, RECURRENT) as model:
        assert model.manifest.kind == "decoder"
        found = model.apply(x)["values"]
    scope: dict = {}
    exec((tmp_path / "model.py").read_text(), scope)
    own = scope["build"]()
    with torch.no_grad():
        wanted = own.head(own.lstm(torch.from_numpy(x)[:, None])[0])[:, 0]
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-6)


@torch.no_grad()
def test_a_bidirectional_lstm_reads_backwards_from_the_last_real_element(tmp_path) -> None:
    text = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, bidirectional=True, bias=False)
    def inputs(self): return vectors(features=3, length=40)
    def outputs(self): return hidden(8)
    def forward(self, x, attention_mask):
        return run_lstm(self.lstm, x, attention_mask)[0]
"""
    random = np.random.default_rng(1)
    rows = [random.standard_normal((length, 3)).astype(np.float32) for length in (7, 2, 5)]
    with exported(tmp_path, text) as model:
        found = [row["last_hidden_state"] for row in model.apply_batch(rows)]
    scope: dict = {}
    exec((tmp_path / "model.py").read_text(), scope)
    own = scope["build"]()
    for row, vectors_found in zip(rows, found, strict=True):
        wanted = own.lstm(torch.from_numpy(row)[:, None])[0][:, 0]
        np.testing.assert_allclose(vectors_found, wanted.numpy(), atol=1e-6)


def test_an_image_has_as_many_elements_as_the_module_gives(tmp_path) -> None:
    text = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
    def inputs(self): return images(3, 8, 12)
    def outputs(self): return hidden(8)
    def forward(self, pixel_values): return self.patches(pixel_values).flatten(2).transpose(1, 2)
"""
    with exported(tmp_path, text) as model:
        assert model.manifest.inputs.length == 6
        assert model.apply(np.zeros((3, 8, 12), np.float32))["last_hidden_state"].shape == (6, 8)


class Stub(nn.Module):
    """What a module says and does, put together for a test."""

    def __init__(self, forward=lambda x: x, inputs=None, outputs=None, spec=None, encode=None, **attributes):
        super().__init__()
        self.forward = forward
        found = {"inputs": inputs, "outputs": outputs, "state_spec": spec}
        attributes |= {name: lambda value=value: value for name, value in found.items() if value is not None}
        attributes |= {"encode": encode} if encode else {}
        for name, value in attributes.items():
            setattr(self, name, value)


TOKENS, VECTORS = tokens(vocab_size=9, length=16), vectors(features=3, length=16)
ZEROS, THREE = torch.zeros, values(3)
SUM = (StateTensor(past="past_sum", present="present_sum", shape=("batch_size", 3), growth="constant"),)
SOURCE = StateTensor(
    past="past.source",
    present="present.source",
    shape=("batch_size", "encoder_sequence_length", 4),
    growth="fixed",
)


def step(x, attention_mask, state):
    return ZEROS(2, x.shape[1], 9), [ZEROS(2, 3)]


def answer(x, attention_mask, state, encoder_attention_mask):
    return ZEROS(2, x.shape[1], 9), []


def source(x, attention_mask):
    return ZEROS(2, x.shape[1], 4), [ZEROS(2, x.shape[1], 4)]


SEQ2SEQ = {
    "forward": answer, "inputs": TOKENS, "outputs": token_logits(9), "spec": (SOURCE,), "encode": source, "max_context": 8
}  # fmt: skip
DECODER = {"forward": step, "inputs": TOKENS, "outputs": token_logits(9), "spec": SUM}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Stub has no state_spec (of a decoder), and no inputs() and outputs() (of an encoder); see tfmx.tfm_model.protocol"),
        ({"inputs": VECTORS}, "Stub has no outputs(); see"),
        ({"inputs": 5, "outputs": values(3)}, "inputs() of Stub gives 5, wanted tokens(...), vectors(...) or images(...)"),
        ({"inputs": VECTORS, "outputs": VECTORS}, "outputs() of Stub gives Elements(kind='vectors'"),
        ({"forward": lambda: 0, "inputs": VECTORS, "outputs": values(3)}, "forward of Stub takes no input"),
        (
            {"forward": lambda x, lengths: x, "inputs": VECTORS, "outputs": values(3)},
            "forward of Stub needs 'lengths', which nothing gives; by name it can ask for attention_mask, position_ids, and",
        ),
        (
            {"forward": lambda x, state: x, "inputs": VECTORS, "outputs": values(3)},
            "forward of Stub needs 'state', which nothing gives",
        ),
        ({"forward": lambda x: None, "inputs": VECTORS, "outputs": values(3)}, "forward of Stub gives None; it must return a tensor"),
        (
            {"forward": lambda x: (x, None), "inputs": VECTORS, "outputs": values(3)},
            "forward of Stub gives a tuple (Tensor, None); it must return a tensor, the output, and nothing else",
        ),
        ({"forward": lambda x: {"logits": x}, "inputs": VECTORS, "outputs": values(3)}, "gives a dict with logits; it must"),
        (
            {"inputs": VECTORS, "outputs": values(4)},
            "forward of Stub gives the shape (2, 5, 3); by outputs() it must be (2, 4) or (2, 5, 4)",
        ),
        ({"inputs": VECTORS, "outputs": embedding(3)}, "gives the shape (2, 5, 3); by outputs() it must be (2, 3)"),
        ({"forward": lambda x: x[:, 0], "inputs": VECTORS, "outputs": hidden(3)}, "gives the shape (2, 3); by outputs() it must be (2, 5, 3)"),
        (
            {"forward": lambda x: x.argmax(-1), "inputs": VECTORS, "outputs": classes(5)},
            "forward of Stub gives a tensor of shape (2, 5) and int64; it must return floating-point numbers",
        ),
        (
            {"forward": lambda x: x @ x, "inputs": VECTORS, "outputs": values(3)},
            "forward of Stub failed on an input of shape (2, 5, 3): RuntimeError: ",
        ),
        (DECODER | {"forward": lambda x, state: x}, "forward of Stub has no parameter 'attention_mask', which a decoder needs"),
        (DECODER | {"forward": lambda x, attention_mask: x}, "forward of Stub has no parameter 'state', which a decoder needs"),
        (DECODER | {"inputs": VECTORS}, "it is a decoder, which cannot take vectors and give tokens"),
        (
            DECODER | {"forward": lambda x, attention_mask, state: ZEROS(2, 5, 9)},
            "forward of Stub gives a tensor of shape (2, 5, 9) and float32; it must return a pair: the output, and a list",
        ),
        (
            DECODER | {"forward": lambda x, attention_mask, state: (ZEROS(2, 5, 9), [ZEROS(2, 4)])},
            "forward of Stub gives present_sum the shape (2, 4), wanted (2, 3) by its state_spec",
        ),
        (DECODER | {"spec": (SOURCE,)}, "state past.source has the growth 'fixed'; a decoder has append or constant"),
        (SEQ2SEQ | {"spec": SUM}, "it has encode, but no state of growth 'fixed', through which its decoder would see the source"),
        (SEQ2SEQ | {"outputs": values(9)}, "outputs() of Stub are values; an encoder-decoder gives token_logits(...)"),
        (SEQ2SEQ | {"max_context": 0}, "max_context is 0, wanted a whole number above 0"),
        (SEQ2SEQ | {"encode": lambda x: source(x, 0)}, "encode of Stub has no parameter 'attention_mask'; it has to leave pads out"),
        (
            SEQ2SEQ | {"forward": lambda x, attention_mask, state: answer(x, 0, 0, 0)},
            "forward of Stub has no parameter 'encoder_attention_mask', which an encoder-decoder needs",
        ),
        (
            SEQ2SEQ | {"encode": lambda x, attention_mask: source(x, 0)[0]},
            "encode of Stub gives a tensor of shape (2, 5, 4) and float32; it must return a pair: the encoder's output, and a list",
        ),
        (
            SEQ2SEQ | {"encode": lambda x, attention_mask: (ZEROS(2, 4, 4), [])},
            "encode of Stub gives (2, 4, 4) for 2 sources, wanted (2, 5, width)",
        ),
        (
            SEQ2SEQ | {"encode": lambda x, attention_mask: (ZEROS(2, 5, 4), [])},
            "encode of Stub returns 0 state tensors, its state_spec has 1",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_module_is_one_line_before_tracing(given, message: str) -> None:
    with pytest.raises(InputError) as caught:
        open_own(Stub(**given))
    assert message in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_asked_for_is_not_passed() -> None:
    asked = {}

    def forward(anything, *, position_ids, other=7, **rest):
        asked.update(position_ids=position_ids, other=other, rest=rest)
        return anything

    own, signature = open_own(Stub(forward=forward, inputs=VECTORS, outputs=values(3)))
    assert not signature.has_mask
    assert asked.pop("position_ids").tolist() == [[0, 1, 2, 3, 4]] * 2
    assert asked == {"other": 7, "rest": {}}
    assert isinstance(own, OwnModule)


def test_what_the_output_covers_is_read_off_the_module() -> None:
    def outputs(forward, answer=THREE, inputs=VECTORS, **rest):
        return open_own(Stub(forward=forward, inputs=inputs, outputs=answer, **rest))[1].outputs

    assert not outputs(lambda x: x).pooled
    assert outputs(lambda x: x.mean(1)).pooled
    assert not outputs(step, token_logits(9), TOKENS, spec=SUM).only_last
    assert outputs(
        lambda x, attention_mask, state: (ZEROS(2, 1, 9), [ZEROS(2, 3)]), token_logits(9), TOKENS, spec=SUM
    ).only_last


def test_a_layer_called_inputs_is_no_declaration() -> None:
    module = Stub(forward=step, spec=SUM, vocab_size=9, max_context=16)
    module.inputs = nn.Linear(2, 2)
    assert open_own(module)[1].inputs == TOKENS


def test_pytorchs_fused_encoder_is_back_on_afterwards() -> None:
    seen = []

    def forward(x):
        seen.append(torch.backends.mha.get_fastpath_enabled())
        return x

    open_own(Stub(forward=forward, inputs=VECTORS, outputs=values(3)))
    assert seen == [False]
    assert torch.backends.mha.get_fastpath_enabled()


def test_somebody_elses_module_is_declared_in_a_line() -> None:
    module = declared(nn.Linear(3, 2), VECTORS, classes(2, labels=("no", "yes")))
    _, signature = open_own(module)
    assert (signature.kind, signature.inputs, signature.outputs.labels) == ("encoder", VECTORS, ("no", "yes"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tokens(vocab_size=0, length=3), "vocab_size is 0, wanted a whole number"),
        (lambda: vectors(features=3, length=2.5), "length is 2.5, wanted a whole number"),
        (lambda: images(3, 8, 8, mean=(0.5,)), "mean has 1 numbers, wanted one for each of 3 channels"),
        (lambda: images(1, 8, 8, std=(0.0,)), "std is 0.0, wanted a finite number above 0"),
        (lambda: classes(2, labels=("a",)), "labels has 1 names, wanted one for each of 2 classes"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_an_encoder_decoder_needs_the_token_that_answers_begin_with(tmp_path) -> None:
    text = """
class Own(nn.Module):
    max_context = 8
    def inputs(self): return tokens(vocab_size=9, length=16)
    def outputs(self): return token_logits(9)
    def state_spec(self):
        return (StateTensor(past="past.s", present="present.s", shape=("batch_size", "encoder_sequence_length", 4), growth="fixed"),)
    def encode(self, ids, attention_mask):
        x = torch.zeros(*ids.shape, 4)
        return x, [x]
    def forward(self, ids, attention_mask, state, encoder_attention_mask):
        return torch.zeros(*ids.shape, 9), []
"""
    with pytest.raises(
        InputError,
        match="decoder_start_token_id None; it is the token that an encoder-decoder's answers begin with",
    ):
        exported(tmp_path, text)
