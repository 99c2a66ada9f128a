"""PyTorch's side of the gate for models that are run whole: everything but the decoders that are stamped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tfm_model.state import StateSpec
from ..tfm_model.transformer import Transformer
from .arithmetic import EXACT, Arithmetic
from .cases import Case, Run
from .held_module import HeldModule
from .layout import BlockLayout
from .own_calls import OwnModule
from .reference import Array, CaseOutputs, Pasts, Way, by_element, encoded_elements, real, start, written
from .rounded import RoundedInputs
from .signature import Signature
from .user_code import users_code

SMALL = 10**7  # numbers: a model of fewer is sampled thrice; larger ones have more outputs, and longer runs


WholeModel = Transformer | OwnModule


class WholeReference:
    def __init__(
        self,
        held: HeldModule[WholeModel],
        signature: Signature,
        spec: StateSpec,
        precision: torch.dtype,
        read: Callable[[str], Tensor],  # a quantised matrix as the bundle has it, by the module's name for it
        layouts: Mapping[str, BlockLayout],  # of the matrices that are quantised
    ) -> None:
        self._held, self._read, self._layouts = held, read, layouts
        self.signature, self.spec, self.precision = signature, spec, precision
        self.size, self.samples = held.size, 3 if held.size < SMALL else 1

    def steps(self, cases: Sequence[Case]) -> int:
        return len(cases)

    def run_ways(
        self, cases: Sequence[Case], pasts: Pasts | None, ways: Sequence[Way], progress: Callable[[], None]
    ) -> Iterator[list[CaseOutputs]]:
        found = [self.run(cases, pasts, way.dtype, progress, way.sample, way.arithmetic) for way in ways]
        yield from map(list, zip(*found, strict=True))

    @torch.no_grad()
    def run(
        self,
        cases: Sequence[Case],
        pasts: Pasts | None,
        dtype: torch.dtype,
        progress: Callable[[], None],
        sample: int = 0,
        arithmetic: Arithmetic = EXACT,
    ) -> list[CaseOutputs]:
        results = []
        rounds = self._rounded_inputs() if arithmetic.activations == "int8" else contextlib.nullcontext()
        with self.model(dtype, sample) as model, rounds:
            for case in cases:
                results.append(self._run_case(model, case, pasts, dtype))
                progress()
        return results

    @torch.no_grad()
    def plain(self, cases: Sequence[Case], dtype: torch.dtype) -> list[Array] | None:
        """What the plain forward gives for the same sequences, where the module names one as its `reference`."""
        with self.model(dtype) as model:
            if not isinstance(model, OwnModule) or not model.has_reference:
                return None
            results = []
            for case in cases:
                inputs = [torch.from_numpy(run.inputs) for run in case.runs]
                wide = [part.to(dtype) if part.is_floating_point() else part for part in inputs]
                with users_code(f"reference of {type(model.own).__name__} failed", model, dtype):
                    results.append(np.asarray(model.reference(wide).numpy()))
            return results

    def model(self, dtype: torch.dtype, sample: int = 0) -> AbstractContextManager[WholeModel]:
        """The module with its weights as the bundle has them, rounded to its precision, then widened."""
        random = torch.Generator().manual_seed(sample)

        def convert(name: str, tensor: Tensor) -> Tensor:
            weight = (self._read(name) if name in self._layouts else tensor).to(self.precision)
            if sample and name in self._held.persistent:
                weight = half_nudged(weight, random)
            return weight.to(dtype)

        return self._held.converted(convert)

    def _rounded_inputs(self) -> RoundedInputs:
        return RoundedInputs(lambda weight: self._layouts.get(self._held.name_of(weight) or ""))

    def _run_case(
        self, model: WholeModel, case: Case, pasts: Pasts | None, dtype: torch.dtype
    ) -> CaseOutputs:
        result = CaseOutputs()
        moving = [state for state in self.spec if state.growth != "fixed"]
        state = [start(pasts, case, index, spec, dtype) for index, spec in enumerate(moving)]
        fixed: list[Tensor] = []
        source = case.runs[0] if self.signature.kind == "encoder-decoder" else None
        source_mask = None
        for run in case.runs:
            inputs = torch.from_numpy(run.inputs)
            inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
            mask = None if run.attention_mask is None else torch.from_numpy(run.attention_mask)
            if run.graph == "encode":
                with self._called(model, case, run, dtype):
                    outputs = model.encode(inputs, mask)
                source_mask, fixed = mask, outputs.state
                known = [state for state in self.spec if state.growth == "fixed"]
                extra = [
                    encoded_elements(np.asarray(part.numpy()), spec, run)
                    for part, spec in zip(fixed, known, strict=True)
                ]
                names = self.signature.encoder_map_names
            else:
                assert mask is not None
                positions = torch.from_numpy(run.position_ids)
                whole = interleaved(self.spec, state, fixed)
                with self._called(model, case, run, dtype):
                    outputs = model.step(inputs, mask, positions, whole, source_mask)
                state = outputs.state
                extra = [written(part, spec, run) for part, spec in zip(state, moving, strict=True)]
                names = self.signature.map_names
            main = np.asarray(outputs.main.numpy())
            if run is not source:
                result.main.append(main)
            else:
                extra.insert(0, real(main, run))
            result.states.append(
                extra + [by_element(np.asarray(outputs.maps[name].numpy()), run) for name in names]
            )
        return result

    @staticmethod
    def _called(model: WholeModel, case: Case, run: Run, dtype: torch.dtype) -> AbstractContextManager[None]:
        """What a user's own module raises in the gate."""
        if isinstance(model, Transformer):
            return contextlib.nullcontext()
        return users_code(f"in the gate's case '{case.name}', {run.graph}", model, dtype)


def half_nudged(weight: Tensor, random: torch.Generator) -> Tensor:
    """Each number moved by up to half a step of its precision, so that some become their neighbours."""
    noise = torch.rand(weight.shape, generator=random, dtype=torch.float64) - 0.5
    return (weight.double() * (1 + noise * torch.finfo(weight.dtype).eps)).to(weight.dtype)


def interleaved(spec: StateSpec, moving: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
    """The whole state in the order of the spec."""
    parts = {True: iter(fixed), False: iter(moving)}
    return [next(parts[state.growth == "fixed"]) for state in spec]
