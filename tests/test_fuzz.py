"""Two thousand broken bundles and a hundred broken checkpoints: each ends in an answer or in one line. `make fuzz` takes ten times as many."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import numpy as np
import onnxruntime
import pytest
from command_line import tfmx
from fuzz import bundle_mutants, checkpoint_mutants
from fuzz.attached import attach
from fuzz.bases import base_folder, read_bases, read_checkpoints
from fuzz.campaign import run_campaign
from fuzz.op_templates import Template, templates
from fuzz.outcomes import (
    BAD,
    DIFFERS,
    FAILED,
    HANG,
    INTERNAL,
    RAN,
    REFUSED,
    REFUSED_BY_ORT,
    SIGNAL,
    TRACEBACK,
    Outcome,
    judge,
)
from fuzz.report import finding, findings, table
from onnx import helper

from tfmx.runtime.audit.contracts import OPS

BUNDLES, CHECKPOINTS, SEED = 2000, 100, 1


# --- the campaign ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("kind", "count"), [("bundles", BUNDLES), ("checkpoints", CHECKPOINTS)])
def test_whatever_is_broken_ends_in_an_answer_or_in_one_line(kind: str, count: int) -> None:
    base_folder()
    outcomes = run_campaign(kind, SEED, range(count))
    print(table(outcomes))
    assert len(outcomes) == count
    assert findings(kind, SEED, outcomes) == ""
    reached = {outcome.verdict for outcome in outcomes}
    assert {RAN, FAILED} <= reached, "mutants that tfmx takes are among them, and such that it refuses"


# --- what it starts from ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_bundles_run_as_long_as_nothing_is_changed(tmp_path: Path) -> None:
    bases = read_bases(base_folder())
    assert len(bases) > 20
    for number, (name, draft) in enumerate(bases.items()):
        folder = tmp_path / str(number)
        given = bundle_mutants.given_input(Random(0), draft.manifest, draft, folder)
        draft.write(folder)
        for command in (("inspect", folder), ("run", folder, *given), ("verify", folder)):
            done = tfmx(*command)
            assert (done.code, done.err.count("error")) == (0, 0), (name, command, done)


@pytest.mark.slow
def test_checkpoints_export_as_long_as_nothing_is_changed(tmp_path: Path) -> None:
    for name, files in read_checkpoints(base_folder()).items():
        folder = tmp_path / name
        folder.mkdir()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        done = tfmx("export", checkpoint_mutants.source_of(folder), "-o", tmp_path / "bundle", "--no-verify")
        assert (done.code, done.err.count("error")) == (0, 0), (name, done)


@pytest.mark.slow
def test_a_number_and_a_seed_give_the_same_mutant(tmp_path: Path) -> None:
    bases, checkpoints = read_bases(base_folder()), read_checkpoints(base_folder())
    for number in range(60):
        made = [bundle_mutants.make_mutant(3, number, bases, tmp_path / f"{number}{again}") for again in "ab"]
        assert (made[0].kind, made[0].base, made[0].what) == (made[1].kind, made[1].base, made[1].what)
        assert _manifest(tmp_path / f"{number}a") == _manifest(tmp_path / f"{number}b")
        made = [
            checkpoint_mutants.make_mutant(3, number, checkpoints, tmp_path / f"{number}{again}")
            for again in "cd"
        ]
        assert (made[0].kind, made[0].base, made[0].what) == (made[1].kind, made[1].base, made[1].what)


def _manifest(folder: Path) -> bytes | None:
    """It has the sums of all files."""
    path = folder / "manifest.json"
    return (
        path.read_bytes()
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20
        else None
    )


# --- attached operators ----------------------------------------------------------------------------------


def test_every_operator_that_bundles_may_contain_has_a_template() -> None:
    written = {(template.domain, template.op) for template in templates()}
    assert {(domain, op) for domain, names in OPS.items() for op in names} <= written


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize(
    "template", templates(), ids=lambda template: f"{template.name}({', '.join(template.inputs)})"
)
def test_templates_are_valid_as_they_are(template: Template, is_live: bool) -> None:
    """Or the faults that mutants add to them would never be reached."""
    if template.op == "Scatter":
        pytest.skip(
            "onnx took it back in opset 11, and bundles have 17 or more: onnxruntime refuses it always"
        )
    drawn = template.drawn(Random(0))
    values = [helper.make_tensor_value_info(name, 1, [2, 3]) for name in ("x", "logits")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["logits"])], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    attach(model, drawn, [is_live] * len(drawn.arrays), "logits")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, {"x": np.ones((2, 3), np.float32)})
    assert np.isfinite(found).all()


# --- planted faults --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "count", "verdict"),
    [
        ("pipes_are_opened", "folder", 60, HANG),
        ("contracts_are_not_held", "operator attached", 500, SIGNAL),
        ("manifests_are_not_checked", "manifest fields", 100, INTERNAL),
        ("nothing_is_written", "manifest fields", 200, DIFFERS),
    ],
)
def test_a_check_that_is_taken_out_is_missed(fault: str, kind: str, count: int, verdict: str) -> None:
    base_folder()
    of_kind = (number for number in itertools.count() if bundle_mutants.kind_of(SEED, number) == kind)
    server = (str(Path(__file__).with_name("planted_server.py")), fault)
    outcomes = run_campaign("bundles", SEED, list(itertools.islice(of_kind, count)), server=server)
    assert verdict in {outcome.verdict for outcome in outcomes}


# --- how outcomes are told apart -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code", "err", "verdict"),
    [
        ("run", 0, "", RAN),
        ("inspect", 1, "tfmx: error: no\n", REFUSED),
        ("run", 1, "tfmx: error: no\n", FAILED),
        ("verify", 1, "tfmx: error: onnxruntime cannot load decode.onnx: no\n", REFUSED_BY_ORT),
        ("run", 1, "tfmx: error: internal error: KeyError: 'x'; run it again\n", INTERNAL),
        ("run", 1, "Traceback (most recent call last):\n", TRACEBACK),
        ("run", 1, "tfmx: error: no\nand more\n", TRACEBACK),
        ("verify", 1, "checking the files\nloading PyTorch\ntfmx: error: no\n", FAILED),
        ("run", 1, "checking the files\ntfmx: error: no\n", TRACEBACK),
        ("export", 1, "loading PyTorch\n", TRACEBACK),
        ("run", 1, "", TRACEBACK),
        ("run", 139, "", TRACEBACK),
    ],
)
def test_outcomes_are_told_apart_by_code_and_line(command: str, code: int, err: str, verdict: str) -> None:
    assert judge(command, code, "", err)[0] == verdict


def test_findings_say_how_to_see_them_again() -> None:
    outcome = Outcome(7, "folder", "lstm", "a pipe", BAD[0], "run: other numbers")
    assert "python tests/fuzz bundles --seed 5 --mutant 7" in finding("bundles", 5, outcome)
