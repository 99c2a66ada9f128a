"""Who is measured: each engine at each precision, and how its files are made from the Hugging Face folder.

A candidate's files are made once, into a folder of the cache that is there as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from environments import Environments, call

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXPORTER = ("export", "tfm_model", "runtime", "cli")  # what decides the bytes of a bundle
SHAPES = ("S", "M", "smollm2")
Precision = Literal["int4", "int8", "fp32"]
Command = list[str | Path]


@dataclass(frozen=True, slots=True)
class Making:
    """What a recipe can use."""

    environments: Environments
    shape: Path  # folder of the shape: hf/ and what is made of it
    target: Path  # to be made: a file or a folder

    @property
    def source(self) -> Path:
        return self.shape / "hf"


Recipe = Callable[[Making], list[Command]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    name: str  # on the command line, and of its files
    engine: str  # as the table calls it
    variant: str
    precision: Precision
    environment: str  # that runs it
    recipe: Recipe
    suffix: str = ""

    @property
    def label(self) -> str:
        return f"{self.engine}, {self.variant}" if self.variant else self.engine

    @property
    def worker(self) -> Path:
        cache = "_q8_cache" if self.name == _Q8_CACHE else ""
        return HERE / "workers" / f"{_WORKERS[self.engine]}{cache}_worker.py"

    @property
    def is_ours(self) -> bool:
        return self.engine == "tfmx"


_Q8_CACHE = "llama-q4_0-pure-kv8"  # the same files, another worker
_WORKERS = {
    "llama.cpp": "llama",
    "onnxruntime-genai": "genai",
    "OpenVINO GenAI": "openvino",
    "CTranslate2": "ctranslate2",
    "optimum-onnx": "optimum",
    "PyTorch": "pytorch",
    "tfmx": "tfmx",
}


def _llama_f32(making: Making) -> list[Command]:
    script = making.environments.llama_cpp_source() / "convert_hf_to_gguf.py"
    python = making.environments.python("llama-build")
    return [[python, script, making.source, "--outfile", making.target, "--outtype", "f32"]]


def _llama(kind: str, *flags: str) -> Recipe:
    def recipe(making: Making) -> list[Command]:
        base = made(CANDIDATES["llama-f32"], making.environments, making.shape)
        script = HERE / "workers" / "llama_quantize.py"
        return [[making.environments.python("llama"), script, base, making.target, kind, *flags]]

    return recipe


def _genai(precision: str, *options: str) -> Recipe:
    def recipe(making: Making) -> list[Command]:
        python = making.environments.python("genai-build")
        scratch = making.shape / ".genai"
        command: Command = [python, "-m", "onnxruntime_genai.models.builder", "-i", making.source]
        command += ["-o", making.target, "-p", precision, "-e", "cpu", "-c", scratch]
        return [[*command, "--extra_options", *options] if options else command]

    return recipe


def _openvino(*weights: str) -> Recipe:
    def recipe(making: Making) -> list[Command]:
        script = making.environments.script("openvino-build", "optimum-cli")
        task = ["--task", "text-generation-with-past", "--weight-format", *weights]
        return [[script, "export", "openvino", "--model", making.source, *task, making.target]]

    return recipe


def _ctranslate2(quantization: str) -> Recipe:
    def recipe(making: Making) -> list[Command]:
        script = making.environments.script("ctranslate2-build", "ct2-transformers-converter")
        return [
            [script, "--model", making.source, "--output_dir", making.target, "--quantization", quantization]
        ]

    return recipe


def _optimum(making: Making) -> list[Command]:
    script = making.environments.script("optimum-onnx", "optimum-cli")
    task = ["--task", "text-generation-with-past"]
    return [[script, "export", "onnx", "--model", making.source, *task, making.target]]


def _pytorch(making: Making) -> list[Command]:
    return [["ln", "-s", making.source, making.target]]


def _tfmx(*options: str) -> Recipe:
    def recipe(making: Making) -> list[Command]:
        command: Command = [sys.executable, "-m", "tfmx", "export", making.source, "-o", making.target]
        return [[*command, *options, "--no-verify"]]  # the gate is not what is measured, and takes minutes

    return recipe


def _engine(
    engine: str, environment: str, rows: dict[str, tuple[str, Precision, Recipe]], suffix: str = ""
) -> list[Candidate]:
    return [
        Candidate(
            name=name, engine=engine, variant=variant, precision=precision,
            environment=environment, recipe=recipe, suffix=suffix,
        )
        for name, (variant, precision, recipe) in rows.items()
    ]  # fmt: skip


_TUNED = ("shared_embeddings=true", "prune_lm_head=true")

CANDIDATES: dict[str, Candidate] = {
    candidate.name: candidate
    for candidate in [
        *_engine("tfmx", "tfmx", {
            "tfmx-int4": ("int4", "int4", _tfmx("--quant", "int4", "--quant-uniform")),
            "tfmx-int4-kv8": ("int4, int8 cache", "int4", _tfmx("--quant", "int4", "--quant-uniform", "--kv", "int8")),
            "tfmx-int8": ("int8", "int8", _tfmx("--quant", "int8", "--quant-symmetric", "--quant-activations", "int8")),
            "tfmx-int8-kv8": ("int8, int8 cache", "int8", _tfmx("--quant", "int8", "--quant-symmetric", "--quant-activations", "int8", "--kv", "int8")),
            "tfmx-fp32": ("fp32", "fp32", _tfmx()),
        }),
        *_engine("llama.cpp", "llama", {
            "llama-q4_0": ("Q4_0", "int4", _llama("Q4_0")),
            "llama-q4_0-pure": ("Q4_0 --pure", "int4", _llama("Q4_0", "--pure")),
            _Q8_CACHE: ("Q4_0 --pure, Q8_0 cache", "int4", _llama("Q4_0", "--pure")),
            "llama-q8_0": ("Q8_0", "int8", _llama("Q8_0")),
            "llama-f32": ("F32", "fp32", _llama_f32),
        }, ".gguf"),
        *_engine("onnxruntime-genai", "genai", {
            "genai-int4": ("int4, default", "int4", _genai("int4")),
            "genai-int4-tuned": (
                "int4, shared_embeddings, prune_lm_head, accuracy_level 4", "int4",
                _genai("int4", *_TUNED, "accuracy_level=4"),
            ),
            "genai-int8": ("int8", "int8", _genai("int8")),
            "genai-fp32": ("fp32, shared_embeddings, prune_lm_head", "fp32", _genai("fp32", *_TUNED)),
        }),
        *_engine("OpenVINO GenAI", "openvino", {
            # its default group of 128 does not divide 576 or 896
            "openvino-int4": ("int4, group 64", "int4", _openvino("int4", "--group-size", "64")),
            "openvino-int8": ("int8", "int8", _openvino("int8")),
            "openvino-fp32": ("fp32", "fp32", _openvino("fp32")),
        }),
        *_engine("CTranslate2", "ctranslate2", {
            "ctranslate2-int8": ("int8", "int8", _ctranslate2("int8_float32")),
            "ctranslate2-fp32": ("float32", "fp32", _ctranslate2("float32")),
        }),
        *_engine("optimum-onnx", "optimum-onnx", {"optimum-fp32": ("fp32", "fp32", _optimum)}),
        *_engine("PyTorch", "pytorch", {"pytorch-fp32": ("transformers, fp32", "fp32", _pytorch)}),
    ]
}  # fmt: skip


def made(candidate: Candidate, environments: Environments, shape: Path) -> Path:
    """The candidate's files for a shape, made if they are not there, or not by this recipe and this tfmx."""
    target = shape / f"{candidate.name}{candidate.suffix}"
    part, stamp = shape / f".{target.name}", shape / f".{target.name}.stamp"
    commands = candidate.recipe(Making(environments, shape, part))
    digest = _digest(commands, ROOT if candidate.is_ours else None)
    if not target.exists() or not stamp.exists() or stamp.read_text() != digest:
        _remove(part)
        for command in commands:
            print(f"making {shape.name} for {candidate.label}", file=sys.stderr)
            _run(command, environments)
        _remove(target)
        part.rename(target)
        stamp.write_text(digest)
    return target


def _digest(commands: list[Command], code: Path | None) -> str:
    digest = hashlib.sha256(json.dumps([[str(part) for part in command] for command in commands]).encode())
    if code is not None:
        for file in sorted(
            file for folder in EXPORTER for file in (code / folder).iterdir() if file.is_file()
        ):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def made_source(environments: Environments, shape: str) -> Path:
    """The folder of a shape, with the Hugging Face folder in it."""
    folder = environments.cache / "models" / shape
    target = folder / "hf"
    if not target.exists():
        part = folder / ".hf"
        _remove(part)
        part.mkdir(parents=True)
        print(f"making {shape}", file=sys.stderr)
        _run([sys.executable, HERE / "sources.py", shape, part], environments)
        part.rename(target)
    return folder


def size_of(path: Path) -> float:
    """MB on disk."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6


def _run(command: Command, environments: Environments) -> None:
    # no hub is asked: everything is local
    call([str(part) for part in command], environments.cache / "log.txt", {"HF_HUB_OFFLINE": "1"})


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
