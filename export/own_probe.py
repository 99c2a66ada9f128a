"""What a user's own module is: its kind and declarations, and one small run that shows whether it does what they say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..tfm_model.config import ModelKind
from ..tfm_model.declarations import Answer, Elements, token_logits, tokens
from ..tfm_model.state import StateSpec, StateTensor
from ..tfm_model.transformer import Outputs
from .own_calls import OwnModule
from .own_module import ModuleError, check_spec
from .signature import Signature
from .user_code import users_code

_ROWS, _COLUMNS = 2, 5
_SEE = "see tfmx.tfm_model.protocol"
_T = TypeVar("_T")


def open_own(
    module: nn.Module, reference: Callable[..., Tensor] | None = None
) -> tuple[OwnModule, Signature]:
    name = type(module).__name__
    kind = _kind(module, name)
    spec: StateSpec = () if kind == "encoder" else _call(module, "state_spec", name)
    check_spec(spec, name, kind)
    inputs, outputs = _declarations(module, kind, name)
    if kind == "encoder-decoder":
        if outputs.kind != "tokens":
            raise ModuleError(
                f"outputs() of {name} are {outputs.kind}; an encoder-decoder gives token_logits(...)"
            )
        steps = tokens(vocab_size=outputs.size, length=_count(module, "max_context", name))
    else:
        steps = inputs
    if kind == "decoder" and (
        inputs.kind == "images" or (outputs.kind == "tokens" and inputs.kind != "tokens")
    ):
        raise ModuleError(
            f"{name} has a state_spec, so it is a decoder, which cannot take {inputs.kind} and give {outputs.kind}"
        )
    with users_code(f"eval() of {name} failed"):
        module.eval()
    own = OwnModule(module, kind, spec, reference)
    _check_takes(own, kind, inputs, name)
    has_mask = inputs.kind != "images" and (kind != "encoder" or "attention_mask" in own.encode_takes)
    return own, _probed(
        own, Signature(kind=kind, inputs=inputs, steps=steps, outputs=outputs, has_mask=has_mask)
    )


# --- what it says ---------------------------------------------------------------------------------------------


def _kind(module: nn.Module, name: str) -> ModelKind:
    if hasattr(module, "state_spec"):
        return "encoder-decoder" if hasattr(module, "encode") else "decoder"
    if _declares(module, "inputs") or _declares(module, "outputs"):
        return "encoder"
    raise ModuleError(
        f"{name} has no state_spec (of a decoder), and no inputs() and outputs() (of an encoder); {_SEE}"
    )


def _declares(module: nn.Module, what: str) -> bool:
    return inspect.isroutine(getattr(module, what, None))  # a layer of this name is no declaration


def _declarations(module: nn.Module, kind: ModelKind, name: str) -> tuple[Elements, Answer]:
    if kind == "decoder" and not _declares(module, "inputs") and not _declares(module, "outputs"):
        vocab_size = _count(module, "vocab_size", name)
        length = _count(module, "max_context", name)
        return tokens(vocab_size=vocab_size, length=length), token_logits(vocab_size)
    return (
        _declaration(module, "inputs", Elements, "tokens(...), vectors(...) or images(...)", name),
        _declaration(
            module, "outputs", Answer, "classes(...), values(...), token_logits(...) or the like", name
        ),
    )


def _declaration(module: nn.Module, what: str, wanted: type[_T], makers: str, name: str) -> _T:
    if not _declares(module, what):
        raise ModuleError(f"{name} has no {what}(); {_SEE}")
    found = _call(module, what, name)
    if not isinstance(found, wanted):
        raise ModuleError(
            f"{what}() of {name} gives {found!r:.80}, wanted {makers} of tfmx.tfm_model.declarations"
        )
    return found


def _call(module: nn.Module, method: str, name: str) -> Any:
    with users_code(f"{method}() of {name} failed"):
        return getattr(module, method)()


def _count(module: nn.Module, what: str, name: str) -> int:
    with users_code(f"{what} of {name} failed"):
        found = getattr(module, what, None)
    if found is None:
        raise ModuleError(f"{name} has no {what}; {_SEE}")
    if type(found) is not int or found < 1:
        raise ModuleError(f"{what} is {found!r}, wanted a whole number above 0")
    return found


def _check_takes(own: OwnModule, kind: ModelKind, inputs: Elements, name: str) -> None:
    """Batches are padded, so that what generates has to see where: nothing else would tell it."""
    needed = set() if kind == "encoder" else {"attention_mask"} | ({"state"} if own.state_spec() else set())
    if kind == "encoder-decoder" and inputs.kind != "images":
        needed |= {"encoder_attention_mask"}
        if "attention_mask" not in own.encode_takes:
            raise ModuleError(f"encode of {name} has no parameter 'attention_mask'; it has to leave pads out")
    for missing in sorted(needed - own.step_takes):
        raise ModuleError(
            f"forward of {name} has no parameter {missing!r}, which a{'n' * kind.startswith('e')} {kind} needs; {_SEE}"
        )


# --- what it does -------------------------------------------------------------------------------------------


@torch.no_grad()
def _probed(own: OwnModule, signature: Signature) -> Signature:
    """The signature, with what only a run shows: whether it pools, how many elements an image has."""
    elements, dtype = signature.inputs, _dtype(own)
    sizes = {"batch_size": _ROWS, "encoder_sequence_length": min(_COLUMNS, elements.length)}
    fixed: list[Tensor] = []
    name = type(own.own).__name__
    if signature.kind != "decoder":
        inputs = _example(elements, sizes["encoder_sequence_length"], dtype)
        mask = torch.ones(inputs.shape[:2], dtype=torch.int64) if signature.has_mask else None
        method = "forward" if signature.kind == "encoder" else "encode"
        outputs = _run(lambda: own.encode_packed(inputs, mask), f"{method} of {name}", inputs)
        if signature.kind == "encoder":
            return _encoder_signature(signature, outputs.main, sizes["encoder_sequence_length"], name)
        width = _hidden_width(outputs.main, elements, sizes, name)
        T = outputs.main.shape[1]
        if elements.kind == "images":
            elements, sizes["encoder_sequence_length"] = replace(elements, length=T), T
        signature = replace(signature, inputs=elements, encoded_width=width)
        fixed = outputs.state
        _check_state(own.state_spec(), fixed, sizes, f"encode of {name}", is_fixed=True)
    T = min(_COLUMNS, signature.steps.length)
    sizes |= {"past_sequence_length": 0}
    pasts = [_zeros(state, sizes, dtype) for state in own.state_spec()]
    state = _with_fixed(own.state_spec(), pasts, fixed)
    steps = _example(signature.steps, T, dtype)
    mask, positions = torch.ones(_ROWS, T, dtype=torch.int64), torch.arange(T).expand(_ROWS, T)
    source = (
        torch.ones(_ROWS, sizes["encoder_sequence_length"], dtype=torch.int64) if signature.has_mask else None
    )
    outputs = _run(lambda: own.step(steps, mask, positions, state, source), f"forward of {name}", steps)
    _check_state(own.state_spec(), outputs.state, sizes | {"past_sequence_length": T}, f"forward of {name}")
    answer = signature.outputs
    _check_shape(outputs.main, [(_ROWS, T, answer.size), (_ROWS, 1, answer.size)], f"forward of {name}")
    return replace(
        signature, outputs=replace(answer, pooled=False, only_last=T > 1 and outputs.main.shape[1] == 1)
    )


def _run(call: Callable[[], Outputs], what: str, inputs: Tensor) -> Outputs:
    with users_code(f"{what} failed on an input of shape {tuple(inputs.shape)}"):
        return call()


def _encoder_signature(signature: Signature, main: Tensor, T: int, name: str) -> Signature:
    answer, elements = signature.outputs, signature.inputs
    if elements.kind == "images":
        T = main.shape[1] if main.dim() == 3 else 1
        elements = replace(elements, length=T)
    whole: tuple[int, ...] = (_ROWS, answer.size)
    each: tuple[int, ...] = (_ROWS, T, answer.size)
    fitting = {"embedding": [whole], "hidden": [each], "tokens": [each]}
    _check_shape(main, fitting.get(answer.kind, [whole, each]), f"forward of {name}")
    return replace(
        signature, inputs=elements, steps=elements, outputs=replace(answer, pooled=main.dim() == 2)
    )


def _hidden_width(main: Tensor, elements: Elements, sizes: Mapping[str, int], name: str) -> int:
    T = sizes["encoder_sequence_length"]
    if main.dim() != 3 or main.shape[0] != _ROWS or (elements.kind != "images" and main.shape[1] != T):
        raise ModuleError(
            f"encode of {name} gives {tuple(main.shape)} for {_ROWS} sources, wanted ({_ROWS}, {T}, width)"
        )
    return main.shape[2]


def _check_shape(main: Tensor, wanted: Sequence[tuple[int, ...]], what: str) -> None:
    shapes = " or ".join(map(str, dict.fromkeys(wanted)))
    if tuple(main.shape) not in wanted:
        raise ModuleError(f"{what} gives the shape {tuple(main.shape)}; by outputs() it must be {shapes}")


def _check_state(
    spec: StateSpec, found: Sequence[Tensor], sizes: Mapping[str, int], what: str, *, is_fixed: bool = False
) -> None:
    known = [state for state in spec if (state.growth == "fixed") == is_fixed]
    if len(found) != len(known):
        raise ModuleError(f"{what} returns {len(found)} state tensors, its state_spec has {len(known)}")
    for tensor, state in zip(found, known, strict=True):
        wanted = _shape(state, sizes)
        if tuple(tensor.shape) != wanted:
            raise ModuleError(
                f"{what} gives {state.present} the shape {tuple(tensor.shape)}, wanted {wanted} by its state_spec"
            )


def _shape(state: StateTensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in state.shape)


def _zeros(state: StateTensor, sizes: Mapping[str, int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(
        _shape(state, sizes), dtype=torch.promote_types(dtype, torch.float32) if state.wide else dtype
    )


def _with_fixed(spec: StateSpec, pasts: Sequence[Tensor], fixed: Sequence[Tensor]) -> list[Tensor]:
    rest = iter(fixed)
    return [next(rest) if state.growth == "fixed" else past for state, past in zip(spec, pasts, strict=True)]


def _example(elements: Elements, T: int, dtype: torch.dtype) -> Tensor:
    sizes = {"batch_size": _ROWS, "length": T}
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in elements.shape("length")]
    return torch.zeros(shape, dtype=torch.int64 if elements.kind == "tokens" else dtype)


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
