"""What a bundle is, takes and gives, in words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.manifest import Manifest, QuantInfo

_SHOWN = 6  # labels of classes


def describe_length(manifest: Manifest) -> str:
    if manifest.kind == "encoder" and manifest.inputs.image is not None:
        return describe_inputs(manifest)
    if manifest.kind == "encoder":
        return f"up to {manifest.max_context:,} positions"
    if manifest.kind == "encoder-decoder":
        return f"source up to {manifest.inputs.length:,} positions, context {manifest.max_context:,}"
    return f"context {manifest.max_context:,}"


def describe_inputs(manifest: Manifest) -> str:
    inputs = manifest.inputs
    if inputs.image is not None:
        channels, height, width = inputs.image
        return f"images of {channels} x {height} x {width} (channels, height, width), {inputs.length:,} positions"
    if inputs.features is not None:
        what = f"vectors of {inputs.features:,} numbers"
    else:
        what = f"tokens of {inputs.vocab_size:,}"
    apart = "" if manifest.sees_pads else "; cannot see pads, so different lengths run apart"
    return f"{what}, up to {inputs.length:,}{apart}"


def describe_pixels(manifest: Manifest) -> str | None:
    """How the values of an image become inputs."""
    if manifest.inputs.mean is None or manifest.inputs.std is None:
        return None
    mean, std = (
        ", ".join(f"{value:.4g}" for value in values)
        for values in (manifest.inputs.mean, manifest.inputs.std)
    )
    return f"(value / 255 - mean) / std, mean {mean}, std {std}"


def describe_outputs(manifest: Manifest) -> str:
    outputs = manifest.outputs
    each = "the whole input" if outputs.pooled else "each position"
    names = ""
    if outputs.labels is not None:
        more = ", ..." if len(outputs.labels) > _SHOWN else ""
        names = f": {', '.join(outputs.labels[:_SHOWN])}{more}"
    return f"{outputs.kind}, {outputs.size:,} numbers ({outputs.name}) for {each}{names}"


def describe_numbers(manifest: Manifest) -> str:
    """fp32; int4 in fp32; fp32, cache int8."""
    weights = manifest.dtype if manifest.quant is None else f"{manifest.quant.weights} in {manifest.dtype}"
    return f"{weights}, cache int8" if manifest.has_int8_cache else weights


def describe_matrices(quant: QuantInfo) -> str:
    """120 int4-32-zeros, 1 int8-32: bits and weights in a block."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(quant.matrices.values()).most_common())
