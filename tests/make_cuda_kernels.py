"""Rewrites data/cuda_kernels.json: which operators onnxruntime has CUDA kernels for, in which versions and types.

    python tests/make_cuda_kernels.py path/to/onnxruntime/checkout

onnxruntime publishes that as a table, docs/OperatorKernels.md. Kept are the facts about the operators that
bundles may contain (runtime/ops.py), at the opsets that they may import.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import onnx

from tfmx.runtime.audit.contracts import OPS
from tfmx.runtime.ops import OPSETS

DATA = Path(__file__).parent / "data" / "cuda_kernels.json"
DOCUMENT = "docs/OperatorKernels.md"
PROVIDER = "CUDAExecutionProvider"

_DOMAIN = re.compile(r"\|\*\*Operator Domain:\*\* \*(?P<domain>[\w.]+)\*")
_TYPES = re.compile(r"\*\*(?P<variable>\w+)\*\* = (?P<types>[^*<]+)")
_PARAMETER = re.compile(r"\*(?P<side>in|out)\* \w+:\*\*(?P<type>[\w()]+)\*\*")


class Row(NamedTuple):
    domain: str
    op: str
    parameters: str
    versions: str
    types: str


def read_rows(document: str, provider: str) -> list[Row]:
    """The provider's rows; a further row of an operator leaves its name and parameters empty, here they are whole."""
    [section] = re.findall(rf"## Operators implemented by {provider}\n(.*?)(?:\n## |\Z)", document, re.DOTALL)
    rows: list[Row] = []
    domain = ""
    for line in section.splitlines():
        if found := _DOMAIN.match(line):
            domain = "" if found["domain"] == "ai.onnx" else found["domain"]
            continue
        cells = line.split("|")[1:-1]
        if len(cells) != 4 or not any(cells) or cells[0].startswith((" Op Name", "---")):
            continue
        op, parameters, versions, types = cells
        if not op:
            op, parameters = rows[-1].op, rows[-1].parameters
        rows.append(Row(domain, op, parameters, versions, types))
    return rows


def read_versions(text: str) -> list[int | None]:
    """First and last version; None where the row leaves the end open."""
    if text.endswith("+"):
        return [int(text[:-1]), None]
    first, last = re.findall(r"\d+", text) if "," in text else (text, text)
    return [int(first), int(last)]


def read_types(text: str) -> dict[str, list[str]]:
    found = {
        match["variable"]: re.findall(r"tensor\((\w+)\)", match["types"]) for match in _TYPES.finditer(text)
    }
    return {variable: types for variable, types in found.items() if types}


def read_signature(text: str) -> dict[str, list[str]]:
    """The type of each parameter, in order: a variable such as T, or a fixed type."""
    newest = text.split("<br><br>or<br><br>", maxsplit=1)[0]
    parameters = [(match["side"], match["type"]) for match in _PARAMETER.finditer(newest)]
    return {
        "inputs": [kind for side, kind in parameters if side == "in"],
        "outputs": [kind for side, kind in parameters if side == "out"],
    }


def since_versions(domain: str, op: str) -> set[int]:
    """The versions of the operator that our opsets mean; empty when onnx does not define it."""
    found = set()
    for opset in OPSETS[domain]:
        if domain == "" and onnx.defs.has(op, opset):
            found.add(onnx.defs.get_schema(op, opset).since_version)
    return found


def kernel_facts(document: str) -> tuple[dict[str, list[dict]], dict[str, dict]]:
    kernels: dict[str, list[dict]] = {}
    signatures: dict[str, dict] = {}
    for row in read_rows(document, PROVIDER):
        if row.op not in OPS.get(row.domain, ()):
            continue
        name = f"{row.domain or 'ai.onnx'}::{row.op}"
        versions = since_versions(row.domain, row.op)
        first, last = since = read_versions(row.versions)
        if not versions:
            signatures[name] = read_signature(row.parameters)
        elif not any(first <= version <= (last or version) for version in versions):
            continue  # for opsets that we do not write
        kernels.setdefault(name, []).append({"since": since, "types": read_types(row.types)})
    return dict(sorted(kernels.items())), dict(sorted(signatures.items()))


def to_text(facts: dict[str, object]) -> str:
    """JSON with a line for each operator, or for each of its kernels: how people read and compare it."""
    lines = []
    for key, value in facts.items():
        if not isinstance(value, dict):
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
            continue
        entries = []
        for name, entry in value.items():
            several = isinstance(entry, list) and len(entry) > 1
            text = "[\n   " + ",\n   ".join(map(json.dumps, entry)) + "]" if several else json.dumps(entry)
            entries.append(f"  {json.dumps(name)}: {text}")
        lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(entries) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(checkout: str) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", checkout, *arguments], check=True, capture_output=True, text=True
        ).stdout

    kernels, signatures = kernel_facts(git("show", f"HEAD:{DOCUMENT}"))
    commit = git("rev-parse", "HEAD").strip()
    facts = {
        "source": f"https://github.com/microsoft/onnxruntime/blob/{commit}/{DOCUMENT} ({PROVIDER})",
        "version": git("show", "HEAD:VERSION_NUMBER").strip(),
        "commit": commit,
        "signatures": signatures,
        "kernels": kernels,
    }
    DATA.write_text(to_text(facts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
