"""`path/to/file.py:factory` as the source of an export: a Transformer of ours, or a module of the protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir
from torch import Tensor, nn

from ..runtime.bundle import FileInfo, file_info
from ..tfm_model.checkpoint import GenerationDefaults
from ..tfm_model.tfmx_folder import model_checkpoint
from ..tfm_model.transformer import Transformer
from .fitting import ContextLengthError, check_context
from .own_module import ModuleError, build_module
from .own_probe import open_own
from .shown_layers import Layers, Maps
from .source import Source, checkpoint_source
from .whole import WholeSource


def open_python(source: str, dtype: ir.DataType, max_context: int | None, attentions: Layers) -> Source:
    name, _, factory = source.rpartition(":")
    file = Path(name)
    module = build_module(file, factory)
    if isinstance(module, Transformer):
        tokenizer = getattr(module, "tokenizer_json", None)
        checkpoint = model_checkpoint(
            module, "python", (file,), _generation(module), None if tokenizer is None else str(tokenizer)
        )
        return checkpoint_source(checkpoint, dtype, max_context, attentions)
    if attentions not in ((), Maps((), ())):
        raise ModuleError(
            "--attentions is for models of the built-in family; a module of your own gives its outputs"
        )
    found = module_source(module, dtype, files={file.name: file_info(file)}, factory=factory)
    if max_context is not None and max_context != found.max_context:
        raise ContextLengthError(
            f"--max-context is {max_context}; a module of your own says its max_context itself ({found.max_context})"
        )
    return found


def module_source(
    module: nn.Module,
    dtype: ir.DataType,
    *,
    reference: Callable[..., Tensor] | None = None,
    files: Mapping[str, FileInfo] | None = None,
    factory: str | None = None,
) -> WholeSource:
    """A module of the protocol, however it came about; `reference` is its plain forward, if it does not name one itself."""
    own, signature = open_own(module, reference)
    context, generation = signature.steps.length, _generation(module)
    if signature.kind != "encoder":
        check_context(context)
    start = generation.decoder_start_token_id
    if (signature.kind == "encoder-decoder") != (start is not None):
        raise ModuleError(
            f"{type(module).__name__} ({signature.kind}) has the decoder_start_token_id {start}; it is the token that "
            "an encoder-decoder's answers begin with, and nothing else has one"
        )
    tokenizer = getattr(module, "tokenizer_json", None)
    return WholeSource(
        own,
        signature,
        dtype,
        kind="python",
        files=files or {},
        model_info={"factory": factory, "class": type(module).__name__},
        generation=generation,
        texts={} if tokenizer is None else {"tokenizer.json": str(tokenizer)},
    )


def _generation(module: nn.Module) -> GenerationDefaults:
    return GenerationDefaults(
        eos_token_ids=_token_ids(getattr(module, "eos_token_ids", ())),
        decoder_start_token_id=getattr(module, "decoder_start_token_id", None),
    )


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(type(token_id) is not int for token_id in value):
        raise ModuleError(f"eos_token_ids is {value!r}, wanted a list of token ids")
    return tuple(value)
