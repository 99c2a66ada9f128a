"""One input through a bundle of any kind, for every output: the main one, hidden states, attention maps."""

from __future__ import annotations

from collections.abc import Sequence

from .encoder import encode, with_first
from .engine import Graphs, IntArray, open_engine
from .inputs import Array
from .manifest import HIDDEN

Outputs = dict[str, Array]


def apply_encoder(graphs: Graphs, rows: Sequence[Array]) -> list[Outputs]:
    """All rows, each without its pads: in one run, or those of one length in one where the graph cannot see pads."""
    manifest = graphs.manifest
    names = [manifest.outputs.name, *manifest.extras("encode")]
    found: dict[int, Outputs] = {}
    for group in _together(rows, can_pad=manifest.sees_pads):
        encoded = encode(graphs, [rows[index] for index in group], names)
        arrays = {name: value.numpy() for name, value in encoded.outputs.items()}
        for place, index in enumerate(group):
            found[index] = {name: without_pads(array, encoded.mask, place) for name, array in arrays.items()}
    return [found[index] for index in range(len(rows))]


def _together(rows: Sequence[Array], *, can_pad: bool) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(0 if can_pad else len(row), []).append(index)
    return list(groups.values())


def apply_decoder(graphs: Graphs, row: Array) -> Outputs:
    return open_engine(graphs, 1, len(row)).score(row, graphs.manifest.extras("prefill"))


def apply_encoder_decoder(graphs: Graphs, source: Array, target: Sequence[int]) -> Outputs:
    """`target`: what the decoder reads, its start token included."""
    manifest = graphs.manifest
    names = [HIDDEN, *manifest.extras("encode")]
    encoded = encode(graphs, [source], [*names, *manifest.fixed_outputs])
    outputs = open_engine(graphs, 1, len(target), encoded).score(target, manifest.extras("prefill"))
    return outputs | {name: encoded.outputs[name].numpy()[0] for name in names}


def without_pads(array: Array, mask: IntArray, row: int) -> Array:
    """One row of (B, size), (B, T, size) or, an attention map, (B, H, T, T)."""
    found: Array = array[row]
    if found.ndim == 1:
        return found
    real = with_first(mask, array.shape[-2])[row].astype(bool)
    return found[real] if found.ndim == 2 else found[:, real][:, :, real]
