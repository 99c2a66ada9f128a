"""The same source gives the same bytes: in another process, from another folder, twice in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import save_tiny

from tfmx.export.options import ExportOptions
from tfmx.export.pipeline import export
from tfmx.export.trace import trace_decoder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("target", ["ort", "portable"])
def test_exports_are_the_same_bytes(target: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3")
    options = ExportOptions(target=target)
    export(str(tmp_path / "model"), tmp_path / "first", options)
    trace_decoder.cache_clear()
    export(str(tmp_path / "model"), tmp_path / "second", options)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")

    elsewhere = tmp_path / "another" / "folder"
    elsewhere.mkdir(parents=True)
    (tmp_path / "model").rename(elsewhere / "renamed")
    command = [sys.executable, "-m", "tfmx", "export", "renamed", "-o", "third", "--target", target]
    threads = str(torch.get_num_threads())  # on which the certificate's third digit depends
    other = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": threads}
    subprocess.run(command, cwd=elsewhere, check=True, capture_output=True, env=other)
    third = contents(elsewhere / "third")
    assert {name for name, content in contents(tmp_path / "first").items() if third[name] != content} == set()


def test_no_file_names_the_machine(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a-telling-name", "llama")
    export(str(tmp_path / "a-telling-name"), tmp_path / "bundle", ExportOptions())
    for name, content in contents(tmp_path / "bundle").items():
        for secret in ("a-telling-name", str(tmp_path), os.uname().nodename, str(Path.home()) + "/"):
            if len(secret) > 4:  # a host named "vm" is in any megabyte of weights
                assert secret.encode() not in content, (name, secret)
