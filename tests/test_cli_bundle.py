"""`tfmx verify`, `inspect` and `doctor`: what they print, and what they refuse."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import tiny_kinds
from command_line import Done, bundle, checkpoint, copied, exported, program_without, reseal, tfmx

import tfmx as package
from tfmx.cli.inspect import tensor_rows
from tfmx.runtime.manifest import Manifest, TensorInfo

# --- verify ----------------------------------------------------------------------------------------------


def damaged(folder):
    """Every weight a little off, and a manifest that says that it must be so."""
    weights = np.fromfile(folder / "weights.bin", np.float32)
    (weights * np.float32(1.001)).tofile(folder / "weights.bin")
    reseal(folder)


def test_a_good_bundle_is_verified_without_torch():
    folder, _ = exported()
    done = program_without("torch", "verify", folder)
    assert (done.code, done.notes) == (0, "")
    assert done.stages == ["checking the files", "replaying"]  # stderr is a pipe
    assert program_without("torch", "verify", folder, "-q") == Done(0, done.out, "")
    first, header, *cases, last = done.out.splitlines()
    assert first.endswith("as exported")
    assert header.split() == ["case", "steps", "error", "allowed"]
    assert [case.split()[-1] for case in cases] == ["pass", "pass"]
    assert last == "verified: 2 stored cases pass"


def test_a_bundle_that_computes_something_else_fails():
    with copied(exported()[0]) as folder:
        damaged(folder)
        done = tfmx("verify", folder)
    assert done.code == 1
    assert "FAIL" in done.out
    assert done.notes.startswith("tfmx: error: 2 of 2 stored cases failed")
    assert done.notes.count("\n") == 1


@pytest.mark.slow
def test_verify_against_the_source_repeats_the_comparison():
    done = tfmx("verify", exported()[0], "--against", checkpoint())
    assert (done.code, done.notes) == (0, "")
    assert done.stages[:3] == ["checking the files", "loading PyTorch", "verifying: PyTorch"]
    _, header, *cases, last = done.out.splitlines()
    assert header.split() == ["case", "error", "allowed", "in", "cache", "allowed", "ratio", "argmax"]
    assert len(cases) >= 8
    assert all(case.endswith("%  pass") for case in cases)
    assert last == f"verified: {len(cases)} cases pass"


@pytest.mark.slow
def test_verify_against_the_source_finds_a_difference():
    with copied(exported()[0]) as folder:
        damaged(folder)
        done = tfmx("verify", folder, "--against", checkpoint())
    assert done.code == 1
    assert "FAIL" in done.out
    assert "cases failed" in done.notes
    assert done.notes.count("\n") == 1


def test_a_source_of_another_model_is_one_line(tmp_path):
    shutil.copytree(checkpoint(), tmp_path / "other")
    done = tfmx("verify", bundle(), "--against", tmp_path / "other")
    done.fails(1, "give the source that it was exported from")
    tfmx("verify", exported()[0], "--against", tmp_path / "none").fails(2, "there is no file or folder")


def test_a_bundle_without_stored_cases_says_what_to_do():
    tfmx("verify", bundle()).fails(1, "exported with --no-verify", "--against SOURCE")


def test_verify_names_what_nothing_reads_and_no_other_command_minds_it():
    with copied(exported()[0]) as folder:
        (folder / ".DS_Store").write_bytes(b"\0")
        (folder / "README.md").write_text("about")
        done = tfmx("verify", folder)
        assert done.code == 0
        assert done.notes == "note: beside the bundle's files, and read by nothing: .DS_Store, README.md\n"
        assert tfmx("verify", folder, "-q").err == ""
        assert tfmx("run", folder, "Hi", "--max-tokens", "1", "-q").err == ""
        assert tfmx("inspect", folder).code == 0
        (folder / "vocab.json").touch()
        tfmx("verify", folder).fails(1, "vocab.json is not part of the bundle")


def test_verify_names_the_device():
    done = tfmx("verify", exported()[0], "--device", "auto")
    assert done.code == 0
    assert done.notes.startswith("device: cpu (no CUDA: ")
    tfmx("verify", exported()[0], "--device", "cuda").fails(2, "CUDA cannot be used")


# --- inspect ---------------------------------------------------------------------------------------------


def test_inspect_shows_what_is_there():
    folder, _ = exported()
    done = tfmx("inspect", folder)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == str(folder)
    words = [line.split() for line in lines]
    for wanted in (
        ["format", "3,", "written", "by", "tfmx", package.__version__],
        ["source", "(huggingface)"],
        ["target", "ort,", "fp32,", "opset", "18"],
        ["kind", "decoder"],
        ["inputs", "tokens", "of", "320,", "up", "to", "128"],
        ["outputs", "tokens,", "320", "numbers", "(logits)", "for", "each", "position"],
        ["context", "128", "tokens"],
        ["mixer.n_heads", "4"],
        ["n_layers", "3"],
        ["in", "input_ids", "int64", "[batch_size,", "sequence_length]"],
        ["in", "past_key_values.{0..2}.key", "float32"],
        ["out", "present.{0..2}.value", "float32"],
        ["out", "logits", "float32", "[batch_size,", "1,", "320]"],
        ["capacity", "state:", "a", "buffer"],
        ["MatMul", "13", "13"],
        ["com.microsoft.GroupQueryAttention", "3", "3"],
        ["weights.bin"],
        ["result", "passed,"],
        ["longer", "than", "traced"],
        ["cache", "of", "one", "sequence,", "a", "token", "768", "B"],
    ):
        assert any(line[: len(wanted)] == wanted for line in words), wanted
    assert max(map(len, lines[1:])) <= 100


def test_inspect_says_when_nothing_was_verified():
    assert "not verified: exported with --no-verify" in tfmx("inspect", bundle()).out


def test_inspect_lets_no_control_character_through(tmp_path):
    with copied(bundle()) as folder:
        manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes())
        changed = dataclasses.replace(manifest, model={"name": "\x1b[2J"})
        (folder / "manifest.json").write_bytes(changed.to_bytes())
        assert "\x1b" not in tfmx("inspect", folder, terminal="out").out


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (["past.0", "past.1"], ["past.{0..1}"]),
        (["a.0.k", "a.0.v", "a.1.k", "a.1.v"], ["a.{0..1}.k", "a.{0..1}.v"]),
        (["a.1.k", "a.3.k"], ["a.{1,3}.k"]),
        (["layer7", "x"], ["layer7", "x"]),
        (["only.4"], ["only.4"]),
    ],
)
def test_tensors_that_differ_by_a_number_share_a_row(names, rows):
    tensors = [TensorInfo(name=name, dtype="float32", shape=("batch_size", 2)) for name in names]
    assert tensor_rows(tensors) == [(row, "float32", "[batch_size, 2]") for row in rows]


# --- doctor ----------------------------------------------------------------------------------------------


def test_doctor_tells_versions_devices_and_the_machine():
    done = tfmx("doctor")
    assert (done.code, done.err) == (0, "")
    for part in ("tfmx", "onnxruntime", "torch", "cuda", "telemetry", "off", "cores", "memory", "processor"):
        assert part in done.out
    assert "cannot be used: " in done.out
    assert "pip " in done.out  # what to do for CUDA


def test_doctor_finds_a_missing_onnxruntime_without_failing():
    done = program_without("onnxruntime", "doctor")
    assert (done.code, done.err) == (0, "")
    assert "cannot be used: onnxruntime cannot be imported" in done.out
    assert "pip install '.[cpu]'" in done.out


@pytest.mark.parametrize(
    "name", ["token_classifier", "vector_regressor", "image_classifier", "recurrent_regressor"]
)
def test_inspect_shows_bundles_of_every_input(name, tmp_path):
    getattr(tiny_kinds, f"write_{name}")(tmp_path / "b")
    done = tfmx("inspect", tmp_path / "b")
    assert (done.code, done.err) == (0, "")
