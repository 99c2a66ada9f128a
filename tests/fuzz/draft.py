"""A bundle in memory, to be changed and written again with sums that fit: what reaches the checks behind the sums."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import onnx
from fuzz.extremes import json_text

MANIFEST, DIGEST_KEY = "manifest.json", "manifest_sha256"
CHOOSERS = {"select", "sample"}  # graphs that choose tokens on the GPU


@dataclass
class Draft:
    base: str
    manifest: dict[str, Any]  # as JSON, so that it may hold anything
    files: dict[str, bytes]  # all but the graphs and the manifest
    graphs: dict[str, onnx.ModelProto]  # by role
    what: list[str] = field(default_factory=list)  # what was changed, for the report

    @classmethod
    def read(cls, base: str, folder: Path) -> Draft:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        del manifest[DIGEST_KEY]
        files = {name: (folder / name).read_bytes() for name in manifest["files"]}
        graphs = {
            role: onnx.ModelProto.FromString(files.pop(graph["file"]))
            for role, graph in manifest["graphs"].items()
        }
        return cls(base, manifest, files, graphs)

    def copy(self) -> Draft:
        graphs = {}
        for role, graph in self.graphs.items():
            graphs[role] = onnx.ModelProto()
            graphs[role].CopyFrom(graph)
        return Draft(self.base, copy.deepcopy(self.manifest), dict(self.files), graphs)

    def role(self, rng: Random) -> str:
        """One of the graphs; seldom one that runs on a GPU alone, which the CPU only audits."""
        here = [role for role in self.graphs if role not in CHOOSERS]
        return rng.choice(list(self.graphs) if rng.random() < 0.05 or not here else here)

    def sign(self) -> None:
        """Sizes and sums as the files now are; before the manifest itself is changed."""
        self.manifest["files"] = {
            name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in self.contents().items()
        }

    def contents(self) -> dict[str, bytes]:
        graphs = {
            self.manifest["graphs"][role]["file"]: model.SerializeToString(deterministic=True)
            for role, model in self.graphs.items()
        }
        return dict(sorted((self.files | graphs).items()))

    def write(self, folder: Path) -> None:
        """A whole bundle, signed."""
        self.sign()
        folder.mkdir(parents=True, exist_ok=True)
        write_files(folder, self.contents(), self.manifest)


def write_files(folder: Path, contents: dict[str, bytes], manifest: object) -> None:
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    (folder / MANIFEST).write_bytes(signed_manifest(manifest))


def signed_manifest(manifest: object) -> bytes:
    """The manifest's own form, with its digest; NaN and infinities pass, which JSON has no words for."""
    canonical = _canonical(manifest)
    if not isinstance(manifest, dict):
        return canonical
    return _canonical({**manifest, DIGEST_KEY: hashlib.sha256(canonical).hexdigest()})


def _canonical(content: object) -> bytes:
    text = json_text(content, sort_keys=True, indent=2, ensure_ascii=False)
    return (text + "\n").encode("utf-8", "surrogatepass")
