"""What PyTorch computes for the parity cases: what the gate asks of a model, and the states that cases start with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..tfm_model.state import StateSpec, StateTensor
from .arithmetic import EXACT, Arithmetic
from .cases import Case, Run, warm_up_case
from .signature import Signature

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@dataclass(slots=True)
class CaseOutputs:
    """Main outputs of the runs that answer; and of all what else they gave for real elements: state, then maps."""

    main: list[Array] = field(default_factory=list)
    states: list[list[Array]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Way:
    """How PyTorch runs the cases."""

    dtype: torch.dtype
    sample: int = 0  # 0 is the model; others are nudged by up to a rounding step
    arithmetic: Arithmetic = EXACT  # rounds on the way what the graphs round, as they do


class Reference(Protocol):
    signature: Signature
    spec: StateSpec
    precision: torch.dtype  # the bundle's
    samples: int  # how often PyTorch's own error is looked at

    def steps(self, cases: Sequence[Case]) -> int:
        """How often a run of one way will call `progress`."""

    def run(
        self,
        cases: Sequence[Case],
        pasts: Pasts | None,
        dtype: torch.dtype,
        progress: Callable[[], None],
        sample: int = 0,
        arithmetic: Arithmetic = EXACT,
    ) -> list[CaseOutputs]:
        """What each case gives, in one way."""

    def run_ways(
        self, cases: Sequence[Case], pasts: Pasts | None, ways: Sequence[Way], progress: Callable[[], None]
    ) -> Iterator[list[CaseOutputs]]:
        """Case by case what each way gives: together they cost less than one by one."""


class Pasts:
    """The states that cases start with: what the model itself wrote for a few real sequences, in float64.

    Random numbers would not do: they put a trained model where rounding errors grow a hundredfold, by luck.
    A past longer than the sequences repeats them. (A fixed state is each case's own encoder's.)
    """

    def __init__(self, reference: Reference, progress: Callable[[], None]) -> None:
        self._spec = [state for state in reference.spec if state.growth != "fixed"]
        self._precision = reference.precision
        if reference.signature.kind == "encoder":
            return
        case = warm_up_case(reference.signature)
        B, T = case.runs[-1].inputs.shape[:2]
        [outputs] = reference.run([case], None, torch.float64, progress)
        self._states = [
            torch.from_numpy(values.reshape(B, T, *values.shape[1:]))
            if _grows(state)
            else torch.from_numpy(values)
            for values, state in zip(outputs.states[-1], self._spec, strict=False)
        ]

    def state(self, index: int, case: Case) -> Tensor:
        """In the bundle's precision; pads hold garbage that must not be seen."""
        spec, B, P = self._spec[index], *case.past_mask.shape
        dtype = state_dtype(spec, self._precision)
        known = self._states[index].to(dtype)
        rows = [known[row % len(known)] for row in range(B)]
        if not _grows(spec):
            return torch.stack(rows) * (1 if P else 0)  # before the first element a recurrent state is zero
        values = torch.full((B, P, *known.shape[2:]), 1e3, dtype=dtype)
        for row, (known_row, mask) in enumerate(zip(rows, case.past_mask, strict=True)):
            count = int(mask.sum())
            values[row, torch.from_numpy(mask == 1)] = known_row[torch.arange(count) % len(known_row)]
        return values.movedim(1, spec.shape.index("past_sequence_length"))


def state_dtype(state: StateTensor, precision: torch.dtype) -> torch.dtype:
    return torch.promote_types(precision, torch.float32) if state.wide else precision


def _grows(state: StateTensor) -> bool:
    return "past_sequence_length" in state.shape


def start(pasts: Pasts | None, case: Case, index: int, state: StateTensor, dtype: torch.dtype) -> Tensor:
    """`index` counts the states that are not fixed."""
    dtype = state_dtype(state, dtype)
    if pasts is not None:
        return pasts.state(index, case).to(dtype)
    dims = {"batch_size": len(case.past_mask), "past_sequence_length": 0}
    return torch.zeros([dims[dim] if isinstance(dim, str) else dim for dim in state.shape], dtype=dtype)


def written(present: Tensor, state: StateTensor, run: Run) -> Array:
    """What a run's real elements wrote into a state that grows by columns: (elements, ...), row by row."""
    if not _grows(state):
        return np.asarray(present.numpy())
    axis, T = state.shape.index("past_sequence_length"), run.length
    new = present.narrow(axis, present.shape[axis] - T, T).movedim(axis, 1)
    return np.asarray(new[torch.from_numpy(run.is_real)].numpy())


def real(values: Array, run: Run) -> Array:
    """What belongs to real elements: (B, T, ...) → (elements, ...)."""
    return values if run.attention_mask is None else values[run.is_real]


def by_element(values: Array, run: Run) -> Array:
    """The same of attention maps: (B, H, T, ...) → (elements, H, ...)."""
    return real(np.moveaxis(values, 2, 1), run)


def encoded_elements(values: Array, state: StateTensor, run: Run) -> Array:
    """The same of what an encoder leaves for the decoder."""
    return real(np.moveaxis(values, state.shape.index("encoder_sequence_length"), 1), run)
