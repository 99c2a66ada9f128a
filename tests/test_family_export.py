"""Every item of the family is exported, passes the gate and runs: each row of the README's table, and both targets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import tfmx

from tfmx import InputError
from tfmx.export.fitting import can_stamp
from tfmx.export.pipeline import ExportOptions, export, verify_against
from tfmx.runtime.bundle import Bundle
from tfmx.runtime.devices import choose_device
from tfmx.runtime.golden import replay_golden
from tfmx.tfm_model.presets import PRESETS

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (\d+) \| .+ \| `tfmx (export [^`]+)` \| `tfmx (run [^`]+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "README.md").read_text())
# Of the others both targets write the same graphs: tests/test_family_graphs.py compares them.
STAMPED = [name for name, config in PRESETS.items() if can_stamp(config)]


def command(text: str, folder: Path) -> list[str]:
    """A command of the table, with the bundle and what it writes in the folder."""
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(text)]
    return [str(folder / word) if word in {"b", "hidden.npy"} else word for word in words]


def test_the_table_has_every_item_and_every_preset() -> None:
    assert {int(number) for number, _, _ in ROWS} == set(range(1, 35))
    named = {word.removeprefix("preset:") for _, line, _ in ROWS for word in line.split() if ":" in word}
    only_encoders_of_others = {"relative-encoder", "t5-bias-encoder", "lstm-classifier"}
    assert named == set(PRESETS) - only_encoders_of_others


@pytest.mark.parametrize(("number", "export_line", "run_line"), ROWS, ids=lambda value: str(value)[:60])
def test_a_row_exports_through_the_gate_and_runs(
    number: str, export_line: str, run_line: str, tmp_path: Path
) -> None:
    done = tfmx(*command(export_line, tmp_path))
    assert done.code == 0, done.err
    assert "verified against PyTorch" in done.out
    done = tfmx(*command(run_line, tmp_path), "-q")
    assert done.code == 0, done.err
    assert done.out.strip() or (tmp_path / "hidden.npy").exists()
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.manifest.target == "ort"
    results = replay_golden(bundle, choose_device("cpu", bundle))
    assert all(case.passed for case in results)


@pytest.mark.parametrize("name", STAMPED)
def test_a_preset_passes_the_gate_with_standard_ops(name: str, tmp_path: Path) -> None:
    parity = export(f"preset:{name}", tmp_path / "b", ExportOptions(target="portable"))
    assert parity is not None
    assert parity.passed
    ragged = [case.name for case in parity.cases if "ragged" in case.name or "images" in case.name]
    assert len(ragged) >= 2, "in batch, with ragged lengths"
    for file in (tmp_path / "b").glob("*.onnx"):
        model = onnx.load(file, load_external_data=False)
        assert {node.domain for node in model.graph.node} == {""}, file.name
        if file.stem in {"encode", "prefill", "decode"}:
            onnx.checker.check_model(file, full_check=True)


KINDS = (
    "encoder-decoder", "random-features", "ablated-lstm", "lstm-regressor", "class-token", "relative", "max-pooled"
)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("opset", [17, 24])
def test_the_oldest_and_the_newest_opset_pass_the_gate(name: str, opset: int, tmp_path: Path) -> None:
    parity = export(f"preset:{name}", tmp_path / "b", ExportOptions(target="portable", opset=opset))
    assert parity is not None
    assert parity.passed


@pytest.mark.parametrize("name", KINDS)
def test_half_precision_passes_the_gate(name: str, tmp_path: Path) -> None:
    parity = export(f"preset:{name}", tmp_path / "b", ExportOptions(dtype="fp16"))
    assert parity is not None
    assert parity.passed
    bundle = Bundle.open(tmp_path / "b")
    assert all(case.passed for case in replay_golden(bundle, choose_device("cpu", bundle)))


def test_all_maps_of_both_sides_can_be_asked_for_and_verified_again(tmp_path: Path) -> None:
    export("preset:encoder-decoder", tmp_path / "b", ExportOptions(attentions="all", verify=False))
    assert verify_against(Bundle.open(tmp_path / "b"), "preset:encoder-decoder").passed
    with pytest.raises(InputError, match="names layer 3, wanted 0 to 2"):
        export("preset:encoder-decoder", tmp_path / "c", ExportOptions(attentions=(3,)))


@pytest.mark.parametrize("name", ["encoder-decoder", "vision-transformer", "decoder"])
def test_attention_weights_of_chosen_layers_can_be_asked_for(name: str, tmp_path: Path) -> None:
    options = ExportOptions(attentions=(1,))
    parity = export(f"preset:{name}", tmp_path / "b", options)
    assert parity is not None
    assert parity.passed
    bundle = Bundle.open(tmp_path / "b")
    outputs = {tensor.name for graph in bundle.manifest.graphs.values() for tensor in graph.outputs}
    maps = {name for name in outputs if "attentions" in name}
    wanted = {"attentions.1"}
    if name == "encoder-decoder":
        wanted |= {"cross_attentions.1", "encoder_attentions.1"}
    assert maps == wanted
    assert verify_against(bundle, f"preset:{name}").passed


def test_the_same_preset_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        export("preset:lstm", tmp_path / folder, ExportOptions(verify=False))
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes(), file.name


def test_an_unknown_preset_lists_what_there_is(tmp_path: Path) -> None:
    tfmx("export", "preset:nothing", "-o", tmp_path / "b").fails(
        2, "no preset 'nothing'", "vaswani-base", "lstm"
    )
    assert not (tmp_path / "b").exists()


def test_a_sequence_past_a_learned_table_is_refused(tmp_path: Path) -> None:
    export("preset:one-hot", tmp_path / "b", ExportOptions(verify=False))
    ids = ",".join("1" for _ in range(PRESETS["one-hot"].context + 1))
    tfmx("run", tmp_path / "b", "--ids", ids).fails(2, "41 tokens", "the context holds 40")
    export("preset:encoder", tmp_path / "e", ExportOptions(verify=False))
    np.save(tmp_path / "x.npy", np.zeros((129, 6), np.float32))
    ids = ",".join("1" for _ in range(129))
    tfmx("run", tmp_path / "e", "--ids", ids).fails(2, "129", "128")
