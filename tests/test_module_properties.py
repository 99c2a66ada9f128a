"""What the PyTorch module itself must keep before its graphs are compared with it: a right one passes, 27 broken ones fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from broken_modules import BROKEN, GPT, RNN

from tfmx.export.pipeline import ExportOptions, export
from tfmx.export.properties import PropertyError


def write(folder: Path, text: str) -> str:
    path = folder / "model.py"
    path.write_text(text)
    return f"{path}:build"


@pytest.mark.parametrize("text", [GPT, RNN], ids=["attention", "recurrent"])
def test_the_right_module_passes(text: str, tmp_path: Path) -> None:
    parity = export(write(tmp_path, text), tmp_path / "bundle", ExportOptions())
    assert parity is not None
    assert parity.passed


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_module_is_refused_and_told_how_to_mend_it(name: str, tmp_path: Path) -> None:
    broken = BROKEN[name]
    with pytest.raises(PropertyError) as caught:
        export(write(tmp_path, broken.text), tmp_path / "bundle", ExportOptions())
    message = str(caught.value)
    print(message)
    first = message.partition(": off by ")[0]
    assert broken.way in first
    assert re.search(r"at element \d+ of row \d+ \((prefill|step) \d+\): off by", message)
    assert "\n" not in message
    assert not (tmp_path / "bundle").exists()
