"""The Python environments of the peers: which packages each needs, and how it is made.

What runs a peer and what converts models for it are kept apart: CTranslate2 and OpenVINO import torch or transformers
where they find them, and would be charged for the memory and the start of both. torch comes first wherever it is needed,
so that nothing pulls in another build of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "torch==2.13.0"  # pip's own index has CUDA in it: TORCH_INDEX=https://download.pytorch.org/whl/cpu has not
NUMPY = "numpy==2.4.6"
LLAMA_CPP = "0.3.36"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    steps: tuple[tuple[str, ...], ...]  # one `pip install` after the other
    variables: dict[str, str] = field(default_factory=dict)  # while installing


def _llama(instructions: str) -> Environment:
    """Its sdist is built, for this very CPU."""
    return Environment(
        steps=(
            ("scikit-build-core[pyproject]", "cmake", "ninja"),
            ("--no-build-isolation", f"llama-cpp-python @ {{sdist:llama-cpp-python=={LLAMA_CPP}}}", NUMPY),
        ),
        variables={"CMAKE_ARGS": f"{instructions} -DLLAVA_BUILD=OFF"},
    )


ENVIRONMENTS = {
    "llama": _llama("-DGGML_NATIVE=ON"),
    "llama-without-amx": _llama(
        "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_BF16=ON"
    ),
    # as its converter's requirements say; transformers 5 takes every tokenizer of a Qwen2 folder for Qwen's own
    "llama-build": Environment(
        steps=((TORCH,), ("transformers==4.57.6", "sentencepiece", "numpy~=2.2.6", "protobuf<5")),
    ),
    "genai": Environment(
        steps=(("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1", NUMPY),),
    ),
    "genai-build": Environment(
        steps=(
            (TORCH,),
            (
                "onnxruntime-genai==0.18.0",
                "onnxruntime==1.31.1",
                "onnx",
                "onnx-ir",
                "transformers==5.22.2",
                NUMPY,
            ),
        ),
    ),
    "openvino": Environment(
        steps=(("openvino==2026.4.1", "openvino-genai==2026.4.1.0", NUMPY),),
    ),
    "openvino-build": Environment(
        steps=(
            (TORCH,),
            (
                "openvino==2026.4.1",
                "openvino-tokenizers",
                "nncf==3.4.0",
                "optimum==2.3.0",
                "transformers==5.5.4",
                "requests",
            ),
            ("--no-deps", "optimum-intel==2.2.0"),  # wants torchvision, hence another torch, for images only
        ),
    ),
    "ctranslate2": Environment(steps=(("ctranslate2==4.8.4", NUMPY),)),
    "ctranslate2-build": Environment(
        steps=((TORCH,), ("ctranslate2==4.8.4", "transformers==5.22.2", "sentencepiece", NUMPY)),
    ),
    "optimum-onnx": Environment(steps=((TORCH,), ("optimum-onnx[onnxruntime]==0.1.0",))),
    "pytorch": Environment(steps=((TORCH,), ("transformers==5.22.2", NUMPY))),
}


class PeerError(RuntimeError):
    """An environment could not be made."""


@dataclass(frozen=True, slots=True)
class Environments:
    cache: Path
    amx: bool = True  # False: for virtual machines that announce it and then trap

    def python(self, name: str) -> Path:
        """The interpreter of an environment, which is made if it is not there yet or has another recipe."""
        if name == "tfmx":
            return Path(sys.executable)
        if name == "llama" and not self.amx:
            name = "llama-without-amx"
        folder = self.cache / "env" / name
        mark = folder / ".installed"
        recipe = _digest(ENVIRONMENTS[name])
        if not mark.exists() or mark.read_text() != recipe:
            self._make(name, folder)
            mark.write_text(recipe)
        return folder / "bin" / "python"

    def script(self, name: str, script: str) -> Path:
        """A command that a package of the environment installs."""
        return self.python(name).parent / script

    def llama_cpp_source(self) -> Path:
        """llama.cpp itself, which the sdist carries: its converter is there and nowhere else."""
        return self._unpacked(f"llama-cpp-python=={LLAMA_CPP}") / "vendor" / "llama.cpp"

    def versions(self, name: str) -> dict[str, str]:
        """What is installed, for the record."""
        command = [str(self.python(name)), "-m", "pip", "list", "--format=json"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {entry["name"]: entry["version"] for entry in json.loads(listed)}

    def _make(self, name: str, folder: Path) -> None:
        print(f"installing {name} into {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        self._call([sys.executable, "-m", "venv", str(folder)])
        python = str(folder / "bin" / "python")
        self._call([python, "-m", "pip", "install", "--upgrade", "pip"])
        environment = ENVIRONMENTS[name]
        extra = os.environ.get("TORCH_INDEX")
        for step in environment.steps:
            index = ["--extra-index-url", extra] if extra and TORCH in step else []
            packages = [self._filled(package, python) for package in step]
            path = f"{folder / 'bin'}:{os.environ['PATH']}"  # cmake and ninja of this environment
            variables = {**environment.variables, "PATH": path}
            self._call([python, "-m", "pip", "install", *index, *packages], variables)

    def _filled(self, package: str, python: str) -> str:
        """`name @ {sdist:name==version}` with the unpacked folder in its place."""
        if "{sdist:" not in package:
            return package
        name, rest = package.split("{sdist:")
        return name + self._unpacked(rest.rstrip("}"), python).as_uri()

    def _unpacked(self, requirement: str, python: str = "") -> Path:
        folder = self.cache / "sdist" / requirement
        if not folder.exists():
            part = folder.with_name(f".{requirement}")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            name = requirement.split("==", maxsplit=1)[0]
            command = [python, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
            self._call([*command, "--no-binary", name, "--dest", str(part), requirement])
            with tarfile.open(next(part.glob("*.tar.gz"))) as archive:
                archive.extractall(part, filter="data")
            part.rename(folder)
        return next(path for path in folder.iterdir() if path.is_dir())

    def _call(self, command: list[str], variables: dict[str, str] | None = None) -> None:
        call(command, self.cache / "log.txt", variables)


def call(command: list[str], log: Path, variables: dict[str, str] | None = None) -> None:
    """Run to the end, its words into the log; below everything else that the machine does."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(f"\n$ {' '.join(command)}\n")
        file.flush()
        done = subprocess.run(
            ["nice", "-n", "10", *command],
            check=False, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **(variables or {})},
        )  # fmt: skip
    if done.returncode:
        raise PeerError(f"{command[0]} gave exit code {done.returncode}; see the end of {log}")


def _digest(environment: Environment) -> str:
    return hashlib.sha256(json.dumps([environment.steps, environment.variables]).encode()).hexdigest()
