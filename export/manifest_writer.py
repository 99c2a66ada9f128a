"""What an export made, as the manifest says it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Literal

import onnx_ir as ir

from .. import __version__
from ..runtime.bundle import (
    FORMAT,
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
from .arithmetic import Arithmetic
from .options import DTYPES, ExportOptions
from .parity import Parity
from .recipe import FLOAT, Quant, describe
from .source import Graphs, Source

_TOOLS = ("torch", "onnx", "onnx-ir", "onnxscript")
_DTYPE_NAMES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.INT64: "int64",
    ir.DataType.INT32: "int32",
    ir.DataType.INT8: "int8",
}


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
