"""What a model takes and what it gives, as data: one definition, for built-in models and for modules of your own.

A module of your own says it in a line each (see protocol.py):

    def inputs(self):
        return tokens(vocab_size=1000, length=512)

    def outputs(self):
        return classes(3, labels=("bad", "so so", "good"))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import nn

from .checks import ConfigError, check_count, check_positive
from .config import HeadKind

ElementKind = Literal["tokens", "vectors", "images"]
_INPUT_NAMES = {"tokens": "input_ids", "vectors": "input_features", "images": "pixel_values"}
OUTPUT_NAMES = {
    "tokens": "logits", "classes": "logits", "values": "values", "embedding": "embedding", "hidden": "last_hidden_state"
}  # fmt: skip
_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """What a sequence consists of, on its way in."""

    kind: ElementKind
    length: int  # the longest; an image has always as many
    vocab_size: int | None = None
    features: int | None = None
    image: tuple[int, int, int] | None = None  # channels, height, width
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @property
    def name(self) -> str:
        return _INPUT_NAMES[self.kind]

    def shape(self, length: int | str) -> tuple[int | str, ...]:
        if self.kind == "images":
            assert self.image is not None
            return ("batch_size", *self.image)
        return ("batch_size", length) if self.features is None else ("batch_size", length, self.features)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The main output."""

    kind: HeadKind
    size: int
    pooled: bool = False  # one for each sequence, (B, size), not one for each element
    only_last: bool = False  # (B, 1, size), of the last real element
    labels: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return OUTPUT_NAMES[self.kind]


# --- inputs -------------------------------------------------------------------------------------------------


def tokens(*, vocab_size: int, length: int) -> Elements:
    """Token ids, int64 (B, T); `length` is the longest T."""
    check_count("vocab_size", vocab_size)
    check_count("length", length)
    return Elements(kind="tokens", vocab_size=vocab_size, length=length)


def vectors(*, features: int, length: int) -> Elements:
    """Numbers, (B, T, features), in the module's precision."""
    check_count("features", features)
    check_count("length", length)
    return Elements(kind="vectors", features=features, length=length)


def images(
    channels: int,
    height: int,
    width: int,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Elements:
    """Images, (B, channels, height, width). Of an image file each value becomes (value / 255 - mean) / std, by channel."""
    for name, size in (("channels", channels), ("height", height), ("width", width)):
        check_count(name, size)
    mean, std = tuple(mean or (0.0,) * channels), tuple(std or (1.0,) * channels)
    for name, numbers in (("mean", mean), ("std", std)):
        if len(numbers) != channels:
            raise ConfigError(
                f"{name} has {len(numbers)} numbers, wanted one for each of {channels} channels"
            )
    for value in std:
        check_positive("std", value)
    return Elements(kind="images", length=1, image=(channels, height, width), mean=mean, std=std)


# --- outputs: one for each element, (B, T, size), or for the whole, (B, size), as the module gives them -----


def classes(count: int, *, labels: Sequence[str] | None = None) -> Answer:
    """Logits of classes; `labels` name them."""
    check_count("classes", count)
    if labels is not None and len(labels) != count:
        raise ConfigError(f"labels has {len(labels)} names, wanted one for each of {count} classes")
    return Answer(kind="classes", size=count, labels=None if labels is None else tuple(labels))


def values(count: int) -> Answer:
    """Numbers that mean something as they are: a regression."""
    check_count("values", count)
    return Answer(kind="values", size=count)


def embedding(size: int) -> Answer:
    """One vector for the whole input."""
    check_count("embedding", size)
    return Answer(kind="embedding", size=size, pooled=True)


def hidden(size: int) -> Answer:
    """One vector for each element."""
    check_count("hidden", size)
    return Answer(kind="hidden", size=size)


def token_logits(vocab_size: int) -> Answer:
    """Logits of tokens, for each element: of the next one in a decoder, of the one in its place in an encoder."""
    check_count("vocab_size", vocab_size)
    return Answer(kind="tokens", size=vocab_size)


def declared(module: _Module, inputs: Elements, outputs: Answer) -> _Module:
    """Somebody else's module with the two declarations: nothing of it is subclassed or changed."""
    for name, value in (("inputs", inputs), ("outputs", outputs)):
        setattr(module, name, lambda value=value: value)
    return module
