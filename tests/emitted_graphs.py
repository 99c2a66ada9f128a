"""Every graph that the exporter can emit, in small: what the audit's table is held against.

Graphs are stitched and serialised as an export does it, without computing or writing a weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

import onnx_ir as ir
import torch
from family_bundles import FAMILY, random_model
from random_models import PLAIN, VARIANTS, random_decoder, random_source

from tfmx.export import whole
from tfmx.export.builder import serialised
from tfmx.export.choice_graphs import sample_graph, select_graph
from tfmx.export.layout import Target
from tfmx.export.manifest_writer import graph_info
from tfmx.export.options import DTYPES, Precision
from tfmx.export.progress import Silent
from tfmx.export.quantiser import PLAIN as AS_IT_IS
from tfmx.export.quantiser import Numbers
from tfmx.export.recipe import Quant
from tfmx.export.rounding import round_nearest
from tfmx.export.source import CheckpointSource, Source, can_stamp, checkpoint_source, open_source
from tfmx.export.trace import Fragment
from tfmx.export.weights import distinct, link_weights
from tfmx.runtime.bundle import GraphInfo
from tfmx.tfm_model.blocks import BlockFormat, Blocks, LazyBlocks
from tfmx.tfm_model.checkpoint import LazyTensor
from tfmx.tfm_model.config import HeadConfig, ModelConfig
from tfmx.tfm_model.presets import preset_generation
from tfmx.tfm_model.tfmx_folder import model_checkpoint

OPSET = 18
TARGETS: tuple[Target, ...] = ("ort", "portable")
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
EXAMPLE = Path(__file__).parents[1] / "examples" / "own" / "gpt.py"
# every form of a matrix in blocks, and what goes with it
QUANTS = {
    "int4": Quant(bits=4, rounding="nearest"),
    "int4 zeros 16": Quant(bits=4, zero_points=True, block=16, rounding="nearest"),
    "int8 zeros": Quant(bits=8, zero_points=True, rounding="nearest"),
    "int8": Quant(bits=8, rounding="nearest"),
    "mixed, float activations": Quant(bits=4, mixed=True, activations="float", rounding="nearest"),
    "int8, head left out": Quant(bits=8, skip=("head.weight",), rounding="nearest"),
}


@dataclass(frozen=True)
class Emitted:
    name: str  # "windows, ort, fp16: prefill"
    data: bytes
    info: GraphInfo
    weights_size: int
    longest: int  # sequence


def emitted(
    source: Source, name: str, target: Target, opset: int, numbers: Numbers = AS_IT_IS
) -> list[Emitted]:
    """The graphs of one export."""
    graphs = source.graphs(target, opset, Silent(), numbers)
    if source.signature.generates:
        graphs.models["select"] = select_graph(source.signature.outputs.size, opset)
        graphs.models["sample"] = sample_graph(source.signature.outputs.size, opset)
    link_weights(graphs.models.values(), graphs.tensors)
    size = sum(tensor.nbytes + -tensor.nbytes % 4096 for tensor in distinct(graphs.tensors))
    longest = max(source.max_context, source.signature.inputs.length)
    return [
        Emitted(f"{name}: {kind}", serialised(model), graph_info(kind, model), size, longest)
        for kind, model in graphs.models.items()
    ]


def family_source(
    name: str, precision: Precision = "fp32", attentions: tuple[int, ...] | Literal["all"] = ()
) -> Source:
    model = random_model(FAMILY[name], torch.float32)
    checkpoint = model_checkpoint(model, "preset", (), preset_generation(model.config), None)
    return checkpoint_source(checkpoint, DTYPES[precision], None, attentions)


def of_family(
    name: str, precision: Precision, opsets: list[int], attentions: tuple[int, ...] | Literal["all"] = ()
) -> Iterator[Emitted]:
    """A preset, traced once. What is traced whole gives both targets the same graphs (tests/test_family_graphs.py)."""
    source = family_source(name, precision, attentions)
    targets = TARGETS if can_stamp(FAMILY[name]) else TARGETS[:1]
    with _traced_once():
        for opset in opsets:
            for target in targets:
                shown = f"{name}, {target}, {precision}, opset {opset}{', maps' if attentions else ''}"
                yield from emitted(source, shown, target, opset)


def of_variant(name: str, precision: Precision, opsets: list[int]) -> Iterator[Emitted]:
    source = random_source(VARIANTS[name], DTYPES[precision])
    for opset in opsets:
        for target in TARGETS:
            if target == "ort" and VARIANTS[name].attention.head_dim % 8:
                continue
            yield from emitted(source, f"{name}, {target}, {precision}, opset {opset}", target, opset)


def quantised(precision: Precision, opset: int = OPSET) -> Iterator[Emitted]:
    """Every form of blocks, of tied and own heads, with either cache; and a whole-traced model."""
    heads = {"tied": PLAIN, "untied": replace(PLAIN, head=HeadConfig())}
    for head, config in heads.items():
        source = random_source(config, DTYPES[precision])
        for name, quant in QUANTS.items():
            if quant.skip and head == "tied":  # there is none to leave out
                continue
            for target in TARGETS:
                shown = f"{head}, {name}, {target}, {precision}"
                yield from emitted(source, shown, target, opset, Numbers(quant=quant))
            windows = torch.zeros((1, 8), dtype=torch.int64)
            numbers = Numbers(quant=quant, kv="int8", windows=windows)
            yield from emitted(source, f"{head}, {name}, int8 cache, {precision}", "ort", opset, numbers)
    numbers = Numbers(kv="int8", windows=torch.zeros((1, 8), dtype=torch.int64))
    source = random_source(PLAIN, DTYPES[precision])
    yield from emitted(source, f"int8 cache, {precision}", "ort", opset, numbers)
    for target in TARGETS:
        kept = kept_source(PLAIN, precision)
        quant = Numbers(quant=Quant(bits=4))
        yield from emitted(kept, f"kept blocks, {target}, {precision}", target, opset, quant)
    with _traced_once():
        for target in TARGETS:
            quant = Numbers(quant=Quant(bits=8, block=16, rounding="nearest"))
            source = family_source("vaswani-base", precision)
            yield from emitted(source, f"vaswani-base, int8, {target}, {precision}", target, opset, quant)


def kept_source(config: ModelConfig, precision: Precision) -> CheckpointSource:
    """Its checkpoint has blocks with shifts, as a GGUF's Q4_1."""
    format_ = BlockFormat(bits=4, zero_points=True)
    source = random_source(config, DTYPES[precision])

    def in_blocks(name: str, weight: torch.Tensor) -> LazyTensor:
        def read() -> Blocks:
            blocks = round_nearest(weight, format_, name)
            return replace(blocks, shifts=torch.zeros_like(blocks.scales))

        return LazyTensor(name, tuple(weight.shape), lambda: weight, LazyBlocks(format_, True, read))

    decoder = random_decoder(config)
    for name, weight in decoder.named_parameters():
        if weight.dim() == 2:
            source._checkpoint.tensors[name] = in_blocks(name, weight.detach())
    return source


def own_modules(precision: Precision, opsets: list[int]) -> Iterator[Emitted]:
    for opset in opsets:
        source = open_source(f"{EXAMPLE}:build", DTYPES[precision], None)
        for target in TARGETS:
            yield from emitted(source, f"own module, {target}, {precision}, opset {opset}", target, opset)


@contextlib.contextmanager
def _traced_once() -> Iterator[None]:
    """A model's trace is the same for both targets and all opsets, and nearly all the time that it takes."""
    found: list[dict[str, Fragment]] = []
    trace = whole.trace_pieces

    def once(*arguments: object) -> object:
        if not found:
            found.append(trace(*arguments))  # type: ignore[arg-type]
            for fragment in found[0].values():
                _keep_weights(fragment)
        return found[0]

    with mock.patch.object(whole, "trace_pieces", once):
        yield


def _keep_weights(fragment: Fragment) -> None:
    """They are the module's own until then, which gets its precision back after each trace."""
    for value in fragment.weights:
        assert value.const_value is not None
        value.const_value = ir.Tensor(value.const_value.numpy().copy(), name=value.name)
