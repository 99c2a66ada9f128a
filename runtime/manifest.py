"""What manifest.json says: bundle format 1, as frozen dataclasses that cannot be inconsistent.

The file has one canonical form (UTF-8, sorted keys, indent 2, a newline at its end) and carries the sha256
of that form without the key `manifest_sha256`, so that every changed byte of it is noticed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from .. import TfmxError
from .strict_json import SchemaError, decode, encode

FORMAT = 1
MANIFEST = "manifest.json"
WEIGHTS = "weights.bin"  # the one file that graphs may name as external data
DIGEST_KEY = "manifest_sha256"

DType = Literal["float32", "float16", "int64", "int32"]
Growth = Literal["append", "capacity", "constant"]
ITEM_SIZES: dict[str, int] = {"float32": 4, "float16": 2, "int64": 8, "int32": 4}


class BundleError(TfmxError):
    """A bundle that is damaged, incomplete, of another format, or not of our making."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if self.size < 0 or len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise BundleError(
                f"a file entry has size {self.size} and sha256 {self.sha256[:70]!r}, which cannot be"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo:
    kind: Literal["gguf", "huggingface", "python"]
    files: dict[str, FileInfo]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    name: str
    dtype: DType
    shape: tuple[int | str, ...]  # a text is a dimension that is bound at run time


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphInfo:
    file: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    def input(self, name: str) -> TensorInfo | None:
        return next((tensor for tensor in self.inputs if tensor.name == name), None)

    def output(self, name: str) -> TensorInfo | None:
        return next((tensor for tensor in self.outputs if tensor.name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateInfo:
    past: str  # the graph input
    present: str  # the graph output that becomes the next past
    dtype: Literal["float32", "float16"]
    shape: tuple[int | str, ...]  # of the past, e.g. ("batch_size", 3, "past_sequence_length", 64)
    growth: Growth


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationInfo:
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    sampling: dict[str, Any]  # the checkpoint's own defaults; used only when asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    format: int
    tfmx: str
    tools: dict[str, str]
    source: SourceInfo
    target: Literal["ort", "portable"]
    dtype: Literal["fp32", "fp16"]
    opset: int
    vocab_size: int
    max_context: int
    model: dict[str, Any]  # the architecture's config, for people: the runtime does not read it
    graphs: dict[str, GraphInfo]
    state: tuple[StateInfo, ...]
    generation: GenerationInfo
    parity: dict[str, Any] | None
    files: dict[str, FileInfo]

    def __post_init__(self) -> None:
        _check_graphs(self)
        _check_state(self)
        if self.vocab_size < 1 or self.max_context < 1:
            raise BundleError(f"{MANIFEST}: vocab_size and max_context must be at least 1")
        ids = (self.generation.bos_token_id, self.generation.pad_token_id, *self.generation.eos_token_ids)
        for token_id in ids:
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise BundleError(
                    f"{MANIFEST}: generation names token {token_id}, the vocabulary has {self.vocab_size}"
                )
        for name in self.files:
            check_bare_name(name)

    def to_bytes(self) -> bytes:
        content = encode(self)
        return _canonical({**content, DIGEST_KEY: _digest(content)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        try:
            content = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
            canonical = _canonical(content)
        except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
            raise BundleError(f"{MANIFEST} is damaged: it is not JSON ({error})") from error
        if not isinstance(content, dict):
            raise BundleError(f"{MANIFEST} is damaged: it holds no object")
        found = content.get("format")
        if type(found) is not int or found != FORMAT:
            raise BundleError(f"{MANIFEST} has format {found!r}, this tfmx reads {FORMAT}; export it again")
        if content.pop(DIGEST_KEY, None) != _digest(content) or canonical != data:
            raise BundleError(
                f"{MANIFEST} was changed after the export (its own sha256 differs); export it again"
            )
        try:
            return decode(cls, content)
        except SchemaError as error:
            raise BundleError(f"{MANIFEST}: {error}") from error


def check_bare_name(name: str) -> None:
    """Refuse a file name that could lead out of the bundle's folder, on any system."""
    if not name or name in {".", ".."} or name == MANIFEST or any(c in "/\\:\0" or ord(c) < 32 for c in name):
        raise BundleError(f"{MANIFEST} names the file {name!r}; a bundle's files have bare names")


def _check_graphs(manifest: Manifest) -> None:
    graphs = manifest.graphs
    if not {"prefill", "decode"} <= graphs.keys() <= {"prefill", "decode", "select", "sample"}:
        raise BundleError(
            f"{MANIFEST}: graphs are {sorted(graphs)}, expected decode and prefill (and select, sample)"
        )
    if ("select" in graphs) != ("sample" in graphs):
        raise BundleError(f"{MANIFEST}: graphs are {sorted(graphs)}; select and sample come together")
    for role, graph in graphs.items():
        if graph.file not in manifest.files:
            raise BundleError(f"{MANIFEST}: the {role} graph's file {graph.file!r} is not among the files")
        for tensors in (graph.inputs, graph.outputs):
            names = [tensor.name for tensor in tensors]
            if len(set(names)) != len(names):
                raise BundleError(f"{MANIFEST}: the {role} graph names an input or output twice")
            for tensor in tensors:
                _check_shape(tensor.shape, f"{role} graph, {tensor.name}")
    for role in ("prefill", "decode"):
        logits = graphs[role].output("logits")
        if graphs[role].input("input_ids") is None or logits is None or logits.dtype != "float32":
            raise BundleError(f"{MANIFEST}: the {role} graph must take input_ids and give float32 logits")


def _check_state(manifest: Manifest) -> None:
    growths = {entry.growth for entry in manifest.state}
    if growths >= {"append", "capacity"}:
        raise BundleError(f"{MANIFEST}: state mixes growth append and capacity")
    for entry in manifest.state:
        if entry.shape[:1] != ("batch_size",):
            raise BundleError(
                f"{MANIFEST}: state {entry.past} must begin with batch_size, its shape is {entry.shape}"
            )
        grows = [dim for dim in entry.shape[1:] if isinstance(dim, str)]
        if len(grows) != (0 if entry.growth == "constant" else 1):
            raise BundleError(
                f"{MANIFEST}: state {entry.past} of growth {entry.growth} has the shape {entry.shape}"
            )
        for role in ("prefill", "decode"):
            past = manifest.graphs[role].input(entry.past)
            present = manifest.graphs[role].output(entry.present)
            if past is None or present is None:
                raise BundleError(
                    f"{MANIFEST}: the {role} graph lacks {entry.past} or {entry.present} of the state"
                )
            if (past.dtype, past.shape) != (entry.dtype, entry.shape) or present.dtype != entry.dtype:
                raise BundleError(f"{MANIFEST}: the {role} graph and the state disagree about {entry.past}")


def _check_shape(shape: tuple[int | str, ...], place: str) -> None:
    for dim in shape:
        if dim == "" or (isinstance(dim, int) and not 0 <= dim < 2**31):
            raise BundleError(f"{MANIFEST}: {place} has the shape {list(shape)}")


def _canonical(content: object) -> bytes:
    text = json.dumps(content, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8")


def _digest(content: object) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
