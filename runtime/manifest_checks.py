"""Whether the parts of a manifest fit together: kind, graphs, state, inputs and outputs.

What passes here can be run: every graph has the inputs that the runtime feeds and no others, and the outputs
that it reads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .certificates import check_parity, check_quality
from .manifest_parts import HIDDEN, MANIFEST, BundleError, Kind

if TYPE_CHECKING:
    from .manifest import Manifest

ATTENTIONS = re.compile(r"((?:encoder_|cross_)?attentions)\.[0-9]+")  # the optional outputs

_GRAPHS: dict[Kind, tuple[str, ...]] = {
    "decoder": ("prefill", "decode"),
    "encoder": ("encode",),
    "encoder-decoder": ("encode", "prefill", "decode"),
}
_CHOOSERS = {"select", "sample"}
# what the runtime feeds besides the main input and the state, int64: how many dimensions each has
_FED = {"attention_mask": 2, "position_ids": 2, "encoder_attention_mask": 2, "num_logits_to_keep": 0}


def check_manifest(manifest: Manifest) -> None:
    _check_kind(manifest)
    _check_sizes(manifest)
    _check_graphs(manifest)
    _check_state(manifest)
    for role in _GRAPHS[manifest.kind]:
        _check_inputs(manifest, role)
        _check_outputs(manifest, role)
    for name in manifest.files:
        _check_bare_name(name)
    check_parity(manifest.parity)
    check_quality(manifest.quality)


def _check_kind(manifest: Manifest) -> None:
    """What each kind of bundle can take and give."""
    kind, takes, outputs = manifest.kind, manifest.inputs.kind, manifest.outputs
    start = manifest.generation.decoder_start_token_id
    if kind == "decoder" and (takes == "images" or (outputs.kind == "tokens" and takes != "tokens")):
        raise BundleError(f"{MANIFEST}: a decoder cannot take {takes} and give {outputs.kind}")
    if kind == "encoder-decoder" and outputs.kind != "tokens":
        raise BundleError(f"{MANIFEST}: an encoder-decoder gives tokens, not {outputs.kind}")
    if outputs.pooled and kind != "encoder":
        raise BundleError(f"{MANIFEST}: outputs of kind {kind} cannot be pooled, only an encoder's")
    if (kind == "encoder-decoder") != (start is not None):
        raise BundleError(f"{MANIFEST}: decoder_start_token_id is {start} in a bundle of kind {kind}")


def _check_sizes(manifest: Manifest) -> None:
    inputs, outputs = manifest.inputs, manifest.outputs
    if not 1 <= manifest.max_context < 2**31 or (manifest.vocab_size is not None and manifest.vocab_size < 1):
        raise BundleError(f"{MANIFEST}: vocab_size and max_context must be at least 1, and below 2^31")
    if manifest.vocab_size != (outputs.size if outputs.kind == "tokens" else None):
        raise BundleError(
            f"{MANIFEST}: vocab_size is {manifest.vocab_size}, but the outputs are {outputs.size} {outputs.kind}"
        )
    if manifest.kind != "encoder-decoder" and inputs.length > manifest.max_context:
        raise BundleError(
            f"{MANIFEST}: inputs may be {inputs.length} long, but max_context is {manifest.max_context}"
        )
    vocabulary = manifest.vocab_size or inputs.vocab_size or 0
    for token_id in manifest.generation.token_ids:
        if not 0 <= token_id < vocabulary:
            raise BundleError(
                f"{MANIFEST}: generation names token {token_id}, the vocabulary has {vocabulary}"
            )


def _check_graphs(manifest: Manifest) -> None:
    graphs, needed = manifest.graphs, set(_GRAPHS[manifest.kind])
    choosers = _CHOOSERS if manifest.generates else set()
    if not needed <= graphs.keys() <= needed | choosers:
        also = " (and select, sample)" if choosers else ""
        raise BundleError(
            f"{MANIFEST}: graphs are {sorted(graphs)}, expected {' and '.join(sorted(needed))}{also}"
        )
    if ("select" in graphs) != ("sample" in graphs):
        raise BundleError(f"{MANIFEST}: graphs are {sorted(graphs)}; select and sample come together")
    for role, graph in graphs.items():
        if graph.file not in manifest.files:
            raise BundleError(f"{MANIFEST}: the {role} graph's file {graph.file!r} is not among the files")
        for tensors in (graph.inputs, graph.outputs):
            names = [tensor.name for tensor in tensors]
            if len(set(names)) != len(names):
                raise BundleError(f"{MANIFEST}: the {role} graph names an input or output twice")
            for tensor in tensors:
                _check_shape(tensor.shape, f"{role} graph, {tensor.name}")


def _check_state(manifest: Manifest) -> None:
    growths = {entry.growth for entry in manifest.state}
    for other in ("append", "fixed"):
        if growths >= {other, "capacity"}:
            raise BundleError(f"{MANIFEST}: state mixes growth {other} and capacity")
    if manifest.state and manifest.kind == "encoder":
        raise BundleError(f"{MANIFEST}: an encoder carries no state")
    if "fixed" in growths and manifest.kind == "decoder":
        raise BundleError(f"{MANIFEST}: a decoder alone cannot have state of growth fixed")
    for entry in manifest.state:
        if ATTENTIONS.fullmatch(entry.present):  # the runtime would ask for it as a map
            raise BundleError(
                f"{MANIFEST}: state {entry.past} is given as {entry.present}, the name of an attention map"
            )
        for role in ("prefill", "decode"):
            giver = "encode" if entry.growth == "fixed" else role
            past = manifest.graphs[role].input(entry.past)
            present = manifest.graphs[giver].output(entry.present)
            if past is None or present is None:
                lacking = (
                    f"{role} graph lacks {entry.past}"
                    if past is None
                    else f"{giver} graph lacks {entry.present}"
                )
                raise BundleError(f"{MANIFEST}: the {lacking} of the state")
            if (past.dtype, past.shape) != (entry.dtype, entry.shape) or present.dtype != entry.dtype:
                raise BundleError(f"{MANIFEST}: the {role} graph and the state disagree about {entry.past}")


def _check_inputs(manifest: Manifest, role: str) -> None:
    """The main input is there with its shape, and none that the runtime does not know."""
    name = manifest.main_input(role)
    tail = manifest.inputs.shape if name == manifest.inputs.name else ()
    is_image = name == "pixel_values"
    dtype = "int64" if name == "input_ids" else {"fp32": "float32", "fp16": "float16"}[manifest.dtype]
    lead = 1 if is_image else 2  # batch_size, and the length of a sequence
    main = manifest.graphs[role].input(name)
    if main is None or main.dtype != dtype or len(main.shape) < lead or main.shape[lead:] != tail:
        wanted = f" with {list(tail)} in each" if tail else ""
        raise BundleError(f"{MANIFEST}: the {role} graph must take {dtype} {name}{wanted}")
    answers = (
        role == "encode" and manifest.kind == "encoder"
    )  # alone it may do without a mask: see `sees_pads`
    if not is_image and not answers and manifest.graphs[role].input("attention_mask") is None:
        raise BundleError(f"{MANIFEST}: the {role} graph must take attention_mask, or pads would count")
    known = {name} if is_image else {name, "attention_mask"}
    if role != "encode":
        known |= {"position_ids", *(entry.past for entry in manifest.state)}
        known |= {"num_logits_to_keep"} if role == "prefill" else set()
        known |= {"encoder_attention_mask"} if manifest.kind == "encoder-decoder" else set()
    for tensor in manifest.graphs[role].inputs:
        if tensor.name not in known:
            raise BundleError(f"{MANIFEST}: the {role} graph takes {tensor.name}, which nothing gives it")
        if tensor.name in _FED and (tensor.dtype, len(tensor.shape)) != ("int64", _FED[tensor.name]):
            raise BundleError(
                f"{MANIFEST}: the {role} graph must take int64 {tensor.name} of {_FED[tensor.name]} dimensions"
            )


def _check_outputs(manifest: Manifest, role: str) -> None:
    """The main output is there with its shape; others are state, or attention maps."""
    answers = role != "encode" or manifest.kind == "encoder"
    name = manifest.outputs.name if answers else HIDDEN
    rank = 2 if answers and manifest.outputs.pooled else 3
    main = manifest.graphs[role].output(name)
    if main is None or main.dtype != "float32" or len(main.shape) != rank:
        raise BundleError(f"{MANIFEST}: the {role} graph must give float32 {name} of {rank} dimensions")
    if answers and main.shape[-1] != manifest.outputs.size:
        raise BundleError(
            f"{MANIFEST}: {name} of the {role} graph must have {manifest.outputs.size} at its end"
        )
    if role != "encode" and main.shape[1] != 1 and not isinstance(main.shape[1], str):
        raise BundleError(
            f"{MANIFEST}: {name} of the {role} graph has {main.shape[1]} columns, expected 1 or as many as it is asked for"
        )
    known = {name, *(s.present for s in manifest.state if (s.growth == "fixed") == (role == "encode"))}
    for tensor in manifest.graphs[role].outputs:
        if tensor.name in known:
            continue
        match = ATTENTIONS.fullmatch(tensor.name)
        if match is None or match[1] not in _maps(manifest.kind, role) or len(tensor.shape) != 4:
            raise BundleError(f"{MANIFEST}: the {role} graph gives {tensor.name}, which nothing reads")
        if any(entry.growth == "capacity" for entry in manifest.state):
            raise BundleError(f"{MANIFEST}: state of growth capacity cannot go with attention maps")


def _maps(kind: Kind, role: str) -> set[str]:
    """The attention maps that a graph may give."""
    if kind != "encoder-decoder":
        return {"attentions"}
    return {"encoder_attentions"} if role == "encode" else {"attentions", "cross_attentions"}


def _check_shape(shape: tuple[int | str, ...], place: str) -> None:
    for dim in shape:
        if dim == "" or (isinstance(dim, int) and not 0 <= dim < 2**31):
            raise BundleError(f"{MANIFEST}: {place} has the shape {list(shape)}")


def _check_bare_name(name: str) -> None:
    """Refuse a file name that could lead out of the bundle's folder, on any system."""
    if not name or name in {".", ".."} or name == MANIFEST or any(c in "/\\:\0" or ord(c) < 32 for c in name):
        raise BundleError(f"{MANIFEST} names the file {name!r}; a bundle's files have bare names")
