"""What the PyTorch module itself must keep before its graphs are compared with it: a right one passes, 27 broken ones fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from broken_encoders import BROKEN_ENCODERS, ENCODER
from broken_modules import BROKEN, GPT, RNN
from torch import nn

import tfmx
from tfmx import InputError, TfmxError
from tfmx.export.pipeline import ExportOptions, export, export_module
from tfmx.export.properties import PropertyError


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
