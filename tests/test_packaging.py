"""The wheel holds `tfmx/` whole and nothing else, and works where only the runtime was installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import get_args

import pytest
from tiny_bundle import write_bundle

import tfmx
from tfmx.runtime.extras import Extra, install_advice

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LISTED = PYPROJECT["tool"]["setuptools"]["packages"]
NOT_SHIPPED = {"tests", "examples", "benchmarks"}
ROOT_MODULES = {"__init__.py", "__main__.py", "strict_json.py"}

INFO = f"tfmx_onnx-{tfmx.__version__}.dist-info"

# What pip says when it is the network that failed, not the package.
_UNREACHABLE = (
    "NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError",
    "Temporary failure in name resolution",
)  # fmt: skip


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=570, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` makes, of a copy, in which an earlier build left a module that is no more."""
    folder = tmp_path_factory.mktemp("wheel")
    litter = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=litter)
    stale = source / "build" / "lib" / "tfmx" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    with_this_python = (f"BIN={Path(sys.executable).parent}", "INSTALLED=")  # instead of a .venv of its own
    done = run("make", "--no-print-directory", "-C", source, "wheel", *with_this_python)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = (source / "dist").iterdir()
    assert done.stdout == f"dist/{found.name}\n"
    return found


def shipped_files() -> set[str]:
    """What the wheel should hold of ours."""
    found = {f"tfmx/{name}" for name in (*ROOT_MODULES, "py.typed")}
    for package in LISTED[1:]:
        folder = ROOT.joinpath(*package.split(".")[1:])
        files = [
            path for path in folder.iterdir() if path.suffix in {".py", ".txt"}
        ]  # and texts to measure on
        found |= {f"tfmx/{path.relative_to(ROOT).as_posix()}" for path in files}
    return found


def test_every_package_on_disk_is_listed():
    on_disk = {"tfmx"}
    for path in ROOT.glob("[!.]*/**/__init__.py"):
        parts = path.parent.relative_to(ROOT).parts
        if parts[0] not in NOT_SHIPPED | {"build", "dist"}:
            on_disk.add(".".join(("tfmx", *parts)))
    assert sorted(LISTED) == sorted(on_disk)


def test_every_folder_with_python_in_it_is_a_package_or_known_not_to_ship():
    folders = {path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/**/*.py")}
    listed = {package.split(".")[1] for package in LISTED[1:]}
    assert folders - NOT_SHIPPED - {"build", "dist"} == listed


def test_no_stray_module_lies_at_the_root():
    assert {path.name for path in ROOT.glob("*.py")} == ROOT_MODULES


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path):
    info = INFO
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"tfmx", info}
    assert {name for name in names if name.startswith("tfmx/")} == shipped_files()
    assert f"{info}/licenses/LICENSE" in names


def test_the_wheel_asks_for_no_more_than_running_needs(wheel: Path):
    metadata = zipfile.ZipFile(wheel).read(f"{INFO}/METADATA").decode()
    wanted = {
        line.split(":")[1].strip() for line in metadata.splitlines() if line.startswith("Requires-Dist")
    }
    assert "Name: tfmx-onnx" in metadata.splitlines()
    always = {requirement.split(">")[0] for requirement in wanted if "extra ==" not in requirement}
    assert always == {"numpy", "tokenizers", "jinja2", "click", "rich"}
    assert any(requirement.startswith("torch==2.13.0") and "export" in requirement for requirement in wanted)


# The name `tfmx` on the index is another project, and ours is not there yet: neither may be asked of it.
_FROM_INDEX = re.compile(
    r"""\b(tfmx\[ | pip\ install (\s+-\S+ | \s+'[^']*')* \s+['"]?tfmx([-_]onnx)? (?![-_/.\w]))""", re.VERBOSE
)


def advice_that_fetches_from_the_index(text: str) -> list[str]:
    return [match.group() for match in _FROM_INDEX.finditer(text)]


def made_here(part: str) -> bool:
    """What tools leave in a clone, and nobody reads."""
    return part.startswith(".") or part.endswith(".egg-info") or part in {"build", "dist"}


def test_no_text_says_to_install_what_is_somebody_elses():
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in ROOT.rglob("*")
        if path.suffix in {".md", ".py", ".toml", ".txt", ".yml", ".yaml", ".json"} or path.name == "Makefile"
        if path.is_file() and not any(made_here(part) for part in path.relative_to(ROOT).parts)
    }
    assert {"README.md", "devices.py", "help.txt", "pyproject.toml", "Makefile"} <= {
        path.name for path in texts
    }
    found = {
        str(path.relative_to(ROOT)): advice_that_fetches_from_the_index(text) for path, text in texts.items()
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("`pip install '{}[cpu]'`", 1),
        ("needs {}[images]", 1),
        ("pip install {}", 1),
        ("pip install {}-onnx", 1),
        ("pip install '{}-onnx[cpu]'", 1),
        ("pip install -U 'rich' {}_onnx now", 1),
        ("pip install '.[cpu]' in a clone of tfmx", 0),
        ("pip install 'dist/tfmx_onnx-0.1.0-py3-none-any.whl[cpu]'", 0),
        ("`pip install onnxruntime`, tfmx needs it", 0),
    ],
)
def test_planted_advice_is_caught(text: str, count: int):
    """`{}` is the name, filled in here so that the test above does not find this file."""
    assert len(advice_that_fetches_from_the_index(text.replace("{}", "tfmx"))) == count


def test_the_advice_works_in_a_clone_and_with_the_wheel():
    extras = set(PYPROJECT["project"]["optional-dependencies"])
    assert set(get_args(Extra)) <= extras
    for extra in get_args(Extra):
        assert f"pip install '.[{extra}]'" in install_advice(extra)
        assert advice_that_fetches_from_the_index(install_advice(extra)) == []


# --- installed, with the extra `cpu` alone ---------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment that holds the wheel with its extra `cpu`, and what it needs."""
    folder = tmp_path_factory.mktemp("installed")
    assert run(sys.executable, "-m", "venv", folder).returncode == 0
    bin_folder = folder / ("Scripts" if os.name == "nt" else "bin")
    done = run(bin_folder / "python", "-m", "pip", "install", "-q", "--retries", "1", f"{wheel}[cpu]")
    if done.returncode and any(sign in done.stderr for sign in _UNREACHABLE):
        pytest.skip("the package registry cannot be reached from here")
    assert done.returncode == 0, done.stderr
    return bin_folder


def run_there(bin_folder: Path, *command: object, cwd: Path) -> str:
    """Run in that environment, in a folder where nothing of ours lies, without anything inherited."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    program, *arguments = command
    done = run(bin_folder / str(program), *arguments, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


_REPORT = """
import importlib.util, json, time
start = time.perf_counter()
import tfmx
tfmx.load
seconds = time.perf_counter() - start
print(json.dumps({
    "file": tfmx.__file__, "seconds": seconds,
    "there": [name for name in ("torch", "onnx", "transformers", "onnxscript") if importlib.util.find_spec(name)],
}))
"""

_GENERATE = """
import sys, tfmx
model = tfmx.load(sys.argv[1])
print([step.token_id for step in model.generate("Hello", max_new_tokens=6)])
"""


@pytest.mark.slow
def test_it_imports_without_torch_and_is_small(installed: Path, tmp_path: Path):
    report = json.loads(run_there(installed, "python", "-c", _REPORT, cwd=tmp_path))
    assert Path(report["file"]).is_relative_to(installed.parent)
    assert report["there"] == []
    packages = Path(report["file"]).parent.parent
    sizes = {
        path.name: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in packages.iterdir()
    }
    own, all_of_it = sizes["tfmx"], sum(sizes.values()) - sizes.get("pip", 0) - sizes.get("setuptools", 0)
    again = [
        json.loads(run_there(installed, "python", "-c", _REPORT, cwd=tmp_path))["seconds"] for _ in range(3)
    ]
    print(f"\ninstalled: tfmx {own / 1e6:.1f} MB, with all that it needs {all_of_it / 1e6:.0f} MB")
    print(
        f"`import tfmx; tfmx.load`: {report['seconds']:.2f} s the first time, {min(again):.2f} s after that"
    )
    assert own < 5e6
    assert all_of_it < 300e6  # onnxruntime, numpy and tokenizers; torch alone would be more


@pytest.mark.slow
def test_the_command_line_answers(installed: Path, tmp_path: Path):
    assert "Usage: tfmx" in run_there(installed, "tfmx", "--help", cwd=tmp_path)
    assert tfmx.__version__ in run_there(installed, "tfmx", "--version", cwd=tmp_path)
    assert "Usage: " in run_there(installed, "python", "-m", "tfmx", "--help", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["capacity", "append"])
def test_it_runs_a_bundle(installed: Path, tmp_path: Path, flavour: str):
    write_bundle(tmp_path / "bundle", flavour)
    tokens = json.loads(run_there(installed, "python", "-c", _GENERATE, "bundle", cwd=tmp_path))
    here = run(sys.executable, "-c", _GENERATE, tmp_path / "bundle")
    assert tokens
    assert tokens == json.loads(here.stdout), here.stderr
