"""A user's own module, as named on the command line: `path/to/file.py:factory`.

The file is run (it is the user's program) and the factory called without arguments. What it returns is a
`Transformer`, or any module that follows tfm_model/protocol.py.
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
from torch import Tensor, nn

from .. import InputError
from ..tfm_model.protocol import ExportableModule
from ..tfm_model.state import StateSpec, StateTensor
from ..tfm_model.transformer import Outputs, Transformer
from .factories import check_factory, missing_factory


class ModuleError(InputError):
    """The user's file or module does not follow the protocol."""


class OwnModule(nn.Module):
    """Gives a module of the protocol the face of a whole model."""

    def __init__(self, module: ExportableModule) -> None:
        super().__init__()
        self.own = module

    def state_spec(self) -> StateSpec:
        return self.own.state_spec()

    def encode(self, inputs: Tensor, attention_mask: Tensor | None = None) -> Outputs:  # noqa: ARG002
        raise AssertionError("a module of the protocol has no encoder")

    def step(
        self,
        inputs: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        state: list[Tensor],
        encoder_attention_mask: Tensor | None = None,  # noqa: ARG002 - as above
    ) -> Outputs:
        main, present = self.own(inputs, attention_mask, position_ids, state)
        return Outputs(main.to(torch.promote_types(main.dtype, torch.float32)), present, {})


def build_module(file: Path, factory_name: str) -> nn.Module:
    torch.manual_seed(0)  # a factory that draws its weights gives the same ones each time
    with _import_path(file.resolve().parent):
        factory = _load_factory(file, factory_name)
        try:
            module: Any = factory()
        except Exception as error:
            raise ModuleError(f"{factory_name} in {file} failed: {first_line(error)}") from error
    if isinstance(module, Transformer):
        if type(module) is not Transformer:
            raise ModuleError(
                f"{type(module).__name__} is a subclass of Transformer, whose changes would be lost; "
                "return a Transformer, or a module of your own that holds one"
            )
        return module
    for name in ("vocab_size", "max_context", "state_spec"):
        if not hasattr(module, name):
            raise ModuleError(
                f"{type(module).__name__} from {file} has no {name}; see tfmx.tfm_model.protocol"
            )
    if not isinstance(module, nn.Module):
        raise ModuleError(
            f"{factory_name} in {file} returns a {type(module).__name__}, wanted a torch.nn.Module"
        )
    for name in ("vocab_size", "max_context"):
        if type(getattr(module, name)) is not int or getattr(module, name) < 1:
            raise ModuleError(f"{name} is {getattr(module, name)!r}, wanted a whole number above 0")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_complex():
            raise ModuleError(
                f"{name} is complex, which ONNX has no ops for; keep cos and sin as two real buffers"
            )
    return module


def check_spec(spec: StateSpec, source: str) -> None:
    if not isinstance(spec, tuple) or not all(isinstance(state, StateTensor) for state in spec):
        raise ModuleError(f"{source}: state_spec gives {spec!r:.80}, wanted a tuple of StateTensor")
    for state in spec:
        grows = "past_sequence_length" in state.shape
        unknown = [dim for dim in state.shape if isinstance(dim, str)]
        unknown = [dim for dim in unknown if dim not in {"batch_size", "past_sequence_length"}]
        if unknown:
            raise ModuleError(
                f"{source}: state {state.past} has the dimension {unknown[0]!r}; "
                "only batch_size and past_sequence_length may be left open"
            )
        if (
            state.shape[:1] != ("batch_size",)
            or state.growth in {"capacity", "fixed"}
            or grows != (state.growth == "append")
        ):
            raise ModuleError(
                f"{source}: state {state.past} has shape {state.shape} and growth {state.growth!r}; wanted "
                "batch_size first, and past_sequence_length in it just if the growth is 'append'"
            )


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


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
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModuleError(f"running {file} failed: {first_line(error)}") from error
    return module
