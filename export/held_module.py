"""One module in many precisions: its tensors are converted in place, and put back afterwards.

A copy would not do: closures of a module (`self.mlpf = lambda x: m.dropout(m.c_proj(x))`) would go on to point at
the submodules of the original, which keep its precision, and are not in eval mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


class HeldModule(Generic[Module]):
    """`tensors`: all parameters and buffers as the module came with them; a tied one is there under each of its names."""

    def __init__(self, module: Module, prefix: str = "") -> None:
        """`prefix`: before all names of the module, and no part of what its tensors are called."""
        self._module = module
        self._live: dict[str, Tensor] = {
            name.removeprefix(prefix): tensor
            for name, tensor in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            )
        }
        # the same storage, but not these objects are converted
        self.tensors = {name: tensor.detach() for name, tensor in self._live.items()}
        self._names = {id(tensor): name for name, tensor in reversed(self._live.items())}
        self.persistent = {name.removeprefix(prefix) for name in module.state_dict()}

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return sum(self.tensors[name].numel() for name in self.persistent if name in self.tensors)

    def name_of(self, tensor: object) -> str | None:
        """What one of the module's own tensors is called; the first of its names, if it is tied."""
        return self._names.get(id(tensor))

    @contextlib.contextmanager
    def converted(self, convert: Callable[[str, Tensor], Tensor]) -> Iterator[Module]:
        """The module in eval mode, its floating tensors as `convert` gives them; what it keeps meanwhile is forgotten."""
        before = [kept for part in self._module.modules() for kept in _attributes(part)]
        try:
            for name in self._names.values():
                tensor = self.tensors[name]
                new = convert(name, tensor) if tensor.is_floating_point() else tensor
                self._live[name].data = new.clone() if new is tensor else new  # a module may write into it
            self._module.eval()
            yield self._module
        finally:
            _restore(before)
            for name in self._names.values():
                self._live[name].data = self.tensors[name]


def _attributes(part: nn.Module) -> list[tuple[Any, Any]]:
    """The attributes of a module and what its dictionaries and lists hold (caches, hooks), each with a copy."""
    attributes = vars(part)
    holders = [attributes, *(value for value in attributes.values() if isinstance(value, dict | list))]
    return [(holder, holder.copy()) for holder in holders]


def _restore(kept: list[tuple[Any, Any]]) -> None:
    for holder, before in kept:
        if isinstance(holder, dict):
            holder.clear()
            holder.update(before)
        else:
            holder[:] = before
