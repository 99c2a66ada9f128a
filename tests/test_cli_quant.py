"""`tfmx export --quant` on the command line: what it says, and every combination that it refuses."""

from __future__ import annotations

import json
import re

import gguf
import numpy as np
import pytest
from command_line import checkpoint, tfmx
from gguf import GGMLQuantizationType as Type
from tiny_checkpoints import tiny_model, write_gguf

INT4, INT8 = ("--quant", "int4"), ("--quant", "int8")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory) -> str:
    """A GGUF whose matrices are Q4_0, without a tokenizer."""
    path = tmp_path_factory.mktemp("blocks") / "model.gguf"
    write_gguf(path, tiny_model("llama"), matrices=Type.Q4_0)
    return str(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--quant-block", "64"), "--quant-block goes with --quant"),
        (("--calibrate", "text"), "--calibrate goes with --quant"),
        (("--quant-symmetric",), "--quant-symmetric goes with --quant"),
        (("--quant-zero-points",), "--quant-zero-points goes with --quant"),
        ((*INT8, "--quant-mixed"), "--quant-mixed chooses between 4 and 8 bits"),
        ((*INT8, "--quant-uniform", "--target", "portable"), "--quant-uniform chooses between 4 and 8 bits"),
        ((*INT4, "--quant-activations", "int8", "--target", "portable"), "is for --target ort"),
        ((*INT4, "--quant-round", "search", "--calibrate", "text"), "--quant-round does not go with --calibrate"),
        (("--kv", "int8", "--target", "portable"), "--kv int8 needs the fused attention of --target ort"),
        (("--kv", "fp16"), "--kv fp16 does not go with --dtype fp32: the cache can be fp32 or int8"),
        ((*INT4, "--quant-block", "48"), "'48' is not one of '16', '32', '64', '128'"),
        ((*INT4, "--requantise"), "this one has none, leave it out"),
        ((*INT4, "--quant-skip", "nothing"), "matches no matrix"),
        ((*INT4, "--calibrate", "/no/such/file"), "/no/such/file"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_and_nothing_is_written(tmp_path, options, words) -> None:
    tfmx("export", checkpoint(), "-o", tmp_path / "out", *options).fails(2, words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (INT8, "--quant is int8, the checkpoint's blocks are int4 and taken over exactly; use --quant int4"),
        ((*INT4, "--quant-block", "16"), "has blocks of 32 weights, --quant-block is 16"),
        ((*INT4, "--quant-mixed"), "--quant-mixed has nothing to round"),
    ],
)
def test_what_would_not_change_kept_blocks_is_refused(tmp_path, blocks, options, words) -> None:
    tfmx("export", blocks, "-o", tmp_path / "out", *options).fails(2, words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "rounding", "kinds"),
    [
        (INT4, "kept", {"int4-32", "int4-32-fine"}),
        ((*INT8, "--requantise"), "smooth", {"int8-32-zeros", "int8-32-zeros-fine"}),
    ],
)
def test_blocks_are_kept_or_rounded_again(tmp_path, blocks, options, rounding, kinds) -> None:
    done = tfmx("export", blocks, "-o", tmp_path / "out", *options)
    assert done.code == 0, done
    assert "verified against PyTorch" in done.out
    quant = json.loads((tmp_path / "out" / "manifest.json").read_text())["quant"]
    assert quant["rounding"] == rounding
    assert set(quant["matrices"].values()) == kinds
    shown = tfmx("inspect", tmp_path / "out").out
    assert ("as the checkpoint had them" if rounding == "kept" else "rounded by smooth") in shown
    assert tfmx("verify", tmp_path / "out", "--against", blocks).code == 0


class Q8(np.ndarray):
    type_ = Type.Q8_0


def test_blocks_of_one_matrix_are_enough_to_round_again(tmp_path) -> None:
    """Of one whose channels are evened out before: what was smoothed still has blocks."""
    model, name, path = tiny_model("llama"), "blk.0.ffn_down.weight", tmp_path / "model.gguf"
    down = model.model.layers[0].mlp.down_proj.weight.detach().numpy()
    write_gguf(path, model, skip=(name,), extra={name: gguf.quantize(down, Type.Q8_0).view(Q8)})
    done = tfmx("export", path, "-o", tmp_path / "out", *INT4, "--requantise", "--no-verify")
    assert done.code == 0, done
    quant = json.loads((tmp_path / "out" / "manifest.json").read_text())["quant"]
    assert set(quant["matrices"].values()) == {"int4-32", "int8-32"}  # mixed: what was kept is rounded too


def manifest(folder) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "manifest.json").read_text())
    return found


def test_export_says_what_quantisation_cost(tmp_path) -> None:
    divergences = {}
    for bits in ("int4", "int8"):
        done = tfmx("export", checkpoint(), "-o", tmp_path / bits, "--quant", bits)
        assert done.code == 0, done
        said = re.search(r"quantisation cost on (\d+) tokens of text: divergence (\S+), top-1 [\d.]+% \(tfmx verify", done.out)  # fmt: skip
        assert said is not None, done.out
        quality = manifest(tmp_path / bits)["quality"]
        assert (quality["tokens"], f"{quality['kl_mean']['value']:.2g}") == (int(said[1]), said[2])
        divergences[bits] = float(said[2])
    assert 0 < divergences["int8"] < divergences["int4"] / 10


def test_a_cost_that_is_not_measured_is_no_line_of_figures(tmp_path, blocks) -> None:
    done = tfmx("export", blocks, "-o", tmp_path / "plain", *INT4)
    assert "quantisation cost: not measured" in done.out  # it has no tokenizer
    done = tfmx("export", checkpoint(), "-o", tmp_path / "unverified", *INT4, "--no-verify")
    assert "quantisation cost" not in done.out
    assert manifest(tmp_path / "unverified")["quality"] is None


def test_matrices_whose_rows_the_block_does_not_divide_are_named(tmp_path) -> None:
    out = tmp_path / "out"
    said = tfmx(
        "export", "preset:language-model", "-o", out, *INT4, "--quant-block", "128", "--no-verify"
    ).out
    [line] = [line for line in said.splitlines() if "rows that blocks of 128 do not divide" in line]
    forms = manifest(out)["quant"]["matrices"]
    for name, form in forms.items():
        general = re.sub(r"^blocks\.\d+\.", "blocks.*.", name)
        assert (f"{general} has blocks of {form.split('-')[1]}" in line) == (not form.startswith("int4-128"))
    assert any(not form.startswith("int4-128") for form in forms.values())
    assert tfmx("verify", out, "--against", "preset:language-model").code == 0
