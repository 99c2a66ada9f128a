"""A user's own module, as named on the command line: `path/to/file.py:factory`.

The file is run (it is the user's program) and the factory called without arguments. What it returns is a
`Transformer`, or any module that follows tfm_model/protocol.py (`own_probe.py` looks at it).
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .. import InputError
from ..tfm_model.config import ModelKind
from ..tfm_model.state import StateSpec, StateTensor
from ..tfm_model.transformer import Transformer
from .factories import check_factory, missing_factory
from .user_code import users_code


class ModuleError(InputError):
    """The user's file or module does not follow the protocol."""


def build_module(file: Path, factory_name: str) -> nn.Module:
    torch.manual_seed(0)  # a factory that draws its weights gives the same ones each time
    with _import_path(file.resolve().parent):
        factory = _load_factory(file, factory_name)
        with users_code(f"{factory_name} in {file} failed"):
            module: Any = factory()
    if isinstance(module, Transformer):
        if type(module) is not Transformer:
            raise ModuleError(
                f"{type(module).__name__} is a subclass of Transformer, whose changes would be lost; "
                "return a Transformer, or a module of your own that holds one"
            )
        return module
    if not isinstance(module, nn.Module):
        raise ModuleError(
            f"{factory_name} in {file} returns a {type(module).__name__}, wanted a torch.nn.Module"
        )
    with users_code(
        f"{type(module).__name__} from {factory_name} in {file} was not made ready (super().__init__() comes first)"
    ):
        tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_complex():
            raise ModuleError(
                f"{name} is complex, which ONNX has no ops for; keep cos and sin as two real buffers"
            )
    return module


def check_spec(spec: StateSpec, source: str, kind: ModelKind) -> None:
    if not isinstance(spec, tuple) or not all(isinstance(state, StateTensor) for state in spec):
        raise ModuleError(f"{source}: state_spec gives {spec!r:.80}, wanted a tuple of StateTensor")
    open_dims = {"append": "past_sequence_length", "constant": None}
    if kind == "encoder-decoder":
        open_dims["fixed"] = "encoder_sequence_length"
        if not any(state.growth == "fixed" for state in spec):
            raise ModuleError(
                f"{source}: it has encode, but no state of growth 'fixed', through which its decoder would see the source"
            )
    for state in spec:
        if state.growth not in open_dims:
            raise ModuleError(
                f"{source}: state {state.past} has the growth {state.growth!r}; a {kind} has {' or '.join(open_dims)}"
            )
        free, wanted = [dim for dim in state.shape if isinstance(dim, str)], open_dims[state.growth]
        if free != ["batch_size", *([wanted] if wanted else [])] or state.shape[0] != "batch_size":
            besides = f"{wanted} once" if wanted else "no other open dimension"
            raise ModuleError(
                f"{source}: state {state.past} of growth {state.growth!r} has the shape {state.shape}; wanted batch_size "
                f"first, then numbers and {besides}"
            )


def _load_factory(file: Path, name: str) -> Callable[[], object]:
    check_factory(file, name)
    module = _run_file(file.resolve())
    factory = getattr(module, name, None)
    if not callable(factory):
        raise missing_factory(file, name)
    return factory  # type: ignore[no-any-return]


@contextlib.contextmanager
def _import_path(folder: Path) -> Iterator[None]:
    """The file may import what lies beside it, as it could when run."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _run_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tfmx_source_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with users_code(f"running {file} failed"):
        spec.loader.exec_module(module)
    return module
