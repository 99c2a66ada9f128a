"""The gate has teeth for the whole family: a fault planted into the translation of any kind fails the export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tfmx.export import lower_recurrent
from tfmx.export.lower_attention import AttentionLowering
from tfmx.export.lower_basic import FLOAT, BasicLowering
from tfmx.export.lower_recurrent import RecurrentLowering
from tfmx.export.options import DTYPES
from tfmx.export.parity import Gate, ParityError
from tfmx.export.pipeline import write_files
from tfmx.export.progress import Silent
from tfmx.export.source import Source, open_source


@dataclass(frozen=True)
class Fault:
    name: str
    preset: str
    owner: object
    attribute: str
    change: Callable[..., object]  # the original → the faulty one


def wrong_argument(index: int, change: Callable[[object], object]) -> Callable[..., object]:
    def wrap(original: Callable[..., object]) -> Callable[..., object]:
        def faulty(*arguments: object, **options: object) -> object:
            changed = list(arguments)
            changed[index] = change(changed[index])
            return original(*changed, **options)

        return faulty

    return wrap


def without(field: str, value: object = None) -> Callable[..., object]:
    """The node that is lowered lacks something."""
    return wrong_argument(1, lambda node: replace(node, **{field: value}))


def negated(original: Callable[..., object]) -> Callable[..., object]:
    return lambda self, *arguments: self.b.op("Neg", original(self, *arguments))


def scaled(factor: float) -> Callable[..., object]:
    def wrap(original: Callable[..., object]) -> Callable[..., object]:
        return lambda self, *a, **o: self.b.op("Mul", original(self, *a, **o), self.b.const(factor, FLOAT))

    return wrap


def strict_triangle(original: object) -> object:
    class Shifted:
        def __getattr__(self, name: str) -> object:
            return (lambda array: np.tril(array, -1)) if name == "tril" else getattr(np, name)

    return Shifted()


def unpacked(original: Callable[..., object]) -> Callable[..., object]:
    """Pads at the front of a row are taken for its elements."""

    def faulty(self: RecurrentLowering, mask: object) -> object:
        order, rank = original(self, mask)
        columns = self.first_columns(self.b.dim(mask, 1))
        order = self.b.op(
            "Add",
            self.b.op("Mul", order, self.b.const(0)),
            self.b.op("Unsqueeze", columns, self.b.const([1])),
        )
        return order, rank

    return faulty


def zero_state_of_empty_rows(original: Callable[..., object]) -> Callable[..., object]:
    """A row of pads forgets: what the LSTM op does with a length of 0."""

    def faulty(self: RecurrentLowering, inputs: list, attributes: dict, *, hidden_size: int) -> object:
        y, *state = original(self, inputs, attributes, hidden_size=hidden_size)
        return [y, *(value.producer().inputs[1] for value in state)]

    return faulty


def swapped_activations(original: Callable[..., object]) -> Callable[..., object]:
    return lambda self, inputs, attributes, *, hidden_size: original(
        self, inputs, {"candidate": "sigmoid", "output": "tanh"}, hidden_size=hidden_size
    )


def three_rounds(original: Callable[..., object]) -> Callable[..., object]:
    def faulty(self: RecurrentLowering, *arguments: object) -> object:
        before, self.max_context = self.max_context, 8  # gates near a half forget soon
        try:
            return original(self, *arguments)
        finally:
            self.max_context = before

    return faulty


FAULTS = [
    Fault("the source's pads are seen", "encoder-decoder", AttentionLowering, "cross_attention", wrong_argument(4, lambda _: None)),
    Fault("cross scores are scaled wrongly", "encoder-decoder", AttentionLowering, "cross_attention",
          wrong_argument(5, lambda a: a | {"scale": a["scale"] * 1.01})),
    Fault("pads are seen", "set", AttentionLowering, "attention", without("mask")),
    Fault("a set is causal", "set", AttentionLowering, "attention", without("causal", True)),
    Fault("later elements are seen", "relative", AttentionLowering, "attention", without("causal", False)),
    Fault("distances are turned round", "relative", AttentionLowering, "key_distance", negated),
    Fault("Shaw's values are missing", "relative", AttentionLowering, "attention", without("distance_values")),
    Fault("Shaw's keys are missing", "relative", AttentionLowering, "attention", without("distance_keys")),
    Fault("distances are clipped too early", "relative", AttentionLowering, "distance_index", wrong_argument(2, lambda most: most - 1)),
    Fault("T5's buckets are shifted", "t5-bias", AttentionLowering, "distance_index", wrong_argument(2, lambda most: most - 1)),
    Fault("T5's bias is missing", "t5-bias", AttentionLowering, "attention", without("distance_bias")),
    Fault("ALiBi is missing", "alibi", AttentionLowering, "attention", without("slopes")),
    Fault("values are of another head", "full-rank-values", AttentionLowering, "attention", without("scale", 0.34)),
    Fault("the factor of a key is missing", "random-features", RecurrentLowering, "_features", scaled(1.001)),
    Fault("an element does not see itself", "random-features", lower_recurrent, "np", strict_triangle),
    Fault("the past is forgotten", "random-features-unit", RecurrentLowering, "random_feature_attention", without("state", [])),
    Fault("pads are summed", "random-features", RecurrentLowering, "random_feature_attention", without("mask")),
    Fault("features turn too fast", "random-features-unit", RecurrentLowering, "random_feature_attention", without("shrink", 2.02)),
    Fault("rows are not packed", "lstm", RecurrentLowering, "_packing", unpacked),
    Fault("empty rows forget", "lstm", RecurrentLowering, "lstm", zero_state_of_empty_rows),
    Fault("gates have other activations", "lstm", RecurrentLowering, "lstm", swapped_activations),
    Fault("the recurrence ends early", "ablated-lstm", RecurrentLowering, "recurrence", three_rounds),
    Fault("its weights take the wrong gate", "ablated-lstm", RecurrentLowering, "recurrence_weights",
          lambda original: lambda self, keep, add, mask: original(self, add, keep, mask)),
    Fault("a class token at the end", "class-token", BasicLowering, "prepend", lambda _: lambda self, x, first: self.b.op(
        "Concat", x, self.b.op("Expand", first, self.b.op("Concat", self.b.dim(x, 0), self.b.const([1]), self.b.dim(x, 2), axis=0)), axis=1)),
    Fault("patches are read by columns", "class-token", BasicLowering, "patches", lambda _: lambda self, image, node, patch: self.b.op(
        "Reshape", self.b.op("Transpose", self.b.op("Reshape", image, self.b.const([-1, 3, 16 // patch, patch, 24 // patch, patch])),
                             perm=[0, 4, 2, 1, 3, 5]), self.b.const([-1, 6, 192]))),
]  # fmt: skip


@cache
def source_and_gate(preset: str) -> tuple[Source, Gate]:
    source = open_source(f"preset:{preset}", DTYPES["fp32"], None)
    return source, Gate(source.reference(), Silent())


def check(preset: str, folder: Path) -> None:
    source, gate = source_and_gate(preset)
    write_files(folder, source.graphs("portable", 18, Silent()), source, Silent())
    gate.check(folder, "append").require()


@pytest.mark.parametrize("preset", sorted({fault.preset for fault in FAULTS}))
def test_without_a_fault_it_passes(preset: str, tmp_path: Path) -> None:
    check(preset, tmp_path)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.preset}: {fault.name}")
def test_a_planted_fault_is_caught(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source_and_gate(fault.preset)  # PyTorch's side is not faulty
    monkeypatch.setattr(fault.owner, fault.attribute, fault.change(getattr(fault.owner, fault.attribute)))
    with pytest.raises(ParityError):
        check(fault.preset, tmp_path)
