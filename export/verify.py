"""Are the graphs of a folder what PyTorch computes? Asked at the end of an export, and by `tfmx verify --against`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import torch

from .. import TfmxError
from ..runtime.bundle import Bundle, Manifest
from .arithmetic import EXACT, Arithmetic
from .exact_twin import exact_twin
from .fitting import ContextLengthError
from .layout import BlockLayout, Target
from .options import DTYPES
from .parity import Gate, Parity
from .progress import Progress, Silent
from .recipe import stored_layouts
from .shown_layers import Maps
from .source import Source, open_source
from .stitch import GRAPHS_OF_KIND
from .stored import StoredMatrices


class MismatchError(TfmxError):
    """A bundle was not made from the source that it is compared with."""


def verify_against(bundle: Bundle, source: str, progress: Progress | None = None) -> Parity:
    """Repeat the gate for a bundle and the source that it was made from."""
    manifest = bundle.manifest
    try:
        model = open_source(source, DTYPES[manifest.dtype], manifest.max_context, _maps(manifest))
    except ContextLengthError as error:
        raise MismatchError(
            f"{bundle.path} has a context of {manifest.max_context} tokens, {source} cannot have that; give the source that it "
            "was exported from"
        ) from error
    found = (model.signature.kind, model.signature.outputs.size, len(model.spec))
    if found != (manifest.kind, manifest.outputs.size, len(manifest.state)):
        raise MismatchError(
            f"{bundle.path} is a {manifest.kind} with {manifest.outputs.size} outputs and {len(manifest.state)} "
            f"state tensors, {source} a {found[0]} with {found[1]} and {found[2]}; "
            "give the source that it was exported from"
        )
    _check_state(bundle, model, source)
    model.check_module(progress or Silent())
    layouts = stored_layouts(manifest.quant.matrices) if manifest.quant else {}
    arithmetic = Arithmetic(
        activations=manifest.quant.activations if manifest.quant else "float",
        kv="int8" if manifest.has_int8_cache else "float",
    )
    return run_gate(
        bundle.path,
        model,
        manifest.target,
        layouts,
        arithmetic,
        progress or Silent(),
        evened_out=manifest.quant is not None and manifest.quant.rounding in {"smooth", "gptq"},
    )


def _check_state(bundle: Bundle, model: Source, source: str) -> None:
    for has, state in zip(bundle.manifest.state, model.spec, strict=True):
        if (has.past, has.present, has.shape) != (state.past, state.present, state.shape):
            raise MismatchError(
                f"{bundle.path} has a state {has.past} of shape {list(has.shape)}, {source} has {state.past} of {list(state.shape)}; "
                "give the source that it was exported from"
            )


def run_gate(
    folder: Path,
    model: Source,
    target: Target,
    layouts: Mapping[str, BlockLayout],
    arithmetic: Arithmetic,
    progress: Progress,
    *,
    evened_out: bool = False,
) -> Parity:
    """Against PyTorch over the weights as they are stored; where graphs round on the way, without that, and with it.

    `evened_out`: the bundle's weights are, the model's are not.
    """
    kinds, growth = GRAPHS_OF_KIND[model.signature.kind], model.growth(target)
    stored = StoredMatrices(folder, kinds, layouts, target)
    if evened_out:
        model = model.smoothed_as(stored, progress)
    stored.check(model.weight)
    reference = model.reference(stored)
    rounds = target == "ort" and arithmetic != EXACT
    gate = Gate(reference, progress, arithmetic if rounds else EXACT)
    if not rounds:
        return gate.check(folder, growth)
    cache_dtype = ir.DataType.FLOAT if reference.precision == torch.float32 else ir.DataType.FLOAT16
    twins = {kind: exact_twin(folder / f"{kind}.onnx", cache_dtype) for kind in kinds}
    exact = gate.check(folder, growth, twins)
    return exact.with_rounding(gate.check_rounding(folder, growth, stored.all_cache_scales()))


def _maps(manifest: Manifest) -> Maps:
    """The layers whose attention weights the bundle gives."""
    names = {tensor.name for graph in manifest.graphs.values() for tensor in graph.outputs}

    def layers(kind: str) -> tuple[int, ...]:
        return tuple(sorted(int(name.partition(".")[2]) for name in names if name.startswith(f"{kind}.")))

    return Maps(layers("attentions"), layers("encoder_attentions"))
