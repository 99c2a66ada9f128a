"""What the PyTorch module itself must keep before its graphs are compared with it: a right one passes, 27 broken ones fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from broken_encoders import BROKEN_ENCODERS, ENCODER
from broken_modules import BROKEN, GPT, RNN
from command_line import tfmx as tfmx_command
from torch import nn

import tfmx
from tfmx import InputError, TfmxError
from tfmx.export.options import ExportOptions
from tfmx.export.pipeline import export, export_module
from tfmx.export.properties import PropertyError
from tfmx.export.recipe import Quant


def write(folder: Path, text: str) -> str:
    path = folder / "model.py"
    path.write_text(text)
    return f"{path}:build"


@pytest.mark.parametrize("text", [GPT, RNN, ENCODER], ids=["attention", "recurrent", "encoder"])
def test_the_right_module_passes(text: str, tmp_path: Path) -> None:
    parity = export(write(tmp_path, text), tmp_path / "bundle", ExportOptions())
    assert parity is not None
    assert parity.passed


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_module_is_refused_and_told_how_to_mend_it(name: str, tmp_path: Path) -> None:
    broken = BROKEN[name]
    with pytest.raises(TfmxError) as caught:
        export(write(tmp_path, broken.text), tmp_path / "bundle", ExportOptions())
    message = str(caught.value)
    print(message)
    assert broken.way in message.partition(": off by ")[0]
    if isinstance(caught.value, PropertyError):
        assert re.search(r"at element \d+ of row \d+ \((prefill|step) \d+\): off by", message)
    else:
        assert "model.py:" in message  # the user's line
    assert "\n" not in message
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", BROKEN_ENCODERS)
def test_a_broken_encoder_is_refused(name: str, tmp_path: Path) -> None:
    (old, new), way = BROKEN_ENCODERS[name]
    assert old in ENCODER
    with pytest.raises(TfmxError, match=way):
        export(write(tmp_path, ENCODER.replace(old, new)), tmp_path / "bundle", ExportOptions())


REFERENCE = """
    def reference(self, input_ids):
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        order = torch.arange(input_ids.shape[1])
        seen = (order[None] <= order[:, None]) & (order[None] > order[:, None] - WINDOW)
        for block in self.blocks:
            x = block(x, seen[None], *x.new_zeros(2, len(x), HEADS, 0, WIDTH // HEADS))[0]
        return self.head(self.norm(x))

def build"""


def test_the_plain_forward_that_a_module_names_is_compared(tmp_path: Path) -> None:
    text = GPT.replace("\ndef build", REFERENCE)
    parity = export(write(tmp_path, text), tmp_path / "bundle", ExportOptions())
    assert parity is not None
    assert parity.passed
    off_by_one = text.replace("> order[:, None] - WINDOW", "> order[:, None] - WINDOW - 1")
    with pytest.raises(
        PropertyError, match=r"its plain forward `reference` gives another answer .* at element"
    ):
        export(write(tmp_path, off_by_one), tmp_path / "bundle", ExportOptions())


def test_a_reference_that_is_no_function_is_refused(tmp_path: Path) -> None:
    text = GPT.replace("    max_context = 128\n", "    max_context = 128\n    reference = 'forward'\n")
    with pytest.raises(InputError, match="reference of Model is a str, wanted a function or method"):
        export(write(tmp_path, text), tmp_path / "bundle", ExportOptions())


def test_a_module_in_memory_is_exported_and_held_to_the_reference_that_is_given(tmp_path: Path) -> None:
    torch.manual_seed(3)
    bigram = nn.Embedding(11, 11)

    class Bigram(nn.Module):
        vocab_size, max_context = 11, 32

        def __init__(self) -> None:
            super().__init__()
            self.table = bigram

        def state_spec(self) -> tuple[()]:
            return ()

        def forward(self, input_ids, attention_mask, state):
            return self.table(input_ids), []

    def export_with(reference):
        return export_module(Bigram(), tmp_path / "bundle", ExportOptions(), reference=reference)

    parity = export_with(bigram)
    assert parity is not None
    assert parity.passed
    with pytest.raises(PropertyError, match="its plain forward `reference` gives another answer"):
        export_with(lambda ids: bigram(ids.flip(1)))
    assert tfmx.load(tmp_path / "bundle").manifest.source.files == {}


def test_values_that_are_not_finite_are_called_that(tmp_path: Path) -> None:
    text = GPT.replace(
        "return self.head(self.norm(x)), present", "return self.head(self.norm(x)) / 0 * 0, present"
    )
    assert text != GPT
    with pytest.raises(PropertyError, match="gives values that are not finite in float64"):
        export(write(tmp_path, text), tmp_path / "bundle", ExportOptions())


def test_a_module_that_forgot_its_beginning_is_told_so(tmp_path: Path) -> None:
    text = "from torch import nn\nclass Own(nn.Module):\n    def __init__(self):\n        self.x = 1\ndef build():\n    return Own()\n"
    with pytest.raises(InputError, match=r"super\(\).__init__\(\) comes first"):
        export(write(tmp_path, text), tmp_path / "bundle", ExportOptions())


def test_what_a_module_prints_is_no_result(tmp_path: Path) -> None:
    text = ENCODER.replace("        x, real =", "        print('from the module')\n        x, real =")
    assert text != ENCODER
    done = tfmx_command("export", write(tmp_path, text), "-o", tmp_path / "bundle")
    assert done.code == 0, done
    assert "from the module" not in done.out
    assert "from the module" in done.err


def test_an_encoders_table_of_tokens_is_quantised_too(tmp_path: Path) -> None:
    text = (
        ENCODER.replace("nn.Embedding(23, 16)", "nn.Embedding(23, 32)")
        .replace("nn.Linear(16,", "nn.Linear(32,")
        .replace("nn.Linear(32, 16)", "nn.Linear(32, 32)")
    )
    quant = Quant(bits=4, rounding="nearest")
    parity = export(write(tmp_path, text), tmp_path / "bundle", ExportOptions(quant=quant))
    assert parity is not None
    assert parity.passed
    with tfmx.load(tmp_path / "bundle") as model:
        assert model.manifest.quant is not None
        assert model.manifest.quant.matrices["table.weight"] == "int4-32"
