"""What manifest.json says: bundle format 3, as frozen dataclasses that cannot be inconsistent.

The file is written in one canonical form (UTF-8, sorted keys, indent 2, a newline at its end) and carries the
sha256 of its own bytes without the line of `manifest_sha256`, so that every changed byte of it is noticed.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from ..strict_json import SchemaError, decode, encode
from .manifest_checks import ATTENTIONS, check_manifest
from .manifest_parts import (
    HIDDEN,
    INPUT_NAMES,
    ITEM_SIZES,
    MANIFEST,
    BundleError,
    FileInfo,
    GenerationInfo,
    GraphInfo,
    InputInfo,
    Kind,
    OutputInfo,
    QuantInfo,
    SourceInfo,
    StateInfo,
    TensorInfo,
)

__all__ = [
    "DIGEST_KEY",
    "FORMAT",
    "HIDDEN",
    "ITEM_SIZES",
    "MANIFEST",
    "WEIGHTS",
    "BundleError",
    "FileInfo",
    "GenerationInfo",
    "GraphInfo",
    "InputInfo",
    "Kind",
    "Manifest",
    "OutputInfo",
    "QuantInfo",
    "SourceInfo",
    "StateInfo",
    "TensorInfo",
]

FORMAT = 3
WEIGHTS = "weights.bin"  # the one file that graphs may name as external data
DIGEST_KEY = "manifest_sha256"
_DIGEST_LINE = re.compile(rb'^  "manifest_sha256": "([0-9a-f]{64})",\n', re.MULTILINE)  # of the top level


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    format: int
    tfmx: str
    tools: dict[str, str]
    source: SourceInfo
    kind: Kind
    target: Literal["ort", "portable"]
    dtype: Literal["fp32", "fp16"]
    quant: QuantInfo | None
    opset: int
    inputs: InputInfo
    outputs: OutputInfo
    vocab_size: int | None  # tokens that it gives; None when it gives something else
    max_context: int  # longest sequence of the decoder; of an encoder: the longest input
    model: dict[str, Any]  # the architecture's config, for people: the runtime does not read it
    graphs: dict[str, GraphInfo]
    state: tuple[StateInfo, ...]
    generation: GenerationInfo
    parity: dict[str, Any] | None
    quality: dict[str, Any] | None  # how far quantisation took it from float32, on text
    files: dict[str, FileInfo]

    def __post_init__(self) -> None:
        check_manifest(self)

    @property
    def generates(self) -> bool:
        """Whether tokens can be asked of it, one after the other."""
        return self.kind != "encoder" and self.outputs.kind == "tokens"

    @property
    def longest(self) -> int:
        """What no sequence that a graph is fed is longer than, with what is cached."""
        return max(self.max_context, self.inputs.length)

    @property
    def fixed_outputs(self) -> list[str]:
        """What the encode graph computes once for the decoder."""
        return [entry.present for entry in self.state if entry.growth == "fixed"]

    @property
    def has_int8_cache(self) -> bool:
        return any(entry.dtype == "int8" for entry in self.state)

    @property
    def is_recurrent(self) -> bool:
        return any(entry.growth == "constant" for entry in self.state)

    @property
    def used_graphs(self) -> list[str]:
        """What every answer needs: all but recurrent states are decoded with the prefill graph too."""
        used = {"encode", "prefill"} | ({"decode"} if self.is_recurrent else set())
        return [role for role in self.graphs if role in used]

    @property
    def sees_pads(self) -> bool:
        """Whether inputs of different lengths may run together: a graph without a mask would take pads for elements."""
        graph = self.graphs["prefill" if self.kind == "decoder" else "encode"]
        return graph.input("attention_mask") is not None

    def main_input(self, role: str) -> str:
        """What a graph reads: the user's input, or the tokens of the answer."""
        return self.inputs.name if role == "encode" or self.kind == "decoder" else INPUT_NAMES["tokens"]

    def extras(self, role: str) -> list[str]:
        """The optional outputs of a graph: attention maps."""
        return [tensor.name for tensor in self.graphs[role].outputs if ATTENTIONS.fullmatch(tensor.name)]

    def to_bytes(self) -> bytes:
        content = encode(self)
        return _canonical({**content, DIGEST_KEY: _digest(_canonical(content))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        try:
            content = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
            raise BundleError(f"{MANIFEST} is damaged: it is not JSON ({error})") from error
        if not isinstance(content, dict):
            raise BundleError(f"{MANIFEST} is damaged: it holds no object")
        found = content.get("format")
        if type(found) is not int or found != FORMAT:
            raise BundleError(f"{MANIFEST} has format {found!r}, this tfmx reads {FORMAT}; export it again")
        line = _DIGEST_LINE.search(data)  # the rest, as bytes: writing it anew takes 20 ms
        if line is None or _digest(data[: line.start()] + data[line.end() :]) != line[1].decode():
            raise BundleError(
                f"{MANIFEST} was changed after the export (its own sha256 differs); copy or export it again"
            )
        try:
            return decode(cls, {key: value for key, value in content.items() if key != DIGEST_KEY})
        except SchemaError as error:
            raise BundleError(f"{MANIFEST}: {error}") from error


def _canonical(content: object) -> bytes:
    text = json.dumps(content, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8")


def _digest(canonical: bytes) -> str:
    return hashlib.sha256(canonical).hexdigest()


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
