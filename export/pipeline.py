"""`tfmx export`: source → graphs → weights → parity → bundle, and `tfmx verify --against`."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
import torch

from .. import InputError, TfmxError, __version__
from ..runtime.bundle import (
    FORMAT,
    MANIFEST,
    Bundle,
    FileInfo,
    GenerationInfo,
    GraphInfo,
    InputInfo,
    Manifest,
    OutputInfo,
    QuantInfo,
    SourceInfo,
    StateInfo,
    TensorInfo,
)
from ..runtime.graph_audit import audit_graph
from ..runtime.inputs import check_ids
from ..runtime.ops import check_opset
from ..runtime.tokenizer import Tokenizer
from .arithmetic import EXACT, Arithmetic, CacheNumbers, kv_error
from .builder import serialised
from .calibrate import LEAST_TOKENS, calibration_windows
from .choice_graphs import sample_graph, select_graph
from .exact_twin import exact_twin
from .fitting import ContextLengthError, calibrate_error
from .layout import BlockLayout, Target
from .parity import Gate, Parity
from .progress import Progress, Silent
from .publish import published
from .quality import measure_quality
from .quality_windows import QualityError, cost_windows, read_text
from .quantiser import Numbers
from .recipe import FLOAT, Quant, describe, stored_layouts
from .shown_layers import Maps
from .source import Graphs, Source, open_source
from .stitch import GRAPHS_OF_KIND
from .stored import StoredMatrices
from .weights import WEIGHTS_FILE, distinct, link_weights, write_weights

Precision = Literal["fp32", "fp16"]
DTYPES: dict[Precision, ir.DataType] = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}
DEFAULT_OPSET = 18  # runs in every runtime that was tried, with 17
GOLDEN_FILE = "golden.npz"
# Chapters VII and VIII of "Alice's Adventures in Wonderland": what quality is measured on ends before them
CALIBRATION_TEXT = Path(__file__).with_name("calibration_text.txt")

_TOOLS = ("torch", "onnx", "onnx-ir", "onnxscript")
_DTYPE_NAMES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.INT64: "int64",
    ir.DataType.INT32: "int32",
    ir.DataType.INT8: "int8",
}


class MismatchError(TfmxError):
    """A bundle was not made from the source that it is compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    target: Target = "ort"
    dtype: Precision = "fp32"
    opset: int = DEFAULT_OPSET
    max_context: int | None = None  # None: the model's own
    verify: bool = True
    attentions: tuple[int, ...] | Literal["all"] = ()  # layers whose weights the graphs also give
    quant: Quant | None = None
    kv: CacheNumbers = "float"

    def __post_init__(self) -> None:
        check_opset(self.opset)


def export(source: str, out: Path, options: ExportOptions, progress: Progress | None = None) -> Parity | None:
    """Write the bundle to `out`, or raise and leave `out` as it was; returns the parity that was measured."""
    return export_model(
        open_source(source, DTYPES[options.dtype], options.max_context, options.attentions),
        out,
        options,
        progress,
    )


def export_module(
    module: torch.nn.Module,
    out: Path,
    options: ExportOptions,
    progress: Progress | None = None,
    *,
    reference: Callable[..., torch.Tensor] | None = None,
) -> Parity | None:
    """The same of a module that is in memory (tfm_model/protocol.py says what it has to offer).

    `reference`: its plain forward, of whole sequences and without any state; the steps must give what it gives.
    """
    from .python_source import module_source

    return export_model(
        module_source(module, DTYPES[options.dtype], reference=reference), out, options, progress
    )


def export_model(
    model: Source, out: Path, options: ExportOptions, progress: Progress | None = None
) -> Parity | None:
    progress, source = progress or Silent(), model
    if options.verify:
        model.check_module(progress)
    with published(out) as folder:
        wanted = numbers(model, options)
        if options.quant is not None and options.quant.smooths:
            model = model.smoothed(wanted, progress)
        graphs = model.graphs(options.target, options.opset, progress, wanted)
        if model.signature.generates:
            graphs.models["select"] = select_graph(model.signature.outputs.size, options.opset)
            graphs.models["sample"] = sample_graph(model.signature.outputs.size, options.opset)
        files = write_files(folder, graphs, model, progress)
        parity = None
        if options.verify:
            parity = run_gate(folder, model, options.target, graphs.layouts, wanted.arithmetic, progress)
            parity.require()
            files[GOLDEN_FILE] = _write(folder / GOLDEN_FILE, _npz(parity))
        manifest = make_manifest(model, graphs, options, wanted.arithmetic, files, parity)
        # last, so that a folder with a manifest is whole
        (folder / MANIFEST).write_bytes(manifest.to_bytes())
        bundle = Bundle.open(folder, check=False)  # what the runtime would refuse is not published
        if options.verify and options.quant is not None:
            manifest = dataclasses.replace(manifest, quality=_cost(bundle, source, progress))
            (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return parity


def _cost(bundle: Bundle, source: Source, progress: Progress) -> dict[str, object] | None:
    """What quantisation cost, on a little text: figures of `tfmx verify --quality` in seconds; None where there is no text."""
    try:
        windows = cost_windows(bundle)
    except QualityError:
        return None
    quality = measure_quality(bundle, source.reference(), windows, progress, decodes=False)
    digests = {name: info.sha256 for name, info in bundle.manifest.source.files.items()}
    return dataclasses.replace(quality, source=digests).certificate()


def numbers(model: Source, options: ExportOptions) -> Numbers:
    """With the text that shows the model's ranges, where roundings depend on them."""
    if options.kv == "int8" and model.growth(options.target) != "capacity":
        raise kv_error(options.target)
    quant = options.quant
    if quant is not None and options.target == "portable":
        quant = dataclasses.replace(quant, activations="float")
    elif quant is not None and quant.activations == "mixed" and not model.can_be_smoothed:
        quant = dataclasses.replace(
            quant, activations="int8"
        )  # two steps were measured on decoders of tokens only
    path = None if quant is None else quant.calibrate
    if path is not None and not model.can_be_smoothed:
        raise calibrate_error()
    smooths = quant is not None and quant.smooths and model.can_be_smoothed
    if path is None and options.kv != "int8" and not smooths:
        return Numbers(quant=quant)
    windows = calibration_windows(_calibration_ids(model, path), model.max_context)
    return Numbers(quant=quant, kv=options.kv, windows=windows)


def _calibration_ids(model: Source, path: Path | None) -> Sequence[int]:
    """The tokens of a text; a model that has no tokenizer shows its ranges on random ones."""
    tokenizer, vocab_size = model.texts.get("tokenizer.json"), model.signature.vocab_size
    assert vocab_size is not None
    if tokenizer is not None:
        text = read_text(str(CALIBRATION_TEXT if path is None else path))
        found = Tokenizer(tokenizer.encode()).encode(text)
        check_ids(found, "the text to calibrate with", vocab_size, len(found))
        if path is None and len(found) < LEAST_TOKENS:
            raise InputError(
                f"tfmx's own text is {len(found):,} tokens to this tokenizer, {LEAST_TOKENS:,} are needed; use --calibrate "
                "with a text that it knows, or --quant-round search (and no --kv int8)"
            )
        return found
    if path is not None:
        raise InputError("--calibrate reads a text, and this model has no tokenizer; leave it out")
    ids: list[int] = torch.randint(
        vocab_size, (LEAST_TOKENS,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return ids


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


def write_files(folder: Path, graphs: Graphs, model: Source, progress: Progress) -> dict[str, FileInfo]:
    link_weights(graphs.models.values(), graphs.tensors)
    progress.stage("writing weights", sum(tensor.nbytes for tensor in distinct(graphs.tensors)))
    digest = write_weights(folder / WEIGHTS_FILE, graphs.tensors, progress.advance)
    longest = max(model.max_context, model.signature.inputs.length)
    files = {WEIGHTS_FILE: FileInfo(size=(folder / WEIGHTS_FILE).stat().st_size, sha256=digest)}
    for kind, graph in graphs.models.items():
        content = serialised(graph)
        audit_graph(content, graph_info(kind, graph), files[WEIGHTS_FILE].size, longest)
        files[f"{kind}.onnx"] = _write(folder / f"{kind}.onnx", content)
    for name, text in model.texts.items():
        files[name] = _write(folder / name, text.encode())
    return files


def make_manifest(
    model: Source,
    graphs: Graphs,
    options: ExportOptions,
    arithmetic: Arithmetic,
    files: dict[str, FileInfo],
    parity: Parity | None,
) -> Manifest:
    dtype = _DTYPE_NAMES[DTYPES[options.dtype]]
    growth = model.growth(options.target)
    generation, answer = model.generation, model.signature.outputs
    return Manifest(
        format=FORMAT,
        tfmx=__version__,
        tools={name: importlib.metadata.version(name).split("+")[0] for name in _TOOLS},
        source=SourceInfo(kind=model.kind, files=model.digests()),
        kind=model.signature.kind,
        target=options.target,
        dtype=options.dtype,
        quant=_quant_info(options, graphs, arithmetic, can_be_smoothed=model.can_be_smoothed),
        opset=options.opset,
        inputs=InputInfo(**dataclasses.asdict(model.signature.inputs)),
        outputs=OutputInfo(
            kind=answer.kind, name=answer.name, size=answer.size, pooled=answer.pooled, labels=answer.labels
        ),
        vocab_size=model.signature.vocab_size,
        max_context=model.max_context,
        model=model.model_info | ({"plain_matrices": list(graphs.plain)} if graphs.plain else {}),
        graphs={kind: graph_info(kind, graph) for kind, graph in graphs.models.items()},
        state=tuple(
            StateInfo(
                past=state.past,
                present=state.present,
                dtype="int8" if options.kv == "int8" else "float32" if state.wide else dtype,  # type: ignore[arg-type]
                shape=state.shape,
                growth=growth if state.growth == "append" else state.growth,  # type: ignore[arg-type]
            )
            for state in model.spec
        ),
        generation=GenerationInfo(
            bos_token_id=generation.bos_token_id,
            eos_token_ids=generation.eos_token_ids,
            pad_token_id=generation.pad_token_id,
            decoder_start_token_id=generation.decoder_start_token_id,
            sampling=dict(generation.sampling),
        ),
        parity=parity.certificate() if parity else None,
        quality=None,
        files=files,
    )


def _quant_info(
    options: ExportOptions, graphs: Graphs, arithmetic: Arithmetic, *, can_be_smoothed: bool
) -> QuantInfo | None:
    quant = options.quant
    if quant is None:
        return None
    return QuantInfo(
        weights="int4" if quant.bits == 4 else "int8",
        rounding=_rounding_done(quant, graphs, can_be_smoothed=can_be_smoothed),
        activations=arithmetic.activations,
        matrices={name: describe(layout) for name, layout in graphs.layouts.items()}
        | dict.fromkeys(graphs.floats, FLOAT),
    )


def _rounding_done(
    quant: Quant, graphs: Graphs, *, can_be_smoothed: bool
) -> Literal["nearest", "search", "smooth", "gptq", "kept"]:
    if graphs.all_kept:
        return "kept"
    if quant.calibrate is not None:
        return "gptq"
    return "search" if quant.rounding == "smooth" and not can_be_smoothed else quant.rounding


def _maps(manifest: Manifest) -> Maps:
    """The layers whose attention weights the bundle gives."""
    names = {tensor.name for graph in manifest.graphs.values() for tensor in graph.outputs}

    def layers(kind: str) -> tuple[int, ...]:
        return tuple(sorted(int(name.partition(".")[2]) for name in names if name.startswith(f"{kind}.")))

    return Maps(layers("attentions"), layers("encoder_attentions"))


def graph_info(kind: str, model: ir.Model) -> GraphInfo:
    def tensors(values: list[ir.Value]) -> tuple[TensorInfo, ...]:
        return tuple(
            TensorInfo(name=str(value.name), dtype=_DTYPE_NAMES[value.dtype], shape=_dims(value))  # type: ignore[index,arg-type]
            for value in values
        )

    return GraphInfo(
        file=f"{kind}.onnx",
        inputs=tensors(list(model.graph.inputs)),
        outputs=tensors(list(model.graph.outputs)),
    )


def _dims(value: ir.Value) -> tuple[int | str, ...]:
    assert value.shape is not None
    return tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)


def _write(path: Path, content: bytes) -> FileInfo:
    path.write_bytes(content)
    return FileInfo(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def _npz(parity: Parity) -> bytes:
    """numpy stamps its archives with 1980-01-01, so the same arrays are the same bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, **parity.golden)  # type: ignore[arg-type]
    return buffer.getvalue()
