"""Own modules are exported in eval mode: what stays as in training would differ from run to run, or from row to row."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .user_code import UserCodeError, user_line

_BATCH_NORM = {
    torch.ops.aten.native_batch_norm.default: 5,  # the place of `training` among the arguments
    torch.ops.aten._native_batch_norm_legit.default: 5,  # noqa: SLF001 (that is its name)
    torch.ops.aten.cudnn_batch_norm.default: 5,
}
_RUNNING_MEAN = 3


def check_eval(module: nn.Module) -> None:
    """After `eval()`: a module that overrides it, or `train`, may not have done it."""
    for name, part in module.named_modules():
        if part.training:
            what = name.removeprefix("own.") if name not in {"", "own"} else "the module itself"
            raise UserCodeError(
                f"{what} ({type(part).__name__}) is still in training mode after eval(); let its eval() and train() do "
                "what nn.Module's do, or set its training to False in the factory"
            )


class TrainingOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random numbers and statistics of the batch, with the user's line that asks for them.

    `lines`: the first of the user's lines that each op runs at.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: dict[str, str | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func) not in self.lines:
            self.lines[str(func)] = user_line(traceback.extract_stack())
        if func in _BATCH_NORM and args[_BATCH_NORM[func]] and args[_RUNNING_MEAN] is not None:
            self._refuse("normalises by the batch's own mean and variance", "training=self.training")
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch.get_rng_state()  # fused ops have the tag, whether they drop something or not
        result = func(*args, **kwargs)
        if kwargs.get("generator") is not None or not torch.equal(before, torch.get_rng_state()):
            self._refuse("draws random numbers", "training=self.training (F.dropout drops unless told so)")
        return result

    def _refuse(self, does: str, advice: str) -> None:
        place = user_line(traceback.extract_stack()) or "the module"
        raise UserCodeError(
            f"{place} {does}, though the module is in eval mode; write {advice}, or leave it out"
        )
