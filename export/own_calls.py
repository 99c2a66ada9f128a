"""The user's own module behind the face of a whole model: called with what it asks for by name, its answers looked at.

PyTorch's modules expect pads behind a sequence: the first element is at column 0, a table of positions starts there.
Our bundles take pads anywhere. So an own encoder gets each row's real elements first, whatever the graph got, and its
answers go back to the columns they belong to; a module that keeps off its mask is right for any padding. (Decoders have
position_ids for that: their columns lie behind a past.)
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..tfm_model.config import ModelKind
from ..tfm_model.state import StateSpec
from ..tfm_model.transformer import Outputs
from .own_module import ModuleError

_ENCODE = ("attention_mask", "position_ids")
_STEP = ("attention_mask", "position_ids", "state", "encoder_attention_mask")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Call:
    """How a method is called: the first parameter is the input, whatever its name."""

    method: str
    takes: frozenset[str]  # what else it asks for

    @classmethod
    def of(cls, module: nn.Module, method: str, known: Sequence[str]) -> Call:
        what = f"{method} of {type(module).__name__}"
        parameters = list(inspect.signature(getattr(module, method)).parameters.values())
        if not parameters or parameters[0].kind in {inspect.Parameter.KEYWORD_ONLY, _VARIADIC[1]}:
            raise ModuleError(f"{what} takes no input; its first parameter must be the input")
        for parameter in parameters[1:]:
            needed = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
            if needed and parameter.name not in known:
                raise ModuleError(
                    f"{what} needs {parameter.name!r}, which nothing gives; by name it can ask for "
                    f"{', '.join(known)}, and what else it takes must have a default"
                )
        return cls(method, frozenset(parameter.name for parameter in parameters[1:]) & set(known))

    def __call__(self, module: nn.Module, inputs: Tensor, by_name: Mapping[str, Any]) -> Any:
        function = module if self.method == "forward" else getattr(module, self.method)  # hooks are run
        with _plain_attention():
            return function(inputs, **{name: by_name[name] for name in self.takes})


class OwnModule(nn.Module):
    """Gives a module of the protocol the face of a whole model."""

    def __init__(
        self,
        module: nn.Module,
        kind: ModelKind,
        spec: StateSpec,
        reference: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.own, self._kind, self._spec = module, kind, spec
        self._encode = (
            None
            if kind == "decoder"
            else Call.of(module, "forward" if kind == "encoder" else "encode", _ENCODE)
        )
        self._step = (
            None
            if kind == "encoder"
            else Call.of(module, "forward", _STEP if kind == "encoder-decoder" else _STEP[:3])
        )

        named = getattr(module, "reference", None) if reference is None else reference
        if named is not None and not callable(named):
            raise ModuleError(
                f"reference of {type(module).__name__} is a {type(named).__name__}, wanted a function or method: the plain forward"
            )
        self._reference = (
            named,
        )  # in a tuple, or a module would become a part of this one under a second name

    @property
    def has_reference(self) -> bool:
        return self._reference != (None,)

    def reference(self, inputs: Sequence[Tensor]) -> Tensor:
        """The plain forward that the module names: whole sequences in (of an encoder-decoder source and target), no state."""
        [named] = self._reference
        assert named is not None
        call = Call("reference", frozenset())
        with _plain_attention():
            found = named(*inputs)
        return _wide(self._tensor(found, call, "the output"))

    @property
    def encode_takes(self) -> frozenset[str]:
        return frozenset() if self._encode is None else self._encode.takes

    @property
    def step_takes(self) -> frozenset[str]:
        return frozenset() if self._step is None else self._step.takes

    def state_spec(self) -> StateSpec:
        return self._spec

    def encode(self, inputs: Tensor, attention_mask: Tensor | None = None) -> Outputs:
        if attention_mask is None:
            return self.encode_packed(inputs, None)
        packing = Packing(attention_mask)
        main, fixed, _ = self.encode_packed(packing.pack(inputs), packing.mask)
        known = [state for state in self._spec if state.growth == "fixed"]
        axes = [state.shape.index("encoder_sequence_length") for state in known]
        fixed = [packing.unpack(part, axis) for part, axis in zip(fixed, axes, strict=True)]
        return Outputs(packing.unpack(main, 1) if main.dim() == 3 else main, fixed, {})

    def encode_packed(self, inputs: Tensor, mask: Tensor | None) -> Outputs:
        """Of rows whose real elements come first."""
        assert self._encode is not None
        by_name: dict[str, Tensor | None] = {"attention_mask": mask}
        if inputs.dim() < 4:  # not images
            by_name["position_ids"] = _columns(inputs).expand(inputs.shape[:2])
        found = self._encode(self.own, inputs, by_name)
        fixed: list[Tensor] = []
        if self._kind == "encoder-decoder":
            found, fixed = self._pair(found, self._encode, "the encoder's output")
        return Outputs(_wide(self._tensor(found, self._encode, "the output")), fixed, {})

    def step(
        self,
        inputs: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        state: list[Tensor],
        encoder_attention_mask: Tensor | None = None,
    ) -> Outputs:
        assert self._step is not None
        by_name = {"attention_mask": attention_mask, "position_ids": position_ids, "state": state}
        by_name["encoder_attention_mask"] = encoder_attention_mask
        main, present = self._pair(self._step(self.own, inputs, by_name), self._step, "the output")
        return Outputs(_wide(main), present, {})

    def _pair(self, found: object, call: Call, what: str) -> tuple[Tensor, list[Tensor]]:
        """An output and tensors of the state."""
        wanted = f"a pair: {what}, and a list of the state's tensors"
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], list | tuple):
            raise self._error(call, found, wanted)
        main, state = found
        if not all(isinstance(part, Tensor) for part in state):
            raise self._error(call, found, wanted)
        return self._tensor(main, call, what), list(state)

    def _tensor(self, found: object, call: Call, what: str) -> Tensor:
        if not isinstance(found, Tensor):
            raise self._error(call, found, f"a tensor, {what}, and nothing else")
        if not found.is_floating_point():
            raise self._error(call, found, "floating-point numbers")
        return found

    def _error(self, call: Call, found: object, wanted: str) -> ModuleError:
        name = type(self.own).__name__
        return ModuleError(f"{call.method} of {name} gives {_described(found)}; it must return {wanted}")


class Packing:
    """Each row's real columns first, in their order."""

    def __init__(self, mask: Tensor) -> None:
        columns, before = _columns(mask), mask.cumsum(1) - mask  # real ones before each column
        count = mask.sum(1, keepdim=True)
        self._places = torch.where(
            mask == 1, before, count + columns - before
        )  # where each column goes, (B, T)
        self.mask = (columns < count).to(mask.dtype)

    def pack(self, x: Tensor) -> Tensor:
        """x (B, T, ...)."""
        return x.scatter(1, self._index(x, 1), x)

    def unpack(self, x: Tensor, axis: int) -> Tensor:
        return x.gather(axis, self._index(x, axis))

    def _index(self, x: Tensor, axis: int) -> Tensor:
        shape = [1] * x.dim()
        shape[0], shape[axis] = self._places.shape
        return self._places.reshape(shape).expand(x.shape)


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """PyTorch's fused encoder layer is one op without an ONNX form, and cuts off columns that are pads in all rows."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _columns(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)[None, :]


def _wide(main: Tensor) -> Tensor:
    return main.to(torch.promote_types(main.dtype, torch.float32))


def _described(found: object) -> str:
    """a tuple (Tensor, None); a dict with logits, loss."""
    if isinstance(found, tuple | list) and type(found) in {tuple, list}:
        inside = ", ".join("None" if part is None else type(part).__name__ for part in found)
        return f"a {type(found).__name__} ({inside})"
    if isinstance(found, Mapping):
        return f"a {type(found).__name__} with {', '.join(map(str, found))}"
    if isinstance(found, Tensor):
        return f"a tensor of shape {tuple(found.shape)} and {str(found.dtype).removeprefix('torch.')}"
    return "None" if found is None else f"a {type(found).__name__}"
