"""What the README tells people to type works."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import exported

import tfmx
from tfmx.cli.entry import group
from tfmx.runtime import manifest
from tfmx.runtime.bundle import Bundle

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def shell_lines() -> list[str]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    typed = [line.removeprefix("$ ") for line in lines if line.startswith(("$ ", "make ", "pip ", "tfmx "))]
    return [line.split("   #")[0].rstrip() for line in typed]


def test_the_readme_begins_with_the_two_commands() -> None:
    assert [line for line in shell_lines() if line.startswith("make")][:2] == ["make demo", "make test"]


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in shell_lines():
        if line.startswith("make "):
            assert line.split()[1] in targets, line


def test_every_extra_exists() -> None:
    extras = set(re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    named = re.findall(r"(?:\.|whl)\[([a-z,]+)\]", README)
    assert named
    for names in named:
        assert set(names.split(",")) <= extras


def test_the_wheel_that_is_installed_is_the_one_that_is_made() -> None:
    assert f"dist/tfmx_onnx-{tfmx.__version__}-py3-none-any.whl" in README


@pytest.mark.parametrize("line", [line for line in shell_lines() if line.startswith("tfmx ")])
def test_a_command_line_is_understood(line: str) -> None:
    """Parsed by the command itself: its name, options and their values."""
    _, name, *arguments = shlex.split(line)
    context = group.make_context("tfmx", ["doctor"])
    command = group.get_command(context, name)
    assert command is not None, line
    command.make_context(name, arguments, parent=context)


def test_the_command_table_names_every_command_and_option_of_export() -> None:
    context = group.make_context("tfmx", ["doctor"])
    for name in group.list_commands(context):
        assert f"`tfmx {name} " in README or f"`tfmx {name}`" in README
    export = group.get_command(context, "export")
    assert export is not None
    for parameter in export.params:
        for option in parameter.opts:
            if option.startswith("--") and option not in {"--debug", "--help", "--out"}:
                assert option in README, option


def test_the_python_example_runs(tmp_path: Path) -> None:
    shutil.copytree(exported()[0], tmp_path / "smollm2")
    [code] = [block for block in blocks("python") if "tfmx.load(" in block]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_format_section_names_every_key_of_the_manifest() -> None:
    keys = [*manifest.Manifest.__dataclass_fields__, manifest.DIGEST_KEY]
    for key in keys:
        assert f"`{key}`" in README, key
    assert f"format {manifest.FORMAT}" in README


def test_the_format_section_names_every_file_of_a_bundle() -> None:
    for name in Bundle.open(exported()[0]).manifest.files:
        assert f"`{name}`" in README, name


def test_links_to_files_of_the_repository_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
