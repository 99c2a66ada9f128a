"""Runs the encode graph: whole inputs at once, padded on the left where they are ragged (and the graph can tell)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .engine import Graphs, IntArray
from .inputs import Array, pad_left
from .session import ort_device, ort_value

_SHRINK_FROM = 128  # columns: shorter inputs leave little in the arena


@dataclass(frozen=True, slots=True)
class Encoded:
    outputs: dict[str, Any]  # OrtValues
    mask: IntArray  # (B, S): 1 where the encoder's sequence is real


def encode(graphs: Graphs, rows: Sequence[Array], outputs: Sequence[str]) -> Encoded:
    """Run rows (as `InputReader` gives them), for these outputs; fixed states stay on the device.

    Rows of one length, where the graph cannot see pads.
    """
    info = graphs.manifest.inputs
    if graphs.manifest.sees_pads:
        data, mask = pad_left(rows, info.shape, rows[0].dtype)
    else:
        data, mask = np.stack(rows), np.zeros((len(rows), 0), np.int64)
    session = graphs.session("encode")
    arrays = {info.name: data, "attention_mask": mask}
    feeds = {name: array for name, array in arrays.items() if name in session.takes}
    host, here = ort_device("cpu"), ort_device(graphs.device.kind)
    fixed = {state.present: state for state in graphs.manifest.state if state.growth == "fixed"}
    found = session.run_values(
        list(feeds),
        [ort_value(array, host) for array in feeds.values()],
        list(outputs),
        [here if name in fixed else host for name in outputs],
        shrink=info.image is not None or data.shape[1] >= _SHRINK_FROM,
    )
    values = dict(zip(outputs, found, strict=True))
    lengths = [values[name].shape()[state.axis] for name, state in fixed.items()]
    return Encoded(values, with_first(mask, max(lengths, default=mask.shape[1])))


def with_first(mask: IntArray, columns: int) -> IntArray:
    """A mask of so many columns: what the graph puts before the input (a class token, patches) is real."""
    return np.pad(mask, ((0, 0), (columns - mask.shape[1], 0)), constant_values=1)
