"""PyTorch's side of the gate for models that are run whole: everything but the decoders that are stamped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..tfm_model.state import StateSpec
from ..tfm_model.transformer import Outputs, Transformer
from .arithmetic import EXACT, Arithmetic
from .cases import Case
from .layout import BlockLayout
from .reference import CaseOutputs, Pasts, Way, by_element, real, start, written
from .rounded import round_inputs
from .signature import Signature

SMALL = 10**7  # numbers: a model of fewer is sampled thrice; larger ones have more outputs, and longer runs


class WholeModel(Protocol):
    """A model that is run whole: a Transformer, or a user's own module behind `OwnModule`."""

    def state_spec(self) -> StateSpec: ...

    def encode(self, inputs: Tensor, attention_mask: Tensor | None = None) -> Outputs: ...

    def step(
        self,
        inputs: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        state: list[Tensor],
        encoder_attention_mask: Tensor | None = None,
    ) -> Outputs: ...

    def to(self, dtype: torch.dtype) -> WholeModel: ...

    def eval(self) -> WholeModel: ...

    def state_dict(self) -> dict[str, Tensor]: ...


class WholeReference:
    def __init__(
        self,
        build: Callable[[], WholeModel],
        signature: Signature,
        spec: StateSpec,
        precision: torch.dtype,
        size: int,  # how many numbers it has
        layouts: Mapping[str, BlockLayout],  # of the matrices that are quantised
    ) -> None:
        self._layouts = layouts
        self._build, self.signature, self.spec, self.precision = build, signature, spec, precision
        self.samples = 3 if size < SMALL else 1

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
        model = self._build().to(self.precision)
        if sample:
            nudge(model, sample)
        model = model.to(dtype).eval()
        if arithmetic.activations == "int8" and isinstance(model, Transformer):
            named = model.named_parameters(
                remove_duplicate=False
            )  # a tied matrix has two names, and one layout
            layouts = {id(weight): self._layouts[name] for name, weight in named if name in self._layouts}
            round_inputs(model, lambda name: layouts.get(id(model.get_parameter(name))))
        results = []
        for case in cases:
            results.append(self._run_case(model, case, pasts, dtype))
            progress()
        return results

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
                outputs = model.encode(inputs, mask)
                source_mask, fixed = mask, outputs.state
                extra = [by_element(np.asarray(part.numpy()), run) for part in fixed]
                names = self.signature.encoder_map_names
            else:
                assert mask is not None
                positions = torch.from_numpy(run.position_ids)
                outputs = model.step(
                    inputs, mask, positions, interleaved(self.spec, state, fixed), source_mask
                )
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


def nudge(model: WholeModel, seed: int) -> None:
    """Move each weight by up to half a step of its precision, so that some become their neighbours."""
    random = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=random, dtype=torch.float64) - 0.5
            tensor.copy_(tensor.double() * (1 + noise * torch.finfo(tensor.dtype).eps))


def interleaved(spec: StateSpec, moving: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
    """The whole state in the order of the spec."""
    parts = {True: iter(fixed), False: iter(moving)}
    return [next(parts[state.growth == "fixed"]) for state in spec]
