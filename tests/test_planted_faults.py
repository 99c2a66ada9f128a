"""The gate has teeth: every planted fault is caught, and the untouched export passes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from planted_faults import BOTH, FAULTS, Folder
from random_models import PLAIN, PLAIN_ATTENTION, random_source

from tfmx.export.parity import FACTOR, Gate, ParityError
from tfmx.export.pipeline import write_files
from tfmx.export.progress import Silent

# Every part that a fault needs: grouped heads, biases, a window on one layer.
CONFIG = replace(PLAIN, windows=(None, 6, None), mixer=replace(PLAIN_ATTENTION, qkv_bias=True))


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate(random_source(CONFIG).reference(), Silent())


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for target in BOTH:
        folders[target] = folder = tmp_path_factory.mktemp(target)
        source = random_source(CONFIG)
        write_files(folder, source.graphs(target, 18, Silent()), source, Silent())
    return folders


@pytest.mark.parametrize("target", BOTH)
def test_the_untouched_export_passes(target: str, gate: Gate, exports: dict[str, Path]) -> None:
    parity = gate.check(exports[target], "append" if target == "portable" else "capacity")
    parity.require()
    assert 0 < parity.worst.ratio <= FACTOR


@pytest.mark.parametrize(
    ("fault", "target"),
    [
        pytest.param(fault, target, id=f"{fault.name}, {target}")
        for fault in FAULTS
        for target in fault.targets
    ],
)
def test_a_planted_fault_is_caught(
    fault, target: str, gate: Gate, exports: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "faulty"
    shutil.copytree(exports[target], folder)
    fault.plant(Folder(folder, target))
    with pytest.raises(ParityError):
        gate.check(folder, "append" if target == "portable" else "capacity").require()


def test_there_are_at_least_20_faults_for_each_target() -> None:
    for target in BOTH:
        assert sum(target in fault.targets for fault in FAULTS) >= 20
