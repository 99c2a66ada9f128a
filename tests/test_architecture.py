"""Who may import whom, what an import pulls in, what is public, and the size and names of files.

The table is that of ARCHITECTURE.md. It is read from the sources (an AST walk, also inside functions), and
from the modules that new interpreters really load.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tfmx

ROOT = Path(__file__).parent.parent
FOLDERS = ("tfm_model", "export", "runtime", "cli")
MINE = "root"  # __init__.py: the version and the errors

# folder: the folders of ours that it may import, besides itself
OURS = {
    MINE: {"runtime", "cli"},  # `tfmx.load`, `python -m tfmx`
    "tfm_model": {MINE},
    "export": {MINE, "tfm_model", "runtime"},
    "runtime": {MINE},
    "cli": {MINE, "tfm_model", "export", "runtime"},
}
# folder: the packages of others that it may import
OTHERS = {
    MINE: set(),
    "tfm_model": {"gguf", "numpy", "safetensors", "tokenizers", "torch"},
    "export": {"numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "torch"},
    "runtime": {"jinja2", "numpy", "onnxruntime", "PIL", "tokenizers"},
    "cli": {"click", "numpy", "PIL", "rich"},
}
# folder: what it may import only inside functions, so that `tfmx --help` answers at once
LATE = {
    MINE: {"runtime"},
    "runtime": {"PIL"},
    "cli": {"tfm_model", "export", "runtime", "numpy", "PIL", "rich"},
}


@dataclass(frozen=True)
class Import:
    line: int
    folder: str | None  # of ours, or None
    package: str | None  # of others, or None
    is_late: bool  # inside a function, or for type checkers alone
    is_absolute: bool

    @property
    def target(self) -> str:
        return self.folder or self.package or ""


def find_imports(path: Path, source: str | None = None) -> list[Import]:
    """All imports of a file, wherever they stand; those of the standard library left out."""
    depth = len(path.relative_to(ROOT).parts) - 1  # 0 for a file at the root
    own = path.relative_to(ROOT).parts[0] if depth else MINE
    tree = ast.parse(source if source is not None else path.read_text(encoding="utf-8"))
    found = []
    for node, is_late in _walk(tree, is_late=False):
        if isinstance(node, ast.Import):
            found += [_absolute(alias.name, node.lineno, is_late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(_absolute(node.module or "", node.lineno, is_late))
        elif isinstance(node, ast.ImportFrom):
            outside = node.level > depth  # `from ..`, or `from .` at the root
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            for name in names:
                folder = (name if name in FOLDERS else MINE) if outside else own
                found.append(Import(node.lineno, folder, None, is_late, is_absolute=False))
    return [entry for entry in found if entry.folder or entry.package not in sys.stdlib_module_names]


def _walk(node: ast.AST, *, is_late: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = is_late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            inside = True
        yield child, inside
        yield from _walk(child, is_late=inside)


def _absolute(name: str, line: int, is_late: bool) -> Import:
    first, *rest = name.split(".")
    if first != "tfmx":
        return Import(line, None, first, is_late, is_absolute=True)
    folder = rest[0] if rest and rest[0] in FOLDERS else MINE
    return Import(line, folder, None, is_late, is_absolute=True)


def breaches(path: Path, source: str | None = None) -> list[str]:
    """What the table forbids in a file, a line each."""
    place = path.relative_to(ROOT)
    own = place.parts[0] if len(place.parts) > 1 else MINE
    found = []
    for entry in find_imports(path, source):
        where = f"{place}:{entry.line}"
        if entry.folder and entry.is_absolute:
            found.append(f"{where} imports tfmx by its name; siblings import each other relatively")
        if entry.folder not in {None, own, *OURS[own]}:
            found.append(f"{where} imports our {entry.folder}")
        if entry.package and entry.package not in OTHERS[own]:
            found.append(f"{where} imports {entry.package}")
        if entry.target in LATE.get(own, ()) and not entry.is_late:
            found.append(f"{where} imports {entry.target} when it is loaded; do it inside the function")
    return found


def package_files() -> list[Path]:
    return [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]


def project_files() -> list[Path]:
    """Every file of the project; not what tools leave beside it."""
    found = []
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if not _is_litter(name)]
        found += [Path(folder) / name for name in names if not name.endswith(".pyc")]
    return sorted(found)


def _is_litter(folder: str) -> bool:
    hidden = folder.startswith(".") and folder != ".ci"
    return hidden or folder in {"__pycache__", "build", "dist"} or folder.endswith(".egg-info")


# --- who may import whom ---------------------------------------------------------------------------------


def test_folders_import_only_what_the_table_allows():
    assert [line for path in package_files() for line in breaches(path)] == []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("runtime/x.py", "import torch"),
        ("runtime/x.py", "def f():\n    from onnx import helper"),
        ("runtime/x.py", "from ..export.stitch import Target"),
        ("runtime/x.py", "from .. import tfm_model"),
        ("runtime/x.py", "from tfmx.runtime import bundle"),
        ("tfm_model/x.py", "if TYPE_CHECKING:\n    from ..runtime import Bundle"),
        ("tfm_model/x.py", "import onnxruntime as ort"),
        ("export/x.py", "import transformers"),
        ("export/x.py", "from ..cli import main"),
        ("cli/x.py", "from ..runtime import load"),
        ("cli/x.py", "from rich.console import Console"),
        ("cli/x.py", "class A:\n    import numpy"),
        ("__init__.py", "from .runtime import load"),
    ],
)
def test_a_planted_import_is_caught(place: str, source: str):
    assert breaches(ROOT / place, source)


@pytest.mark.parametrize(
    ("place", "source"),
    [
        (
            "runtime/x.py",
            "import os\nfrom .. import TfmxError\nfrom .bundle import Bundle\nfrom . import model",
        ),
        ("export/x.py", "from ..runtime.bundle import Bundle\nimport onnx_ir.passes"),
        ("cli/x.py", "import click\ndef f():\n    from ..export import pipeline\n    import rich"),
        ("__init__.py", "if TYPE_CHECKING:\n    from .runtime import load"),
    ],
)
def test_allowed_imports_are_not_caught(place: str, source: str):
    assert breaches(ROOT / place, source) == []


# --- what an import pulls in -----------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("tfmx", "numpy onnxruntime torch onnx onnx_ir click rich tokenizers jinja2"),
        (
            "tfmx.runtime",
            "onnxruntime numpy torch onnx onnx_ir onnxscript transformers click rich safetensors gguf",
        ),
        ("tfmx.runtime.bundle", "onnxruntime torch onnx click rich"),
        ("tfmx.cli", "torch onnx onnxruntime numpy rich tokenizers jinja2"),
    ],
)
def test_an_import_pulls_in_nothing_heavy(module: str, heavy: str):
    loaded = json.loads(run_python(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"))
    assert sorted(set(heavy.split()) & {name.split(".")[0] for name in loaded}) == []


def test_help_shows_what_is_imported_late():
    show = "import pydoc, sys, {0}; print(pydoc.plain(pydoc.render_doc({0})))"
    assert "    load(path: 'str | os.PathLike[str]', *, device: " in run_python(show.format("tfmx"))
    assert "Open a bundle and make it ready to run." in run_python(show.format("tfmx"))
    for late in ("class Model(", "class SamplingOptions(", "    load(path: "):
        assert late in run_python(show.format("tfmx.runtime"))


def test_the_runtime_turns_telemetry_off_before_onnxruntime_is_there():
    code = "import os, sys, tfmx.runtime; print(os.environ['ORT_DISABLE_TELEMETRY'], 'onnxruntime' in sys.modules)"
    assert run_python(code).split() == ["1", "False"]
    assert run_python(code, ORT_DISABLE_TELEMETRY="0").split() == ["1", "False"]


_WATCH = """import importlib, os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            print("found", os.environ.get("ORT_DISABLE_TELEMETRY"))
sys.meta_path.insert(0, Watch())
importlib.import_module(MODULE)
import onnxruntime
"""


def modules_that_import_onnxruntime() -> list[str]:
    files = [path for path in package_files() if any(i.package == "onnxruntime" for i in find_imports(path))]
    return [".".join(("tfmx", *path.relative_to(ROOT).with_suffix("").parts)) for path in files]


@pytest.mark.parametrize("module", modules_that_import_onnxruntime())
def test_no_module_loads_onnxruntime_with_telemetry_on(module: str):
    assert run_python(f"MODULE = {module!r}\n{_WATCH}").split() == ["found", "1"]


# --- what is public --------------------------------------------------------------------------------------


def test_the_public_names_are_these():
    assert sorted(tfmx.__all__) == ["InputError", "TfmxError", "__version__", "load"]
    public = {name for name in vars(tfmx) if not name.startswith("_")}
    modules = {*FOLDERS, "strict_json"}  # there once they were imported
    assert public - {*modules, "annotations", "TYPE_CHECKING", "load"} == {"InputError", "TfmxError"}


def test_every_public_name_is_there():
    for name in tfmx.__all__:
        assert getattr(tfmx, name) is not None
    assert re.fullmatch(r"\d+\.\d+\.\d+", tfmx.__version__)
    assert callable(tfmx.load)
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        _ = tfmx.lode


def test_errors_of_users_have_one_root():
    assert issubclass(tfmx.InputError, tfmx.TfmxError)
    assert issubclass(tfmx.TfmxError, Exception)


# --- files -----------------------------------------------------------------------------------------------

_VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
# Spelled in two parts, so that this file does not find itself.
_ELSEWHERE = re.compile(r"\.\." + r"/shared\b|(?<![\w.])/" + r"work(?!\w)")


def test_no_file_refers_to_the_machine_it_was_written_on():
    found = []
    for path in project_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in _ELSEWHERE.finditer(text)]
    assert found == []


def test_file_names_say_what_is_in_them():
    assert [str(path) for path in project_files() if path.suffix == ".py" and path.stem in _VAGUE] == []


def test_files_are_short_enough_to_read():
    too_long = []
    for path in project_files():
        if path.suffix == ".py":
            limit = 600 if path.is_relative_to(ROOT / "tests") else 350
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > limit:
                too_long.append(f"{path.relative_to(ROOT)} has {lines} lines, {limit} are the limit")
    assert too_long == []


def test_every_file_opens_by_saying_what_it_is_for():
    silent = [path for path in project_files() if path.suffix == ".py" and path.stat().st_size]
    silent = [path for path in silent if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []
