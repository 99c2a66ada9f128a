"""`tfmx export`: what it prints, and every source, option and place that it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time

import pytest
import tiny_kinds
import torch
from command_line import PROGRAM, Done, bundle, checkpoint, copied, exported, sigint_as_usual, tfmx
from safetensors.torch import load_file, save_file
from tiny_checkpoints import change_config

from tfmx import InputError, TfmxError
from tfmx.cli.kind_words import describe_length
from tfmx.export import pipeline
from tfmx.export.parity import CaseParity, Parity


@pytest.fixture
def source(tmp_path):
    """A checkpoint to spoil."""
    return shutil.copytree(checkpoint(), tmp_path / "source")


def test_it_says_what_was_made():
    folder, done = exported()
    assert done.err.splitlines() == done.stages
    first, *files, verified, worst = done.out.splitlines()
    assert first.startswith(f"{folder}: ort, fp32, opset 18, context 128, made in ")
    words = [line.split() for line in files]
    assert {line[0] for line in words} == {path.name for path in folder.iterdir()} - {"manifest.json"} | {
        "total"
    }
    assert {line[-1] for line in words if line[0].endswith(".onnx")} == {"nodes"}
    assert verified.startswith("verified against PyTorch: ")
    assert verified.endswith("cases pass")
    assert "times PyTorch's own rounding error (4 allowed), in '" in worst


@pytest.mark.slow
def test_what_is_not_verified_is_called_so(source, tmp_path):
    done = tfmx(
        "export", source, "-o", tmp_path / "a bundle", "--no-verify", "--target", "portable", "--dtype", "fp16",
        "--opset", "20", "--max-context", "64",
    )  # fmt: skip
    assert (done.code, done.err.splitlines()) == (
        0,
        ["loading PyTorch", "tracing", "stitching", "writing weights"],
    )
    *_, said, command = done.out.splitlines()
    assert "portable, fp16, opset 20, context 64" in done.out
    assert said.startswith("not verified (--no-verify)")
    assert command == f"  tfmx verify '{tmp_path}/a bundle' --against {source}"
    tfmx("verify", tmp_path / "a bundle").fails(1, "exported with --no-verify")


def refused(code, source, *arguments, parts, out):
    tfmx("export", source, "-o", out, *arguments).fails(code, *parts)
    assert not (out / "manifest.json").exists()
    assert [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")] == []


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--opset", "16"], ["--opset is 16", "17 to 24"]),
        (["--opset", "25"], ["--opset is 25", "17 to 24"]),
        (["--max-context", "129"], ["--max-context is 129", "128 positions"]),
        (["--max-context", "0"], ["--max-context is 0"]),
        (["--max-context", "-5"], ["--max-context is -5"]),
    ],
)
def test_an_impossible_option_is_one_line(arguments, parts, tmp_path):
    refused(2, checkpoint(), *arguments, parts=parts, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "mamba9"}, ["mamba9"]),
        ({"model_type": None}, ["model_type"]),
        ({"rms_norm_eps": float("nan")}, ["eps", "nan"]),
        ({"rms_norm_eps": 0}, ["eps"]),
        ({"num_key_value_heads": 3}, ["3"]),
        ({"hidden_size": 65}, ["65"]),
        ({"num_hidden_layers": 4}, ["layers.3"]),
        ({"num_hidden_layers": 2}, ["layers.2"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, ["theta"]),
    ],
)
def test_a_config_that_cannot_be_right_is_one_line(changes, parts, source, tmp_path):
    change_config(source, **changes)
    refused(2, source, parts=parts, out=tmp_path / "out")


def change_tensors(source, change):
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_one_line_that_names_it(value, source, tmp_path):
    change_tensors(source, lambda tensors: tensors[NORM].fill_(value))
    refused(2, source, parts=[NORM, "not finite"], out=tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop(NORM),
        lambda tensors: tensors.update({NORM: torch.ones(63)}),
    ],
    ids=["missing", "misshaped"],
)
def test_a_wrong_tensor_is_one_line_that_names_it(change, source, tmp_path):
    change_tensors(source, change)
    refused(2, source, parts=[NORM], out=tmp_path / "out")


def test_an_extra_tensor_is_one_line_that_names_it(source, tmp_path):
    change_tensors(source, lambda tensors: tensors.update({"model.extra": torch.ones(2)}))
    refused(2, source, parts=["model.extra"], out=tmp_path / "out")


def test_sources_that_are_none_are_one_line(tmp_path):
    out = tmp_path / "out"
    refused(2, tmp_path / "none", parts=["there is no file or folder", "none"], out=out)
    (tmp_path / "empty").mkdir()
    refused(2, tmp_path / "empty", parts=["no config.json"], out=out)
    (tmp_path / "model.bin").touch()
    refused(2, tmp_path / "model.bin", parts=["pickle", "safetensors"], out=out)
    (tmp_path / "model.txt").write_text("hello")
    refused(2, tmp_path / "model.txt", parts=["no GGUF file"], out=out)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(2, tmp_path / "model.gguf", parts=["model.gguf"], out=out)
    refused(2, f"{tmp_path}/none.py:build", parts=["none.py is not a file"], out=out)
    (tmp_path / "mine.py").write_text("def make(): ...\nraise RuntimeError('no')")
    refused(2, f"{tmp_path}/mine.py:make", parts=["running", "mine.py failed", "RuntimeError: no"], out=out)
    (tmp_path / "other.py").write_text("def make(): ...")
    refused(2, f"{tmp_path}/other.py:build", parts=["no function 'build'", "make"], out=out)
    refused(2, f"{tmp_path}/other.py:make", parts=["NoneType", "wanted a torch.nn.Module"], out=out)


def test_a_place_that_is_taken_is_one_line(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    refused(2, checkpoint(), parts=["photos", "not a tfmx bundle"], out=tmp_path / "photos")
    assert (tmp_path / "photos" / "cat.jpg").exists()
    with copied(bundle()) as folder:
        (folder / "README.md").write_text("my notes")
        tfmx("export", checkpoint(), "-o", folder).fails(2, "not a tfmx bundle (README.md)")
        assert (folder / "README.md").read_text() == "my notes"
    (tmp_path / "file").touch()
    tfmx("export", checkpoint(), "-o", tmp_path / "file").fails(2, "is not a folder")
    tfmx("export", checkpoint(), "-o", tmp_path / "file" / "out").fails(1, "cannot write to")


def test_an_opset_that_is_not_known_is_refused_from_python_too():
    with pytest.raises(InputError, match=r"^--opset is 16, wanted 17 to 24$"):
        pipeline.ExportOptions(opset=16)


def test_files_are_looked_at_before_the_source_is(tmp_path):
    """Minutes of a large one: the line names what will be wrong at the end."""
    nothing = tmp_path / "no checkpoint"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    refused(2, nothing, parts=["photos", "not a tfmx bundle"], out=tmp_path / "photos")
    calibrate = ("--quant", "int4", "--calibrate")
    refused(
        2, nothing, *calibrate, tmp_path / "none.txt", parts=["none.txt cannot be read"], out=tmp_path / "b"
    )
    refused(2, nothing, *calibrate, tmp_path, parts=["cannot be read"], out=tmp_path / "b")


def test_a_text_from_a_pipe_is_read_once(tmp_path):
    """A second reading would find nothing, or wait for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("a word " * 50), daemon=True)
    writer.start()
    arguments = ("--quant", "int4", "--quant-block", "16", "--calibrate", pipe)
    refused(
        2, checkpoint(), *arguments, parts=["the text to calibrate with has", "2,048"], out=tmp_path / "b"
    )
    writer.join(10)
    assert not writer.is_alive()


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_bundle_as_it_was(tmp_path):
    """A limit on the size of files stands for the disk."""
    out = shutil.copytree(bundle(), tmp_path / "out")
    before = (out / "manifest.json").read_bytes()

    line = "ulimit -f 100; trap '' XFSZ; exec \"$@\""
    done = subprocess.run(
        ["bash", "-c", line, "-", *PROGRAM, "export", str(checkpoint()), "-o", str(out), "--no-verify"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    Done(done.returncode, done.stdout, done.stderr).fails(1, "cannot write the bundle", "nothing was changed")
    assert (out / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_failed_parity_is_one_line_and_publishes_nothing(tmp_path, monkeypatch):
    case = CaseParity("odd past", 0.5, 1e-6, 0.0, 1.0, 0.1, 0.25, 0.01)
    monkeypatch.setattr(pipeline, "run_gate", lambda *_: Parity((case,), {}))
    done = tfmx("export", checkpoint(), "-o", tmp_path / "out")
    done.fails(1, "parity failed in 1 of 1 cases", "'odd past'", "0.5", "budget 1e-06")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_leaves_no_litter(tmp_path):
    with sigint_as_usual():
        process = subprocess.Popen(
            [*PROGRAM, "export", str(checkpoint()), "-o", str(tmp_path / "out")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    while process.poll() is None and not list(tmp_path.iterdir()):
        time.sleep(0.01)  # until it has begun to write
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    done = Done(process.returncode, out.decode(), err.decode())
    assert (done.code, done.out, done.err.splitlines()) == (130, "", done.stages)
    assert list(tmp_path.iterdir()) == []


def layers_of_four(folder):
    """A source whose layers 0 to 3 are there as far as can be seen before it is opened."""
    source = shutil.copytree(checkpoint(), folder / "source")
    change_config(source, num_hidden_layers=4)
    return source


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], ()),
        (["--attentions", "all"], "all"),
        (["--attentions", "0,2"], (0, 2)),
        (["--attentions", "1-3"], (1, 2, 3)),
    ],
)
def test_the_layers_of_attention_outputs_reach_the_exporter(arguments, wanted, tmp_path, monkeypatch):
    seen = []

    def stop(source, out, options, progress):
        seen.append(options.attentions)
        raise TfmxError("enough")

    monkeypatch.setattr(pipeline, "export", stop)
    tfmx("export", layers_of_four(tmp_path), "-o", tmp_path / "out", *arguments).fails(1, "enough")
    assert seen == [wanted]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (tiny_kinds.write_token_classifier, "up to 24 positions"),
        (tiny_kinds.write_image_classifier, "images of 3 x 8 x 12 (channels, height, width), 7 positions"),
        (tiny_kinds.write_recurrent_regressor, "context 20"),
        (tiny_kinds.write_encoder_decoder, "source up to 24 positions, context 20"),
    ],
)
def test_the_length_of_every_kind_is_told(write, words, tmp_path):
    assert describe_length(write(tmp_path / "bundle")) == words


def test_an_export_in_a_pipe_tells_its_stages_in_plain_lines():
    assert exported()[1].stages == [
        "loading PyTorch",
        "tracing",
        "stitching",
        "writing weights",
        "verifying: PyTorch",
        "verifying: onnxruntime",
    ]
    assert json.loads((exported()[0] / "manifest.json").read_text())["parity"]["passed"] is True


@pytest.mark.slow
def test_a_quiet_export_prints_nothing_but_errors(source, tmp_path):
    done = tfmx("export", "preset:alibi", "-o", tmp_path / "out", "--no-verify", "-q")
    assert done == Done(0, "", "")
    assert (tmp_path / "out" / "manifest.json").exists()
    change_tensors(source, lambda tensors: tensors.pop(NORM))
    done = tfmx("export", source, "-o", tmp_path / "other", "-q")
    done.fails(2, NORM)
    assert done.stages == []
