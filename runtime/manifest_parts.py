"""The records that a manifest is made of; each refuses what it cannot be by itself.

What a bundle takes and gives is said once, in `InputInfo` and `OutputInfo`; the names of the graph inputs and
outputs follow from it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from .. import TfmxError

MANIFEST = "manifest.json"
HIDDEN = "last_hidden_state"  # what the encode graph of an encoder-decoder gives, besides fixed states

Kind = Literal["decoder", "encoder", "encoder-decoder"]
DType = Literal["float32", "float16", "int64", "int32", "int8"]
StateType = Literal["float32", "float16", "int8"]
# append: the cache grows by concatenation; capacity: a buffer, written in place; constant: a recurrent state;
# fixed: computed once by the encode graph, and only read afterwards
Growth = Literal["append", "capacity", "constant", "fixed"]
InputKind = Literal["tokens", "vectors", "images"]
OutputKind = Literal["tokens", "classes", "values", "embedding", "hidden"]

_MATRIX = re.compile(r"float|int(4|8)-(16|32|64|128)(-zeros)?(-shifts)?(-fine)?")

ITEM_SIZES: dict[str, int] = {"float32": 4, "float16": 2, "int64": 8, "int32": 4, "int8": 1}
INPUT_NAMES: dict[InputKind, str] = {
    "tokens": "input_ids",
    "vectors": "input_features",
    "images": "pixel_values",
}
OUTPUT_NAMES: dict[OutputKind, str] = {
    "tokens": "logits",
    "classes": "logits",
    "values": "values",
    "embedding": "embedding",
    "hidden": HIDDEN,
}


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
    kind: Literal["gguf", "huggingface", "tfmx", "preset", "python"]
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
    present: str  # the graph output that becomes the next past; of a fixed one, encode's output
    dtype: StateType
    shape: tuple[int | str, ...]  # of the past, e.g. ("batch_size", 3, "past_sequence_length", 64)
    growth: Growth

    def __post_init__(self) -> None:
        if self.shape[:1] != ("batch_size",):
            raise BundleError(
                f"{MANIFEST}: state {self.past} must begin with batch_size, its shape is {self.shape}"
            )
        if sum(isinstance(dim, str) for dim in self.shape[1:]) != (0 if self.growth == "constant" else 1):
            raise BundleError(
                f"{MANIFEST}: state {self.past} of growth {self.growth} has the shape {self.shape}"
            )

    @property
    def axis(self) -> int:
        """Which axis is the sequence; not of a constant one."""
        return next(i for i, dim in enumerate(self.shape) if i and isinstance(dim, str))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputInfo:
    """What the user gives: read by the encode graph where there is one, else by prefill and decode."""

    kind: InputKind
    vocab_size: int | None  # of tokens: ids are below it
    features: int | None  # of vectors: numbers in each
    image: tuple[int, ...] | None  # of images: channels, height, width
    mean: tuple[float, ...] | None  # of images, by channel: (value / 255 - mean) / std
    std: tuple[float, ...] | None
    length: int  # the longest input; of images: patches, and the class token

    def __post_init__(self) -> None:
        own = {"tokens": {"vocab_size"}, "vectors": {"features"}, "images": {"image", "mean", "std"}}[
            self.kind
        ]
        for name in ("vocab_size", "features", "image", "mean", "std"):
            if (getattr(self, name) is not None) != (name in own):
                raise BundleError(
                    f"{MANIFEST}: inputs of kind {self.kind} must have {', '.join(sorted(own))} and no others"
                )
        sizes = (self.vocab_size, self.features, self.length, *(self.image or ()))
        if any(size is not None and not 1 <= size < 2**31 for size in sizes):
            raise BundleError(f"{MANIFEST}: the sizes of inputs must be at least 1")
        if self.image is not None:
            self._check_image(self.image, self.mean or (), self.std or ())

    @property
    def name(self) -> str:
        """The graph input."""
        return INPUT_NAMES[self.kind]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one element of a sequence, or of one image."""
        if self.image is not None:
            return self.image
        return () if self.features is None else (self.features,)

    @staticmethod
    def _check_image(image: tuple[int, ...], mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        if len(image) != 3 or len(mean) != image[0] or len(std) != image[0]:
            raise BundleError(
                f"{MANIFEST}: an image is channels, height, width, with mean and std for each channel; "
                f"found {list(image)}, {len(mean)} and {len(std)}"
            )
        if not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
            raise BundleError(f"{MANIFEST}: mean and std must be finite, and std above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputInfo:
    """The main output of the graph that answers: encode of an encoder, else prefill and decode."""

    kind: OutputKind
    name: str  # the graph output
    size: int  # numbers of one position, or of one pooled input
    pooled: bool  # one vector an input, (B, size); else one a position, (B, T, size)
    labels: tuple[str, ...] | None  # of classes, in their order

    def __post_init__(self) -> None:
        if self.name != OUTPUT_NAMES[self.kind]:
            raise BundleError(
                f"{MANIFEST}: outputs of kind {self.kind} are named {OUTPUT_NAMES[self.kind]}, not {self.name}"
            )
        if not 1 <= self.size < 2**31:
            raise BundleError(f"{MANIFEST}: outputs.size is {self.size}, it must be at least 1")
        if self.pooled and self.kind == "tokens":
            raise BundleError(f"{MANIFEST}: outputs of kind tokens cannot be pooled")
        if self.labels is not None and (self.kind != "classes" or len(self.labels) != self.size):
            raise BundleError(
                f"{MANIFEST}: outputs have {len(self.labels)} labels for {self.size} {self.kind}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantInfo:
    """How the weights were quantised, for people and for `tfmx verify`: the graphs say it themselves."""

    weights: Literal["int8", "int4"]  # what was asked for
    rounding: Literal["nearest", "search", "smooth", "gptq", "kept"]  # kept: the checkpoint's own blocks
    activations: Literal["float", "int8"]  # int8: the inputs of quantised matrices are rounded as well
    matrices: dict[
        str, str
    ]  # each matrix: int4-32, int4-32-zeros-fine (its inputs are rounded in two steps), float

    def __post_init__(self) -> None:
        for name, form in self.matrices.items():
            if not _MATRIX.fullmatch(form):
                raise BundleError(
                    f"{MANIFEST}: quant.matrices has {form!r} for {name}, expected e.g. int4-32-zeros"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationInfo:
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    decoder_start_token_id: int | None  # what the decoder of an encoder-decoder begins with
    sampling: dict[str, Any]  # the checkpoint's own defaults; used only when asked for

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that are named."""
        ids = (self.bos_token_id, self.pad_token_id, self.decoder_start_token_id, *self.eos_token_ids)
        return tuple(token_id for token_id in ids if token_id is not None)
