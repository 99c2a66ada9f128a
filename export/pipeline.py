"""`tfmx export`: source → graphs → weights → parity → bundle."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from .. import InputError
from ..runtime.bundle import MANIFEST, Bundle, FileInfo
from ..runtime.graph_audit import audit_graph
from ..runtime.inputs import check_ids
from ..runtime.tokenizer import Tokenizer
from .arithmetic import kv_error
from .builder import serialised
from .calibrate import LEAST_TOKENS, calibration_windows
from .choice_graphs import sample_graph, select_graph
from .fitting import calibrate_error
from .manifest_writer import graph_info, make_manifest
from .options import DTYPES, ExportOptions
from .parity import Parity
from .progress import Progress, Silent
from .publish import published
from .quality import measure_quality
from .quality_windows import QualityError, cost_windows, read_text
from .quantiser import Numbers
from .source import Graphs, Source, open_source
from .verify import run_gate
from .weights import WEIGHTS_FILE, distinct, link_weights, write_weights

GOLDEN_FILE = "golden.npz"
# Chapters VII and VIII of "Alice's Adventures in Wonderland": what quality is measured on ends before them
CALIBRATION_TEXT = Path(__file__).with_name("calibration_text.txt")


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


def _write(path: Path, content: bytes) -> FileInfo:
    path.write_bytes(content)
    return FileInfo(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def _npz(parity: Parity) -> bytes:
    """numpy stamps its archives with 1980-01-01, so the same arrays are the same bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, **parity.golden)  # type: ignore[arg-type]
    return buffer.getvalue()
