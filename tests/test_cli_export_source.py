"""What `tfmx export` refuses without PyTorch: each line comes at once, and says what to give instead."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import PROGRAM, Done, bundle, checkpoint, exported, tfmx
from tiny_checkpoints import change_config

from tfmx.export.factories import FactoryError, check_factory

# As `tfmx`, but it tells whether PyTorch was imported.
WATCHED = (
    "import sys\nfrom tfmx.cli.boundary import run_guarded\nfrom tfmx.cli.entry import group\n"
    "code = run_guarded(group, sys.argv[1:])\nprint('torch' in sys.modules)\nsys.exit(code)"
)


def at_once(*arguments: object, code: int = 2, parts: list[str]) -> None:
    """It fails so, and PyTorch was not imported for it."""
    command = [sys.executable, "-c", WATCHED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "False\n", done
    Done(done.returncode, "", done.stderr).fails(code, *parts)


def export_at_once(
    tmp_path: Path, source: object, *arguments: object, code: int = 2, parts: list[str]
) -> None:
    at_once("export", source, "-o", tmp_path / "out", *arguments, code=code, parts=parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "arguments", "parts"),
    [
        ("preset:alibbi", [], ["no preset 'alibbi' (did you mean alibi?)", "vaswani-base"]),
        ("alibi", [], ["no file or folder 'alibi'", "preset:alibi"]),
        ("preset:alibi", ["--max-context", "1"], ["--max-context is 1, wanted at least 2"]),
        ("preset:alibi", ["--max-context", "999"], ["--max-context is 999", "128 positions"]),
        ("preset:alibi", ["--attentions", "2"], ["--attentions names layer 2, wanted 0 to 1"]),
        ("preset:lstm", ["--attentions", "0"], ["--attentions is not for this model"]),
        ("preset:alibi", ["--opset", "40"], ["--opset is 40"]),
        ("preset:lstm", ["--kv", "int8"], ["--kv int8 is not for this export"]),
        ("preset:decoder", ["--kv", "int8", "--attentions", "0"], ["--kv int8 is not for this export"]),
        (
            "preset:decoder",
            ["--quant", "int4", "--requantise"],
            ["--requantise is for checkpoints with blocks"],
        ),
        (
            "preset:lstm",
            ["--quant", "int4", "--calibrate", __file__],
            ["--calibrate is for decoders of tokens"],
        ),
        ("none.py:make", [], ["none.py is not a file"]),
        ("none.gguf", [], ["no file or folder 'none.gguf'"]),
    ],
)
def test_what_cannot_be_is_told_before_pytorch_is_loaded(source, arguments, parts, tmp_path):
    export_at_once(tmp_path, source, *arguments, parts=parts)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("model.bin", b"", ["pickle"]),
        ("model.txt", b"hello", ["no GGUF file"]),
        ("model.safetensors", b"", ["has no config"]),
    ],
)
def test_a_file_that_is_no_checkpoint_is_known_by_its_first_bytes(name, content, parts, tmp_path):
    (tmp_path / name).write_bytes(content)
    export_at_once(tmp_path, tmp_path / name, parts=parts)


def test_a_folder_is_known_by_its_config_and_its_weights(tmp_path):
    (tmp_path / "empty").mkdir()
    export_at_once(tmp_path, tmp_path / "empty", parts=["no config.json"])
    source = shutil.copytree(checkpoint(), tmp_path / "source")
    export_at_once(tmp_path, source, "--max-context", "129", parts=["--max-context is 129"])
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    export_at_once(tmp_path, source, parts=["pytorch_model.bin is a pickle", "safetensors"])
    (source / "pytorch_model.bin").unlink()
    export_at_once(tmp_path, source, parts=["has neither model.safetensors nor"])
    change_config(source, model_type="mamba9")
    export_at_once(tmp_path, source, parts=["mamba9"])
    (source / "config.json").write_text('{"model_type": "tfmx", "n_layers": 0}')
    export_at_once(tmp_path, source, parts=["config.json"])
    (source / "config.json").unlink()
    (source / "a.gguf").touch()
    export_at_once(tmp_path, source, parts=["folder of GGUF files", "a.gguf"])


def test_a_bundle_is_called_one(tmp_path):
    export_at_once(
        tmp_path,
        exported()[0],
        parts=["is a bundle already, exported from a Hugging Face folder", "`tfmx run"],
    )
    at_once("verify", bundle(), "--against", bundle(), parts=["is a bundle"])


def test_a_folder_with_some_other_manifest_is_no_bundle(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text(json.dumps({"name": "a web app"}))
    export_at_once(tmp_path, tmp_path / "app", parts=["no config.json"])
    (tmp_path / "app" / "manifest.json").write_text("[1]")
    export_at_once(tmp_path, tmp_path / "app", parts=["no config.json"])


def test_a_place_that_cannot_be_written_is_known_at_once(tmp_path):
    (tmp_path / "file").touch()
    at_once(
        "export", "preset:alibi", "-o", tmp_path / "file" / "a" / "out", code=1,
        parts=["cannot write to", "file is not a folder"],
    )  # fmt: skip


def test_a_folder_that_may_not_be_written_to_is_known_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda place, _mode: Path(place) != tmp_path)  # root may write anywhere
    done = tfmx("export", "preset:alibi", "-o", tmp_path / "out")
    done.fails(1, f"cannot write to {tmp_path}: {tmp_path} may not be written to")
    assert done.stages == []


# --- a Python file of one's own --------------------------------------------------------------------------

OWN = """
import torch
from functools import partial
raise SystemExit("it was run")

class Model(torch.nn.Module):
    def __init__(self): ...

class Sized(torch.nn.Module):
    def __init__(self, width): ...

class Config: ...

def make_model(): ...
def make_small(width=3, *, deep=False): ...
def of_width(width): ...
def with_depth(*, depth): ...
def _hidden(): ...
if torch:
    def in_a_branch(): ...
later = partial(of_width, 3)
"""


@pytest.mark.parametrize("end", ["", ":"])
def test_a_python_file_without_a_factory_lists_those_it_has(end, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    listed = "own.py:make_model (it has make_model, make_small, Model, Config)"
    export_at_once(tmp_path, f"{tmp_path}/own.py{end}", parts=["is a Python file", listed])
    (tmp_path / "own.py").write_text("x = 1")
    export_at_once(
        tmp_path, f"{tmp_path}/own.py{end}", parts=["it has none that can be called without arguments"]
    )


def test_a_factory_that_is_not_there_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    parts = ["no function 'make_modle' (did you mean make_model", "it has make_model, make_small, Model"]
    export_at_once(tmp_path, f"{tmp_path}/own.py:make_modle", parts=parts)
    (tmp_path / "own.py").write_text("def make(:\n")
    export_at_once(tmp_path, f"{tmp_path}/own.py:make", parts=["own.py, line 1", "invalid syntax"])
    (tmp_path / "own.py").write_bytes(b"\0")
    export_at_once(tmp_path, f"{tmp_path}/own.py:make", parts=["own.py", "null bytes"])


@pytest.mark.parametrize("name", ["make_model", "Sized", "in_a_branch", "later", "_hidden", "partial"])
def test_a_name_that_the_text_has_is_left_to_running_it(name, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    check_factory(tmp_path / "own.py", name)


@pytest.mark.parametrize(
    "text",
    [
        "from models import *",
        "for size in (1, 2): globals()[f'make_{size}'] = lambda: None",
        "def __getattr__(name): ...",
        "exec('def make_1(): ...')",
    ],
)
def test_a_name_that_may_be_made_while_it_runs_is_not_refused(text, tmp_path):
    (tmp_path / "own.py").write_text(text)
    check_factory(tmp_path / "own.py", "make_1")
    (tmp_path / "own.py").write_text("import os")
    with pytest.raises(FactoryError, match="no function 'make_1'"):
        check_factory(tmp_path / "own.py", "make_1")


def test_pytorch_is_imported_where_it_is_needed(tmp_path):
    """The test above can see it."""
    (tmp_path / "own.py").write_text("def make(): raise ValueError('no')")
    command = [
        sys.executable,
        "-c",
        WATCHED,
        "export",
        f"{tmp_path}/own.py:make",
        "-o",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "True\n")


def test_it_is_so_for_the_program_too(tmp_path):
    command = [*PROGRAM, "export", "preset:alibbi", "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    Done(done.returncode, done.stdout, done.stderr).fails(2, "did you mean alibi?")
