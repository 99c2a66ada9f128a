"""Anybody's linear layers quantised, and own bundles held against their source again: `--quant`, `verify --against`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import tfmx.export.quantiser as quantiser_module
from tfmx import InputError, TfmxError
from tfmx.cli.entry import group
from tfmx.export.layout import SCALES, packed
from tfmx.export.options import ExportOptions
from tfmx.export.parity import ParityError
from tfmx.export.pipeline import export
from tfmx.export.recipe import Quant
from tfmx.export.verify import verify_against
from tfmx.runtime.bundle import Bundle

EXAMPLE = Path(__file__).parents[1] / "examples" / "own" / "gpt.py"

# What goes by `nn.Linear`, `F.linear` and a table that is the head too, and what does not: positions, PyTorch's own attention
MIXED = """
import torch
from torch import nn
from torch.nn import functional as F
from tfmx.tfm_model.state import StateTensor

class Mixed(nn.Module):
    vocab_size = 8192
    max_context = 24
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(8192, 32), nn.Embedding(24, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True, dropout=0.1)
        self.up = nn.Linear(32, 64)
        self.down = nn.Parameter(torch.randn(32, 64) * 0.1)
    def state_spec(self):
        return (StateTensor(past="past_x", present="present_x", shape=("batch_size", "past_sequence_length", 32)),)
    def forward(self, input_ids, attention_mask, position_ids, state):
        new = self.tokens(input_ids) + self.positions(position_ids)
        x = torch.cat((state[0], new), 1)
        total, T = x.shape[1], new.shape[1]
        columns = torch.arange(total)
        rows = columns[total - T:, None]
        hidden = (columns > rows)[None] | ((attention_mask[:, None] == 0) & (columns != rows)[None])
        y, _ = self.attention(new, x, x, attn_mask=hidden.repeat_interleave(2, 0), need_weights=False)
        y = new + y
        y = y + F.linear(F.gelu(self.up(y)), self.down)
        return F.linear(y, self.tokens.weight), [x]

def build():
    torch.manual_seed(5)
    return Mixed()

def another():
    torch.manual_seed(6)
    return Mixed()

def shorter():
    module = build()
    module.max_context = 20
    return module
"""


def mixed(tmp_path: Path, text: str = MIXED) -> Path:
    path = tmp_path / "mixed.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("target", ["ort", "portable"])
@pytest.mark.parametrize(("dtype", "bits"), [("fp32", None), ("fp16", None), ("fp32", 4), ("fp16", 8)])
def test_the_example_is_verified_against_its_source(target, dtype, bits, tmp_path: Path) -> None:
    quant = None if bits is None else Quant(bits=bits)
    options = ExportOptions(target=target, dtype=dtype, quant=quant, verify=False)
    export(f"{EXAMPLE}:build", tmp_path / "bundle", options)
    parity = verify_against(Bundle.open(tmp_path / "bundle"), f"{EXAMPLE}:build")
    assert parity.passed
    assert (parity.rounding is not None) == (target == "ort" and bits is not None)


def test_the_command_that_export_recommends_works(tmp_path: Path) -> None:
    source = f"{mixed(tmp_path)}:build"
    made = CliRunner().invoke(group, ["export", source, "-o", str(tmp_path / "b"), "--no-verify"])
    assert made.exit_code == 0, made.output
    assert f"tfmx verify {tmp_path / 'b'} --against {source}" in made.output
    done = CliRunner().invoke(group, ["verify", str(tmp_path / "b"), "--against", source])
    assert done.exit_code == 0, done.output
    assert "verified: " in done.output


@pytest.mark.parametrize("bits", [None, 8])
def test_another_factory_is_not_the_source(bits, tmp_path: Path) -> None:
    path = mixed(tmp_path)
    quant = None if bits is None else Quant(bits=bits, activations="float")
    export(f"{path}:build", tmp_path / "b", ExportOptions(quant=quant, target="portable", verify=False))
    bundle = Bundle.open(tmp_path / "b")
    if bits is None:
        assert not verify_against(bundle, f"{path}:another").passed
    else:
        with pytest.raises(ParityError, match="steps of its blocks away from its source"):
            verify_against(bundle, f"{path}:another")
    for factory, source in (("shorter", path), ("build", EXAMPLE)):
        with pytest.raises(TfmxError, match="give the source that it was exported from"):
            verify_against(bundle, f"{source}:{factory}")


@pytest.mark.parametrize(("target", "dtype"), [("ort", "fp32"), ("portable", "fp32"), ("ort", "fp16")])
@pytest.mark.parametrize("bits", [4, 8])
def test_linear_layers_and_the_tokens_table_are_quantised(target, dtype, bits, tmp_path: Path) -> None:
    quant = Quant(bits=bits, zero_points=bits == 4)
    options = ExportOptions(target=target, dtype=dtype, quant=quant)
    parity = export(f"{mixed(tmp_path)}:build", tmp_path / "b", options)
    assert parity is not None
    assert parity.passed
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert sorted(manifest["quant"]["matrices"]) == ["down", "tokens.weight", "up.weight"]
    assert sorted(manifest["model"]["plain_matrices"]) == [
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "positions.weight",
    ]
    export(
        f"{mixed(tmp_path)}:build",
        tmp_path / "float",
        ExportOptions(target=target, dtype=dtype, verify=False),
    )
    quantised, plain = ((tmp_path / name / "weights.bin").stat().st_size for name in ("b", "float"))
    assert (
        quantised
        < plain * {("fp32", 4): 0.25, ("fp32", 8): 0.4, ("fp16", 4): 0.4, ("fp16", 8): 0.7}[dtype, bits]
    )


@pytest.mark.parametrize("target", ["ort", "portable"])
def test_a_wrong_scale_is_caught(target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(blocks, part, *rest):
        tensor = packed(blocks, part, *rest)
        return tensor * 2 if part == SCALES else tensor

    monkeypatch.setattr(quantiser_module, "packed", doubled)
    with pytest.raises(ParityError, match="steps of its blocks away from its source"):
        export(f"{mixed(tmp_path)}:build", tmp_path / "b", ExportOptions(target=target, quant=Quant(bits=4)))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        (Quant(bits=4, mixed=True), "goes by the names of built-in models"),
        (Quant(bits=4, skip=("positions.*",)), "matches no matrix; there are .*up.weight"),
    ],
)
def test_what_cannot_be_quantised_so_is_refused(quant, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        export(f"{mixed(tmp_path)}:build", tmp_path / "b", ExportOptions(quant=quant))


def test_a_module_without_linear_layers_has_nothing_to_quantise(tmp_path: Path) -> None:
    text = MIXED.replace("F.linear(F.gelu(self.up(y)), self.down)", "self.down.mean()")
    text = text.replace("F.linear(y, self.tokens.weight)", "y @ self.tokens.weight.T")
    with pytest.raises(InputError, match="--quant finds nothing to quantise"):
        export(f"{mixed(tmp_path, text)}:build", tmp_path / "b", ExportOptions(quant=Quant(bits=4)))
