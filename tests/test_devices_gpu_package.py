"""The real onnxruntime-gpu package on a machine without a GPU, in an environment of its own (256 MB to fetch)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_models import cache_folder
from tiny_bundle import write_bundle

from tfmx.runtime.devices import cuda_problem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VERSION = "1.31.1"
ROOT = Path(__file__).parent.parent
PACKAGES = [f"onnxruntime-gpu=={VERSION}", "numpy", "tokenizers", "jinja2", "markupsafe"]
PACKAGES += ["flatbuffers", "packaging", "protobuf"]  # --no-deps: CUDA's own packages are gigabytes


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that has onnxruntime-gpu and tfmx, kept in the cache folder."""
    folder = cache_folder() / f"onnxruntime-gpu-{VERSION}-py{sys.version_info[0]}{sys.version_info[1]}"
    interpreter = folder / "bin" / "python"
    if not (folder / "complete").exists():
        made = run(sys.executable, "-m", "venv", "--clear", folder)
        assert made.returncode == 0, made.stderr
        installed = run(
            interpreter, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check", *PACKAGES
        )
        if installed.returncode:
            pytest.skip(f"the registry cannot be reached: {installed.stderr.strip().splitlines()[-1]}")
        (folder / "complete").touch()
    package = tmp_path_factory.mktemp("package")
    (package / "tfmx").symlink_to(ROOT)
    return interpreter, package


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "bundle"
    write_bundle(folder, "append")
    return folder


SCRIPT = """
import json, sys
sys.path.insert(0, {package!r})
import tfmx
from tfmx.runtime import devices
{patch}
found = {{}}
for device in ("cuda", "auto"):
    try:
        model = tfmx.load({folder!r}, device=device)
        tokens = [step.token_id for step in model.generate([1, 2, 3], max_new_tokens=3)]
        found[device] = [model.device.kind, model.device.reason, len(tokens)]
    except tfmx.TfmxError as error:
        found[device] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


def load_with(python, folder, patch=""):
    if cuda_problem() is None:
        pytest.skip("this machine has a GPU: the error cannot be provoked")
    interpreter, package = python
    result = run(interpreter, "-c", SCRIPT.format(package=str(package), folder=str(folder), patch=patch))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # nothing of onnxruntime's own complaints
    return json.loads(result.stdout)  # and on stdout nothing but ours


def test_without_a_driver_cuda_is_an_error_and_auto_takes_the_cpu(python, folder):
    found = load_with(python, folder)
    line = "there is no NVIDIA driver here (libcuda.so.1 is not found); install one, or run with --device cpu"
    assert found["cuda"] == ["DeviceError", f"CUDA cannot be used: {line}"]
    assert found["auto"] == ["cpu", f"no CUDA: {line}", 3]


def test_without_the_cuda_libraries_they_are_named(python, folder):
    found = load_with(python, folder, "devices._driver_problem = lambda: None")
    assert found["cuda"][1].startswith("CUDA cannot be used: CUDA libraries are missing (libcublasLt.so.13, ")
    assert found["auto"][0] == "cpu"


def test_the_probe_notices_what_the_earlier_checks_missed(python, folder):
    patch = "devices._driver_problem = devices._library_problem = lambda: None"
    found = load_with(python, folder, patch)
    assert found["cuda"][1].startswith("CUDA cannot be used: a test run failed (")
    assert found["auto"][0] == "cpu"


def test_a_session_that_silently_fell_back_is_noticed(python, folder):
    """Without the option that forbids it onnxruntime gives a CPU session and only logs: the provider is compared."""
    patch = "devices.cuda_problem = lambda: None"
    found = load_with(python, folder, patch)
    line = "onnxruntime gave CPUExecutionProvider instead of CUDAExecutionProvider"
    assert found["cuda"] == ["DeviceError", line]
    assert found["auto"] == ["DeviceError", line]
