"""What PyTorch computes for the parity cases.

A decoder is run layer by layer, all cases and steps through one layer before the next is read: the tokens
are known beforehand, so nothing needs the layers together, and a model that does not fit into memory in
float64 is verified all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..tfm_model.config import ModelConfig
from ..tfm_model.decoder import Decoder
from ..tfm_model.protocol import ExportableModule
from ..tfm_model.state import StateSpec, StateTensor
from .cases import Case, warm_up_case

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@dataclass(slots=True)
class CaseOutputs:
    """Of each run: logits (B, T, V), and of each state tensor what the run's real tokens wrote."""

    logits: list[Array] = field(default_factory=list)
    states: list[list[Array]] = field(default_factory=list)


class Reference(Protocol):
    spec: StateSpec
    vocab_size: int
    max_context: int
    precision: torch.dtype  # the bundle's

    def steps(self, cases: Sequence[Case]) -> int:
        """How often `run` will call `progress`."""

    def run(
        self, cases: Sequence[Case], pasts: Pasts | None, dtype: torch.dtype, progress: Callable[[], None]
    ) -> list[CaseOutputs]: ...


class Pasts:
    """The caches that cases start with: what the model itself wrote for a few real sequences, in float64.

    Random numbers would not do: they put a trained model where rounding errors grow a hundredfold, by luck.
    A past longer than the sequences repeats them.
    """

    def __init__(self, reference: Reference, progress: Callable[[], None]) -> None:
        self._spec, self._precision = reference.spec, reference.precision
        case = warm_up_case(reference.vocab_size, reference.max_context)
        B, T = case.runs[0].input_ids.shape
        [outputs] = reference.run([case], None, torch.float64, progress)
        self._states = [
            torch.from_numpy(values.reshape(B, T, *values.shape[1:]))
            if _grows(state)
            else torch.from_numpy(values)
            for values, state in zip(outputs.states[0], self._spec, strict=True)
        ]

    def state(self, index: int, case: Case) -> Tensor:
        """In the bundle's precision; pads hold garbage that must not be seen."""
        spec, B, P = self._spec[index], *case.past_mask.shape
        known = self._states[index].to(self._precision)
        rows = [known[row % len(known)] for row in range(B)]
        if not _grows(spec):
            return torch.stack(rows) * (1 if P else 0)  # before the first token a recurrent state is zero
        values = torch.full((B, P, *known.shape[2:]), 1e3, dtype=self._precision)
        for row, (known_row, mask) in enumerate(zip(rows, case.past_mask, strict=True)):
            count = int(mask.sum())
            values[row, torch.from_numpy(mask == 1)] = known_row[torch.arange(count) % len(known_row)]
        return values.movedim(1, spec.shape.index("past_sequence_length"))


def _grows(state: StateTensor) -> bool:
    return "past_sequence_length" in state.shape


def start(pasts: Pasts | None, case: Case, index: int, state: StateTensor, dtype: torch.dtype) -> Tensor:
    if pasts is not None:
        return pasts.state(index, case).to(dtype)
    dims = {"batch_size": len(case.past_mask), "past_sequence_length": 0}
    return torch.zeros([dims[dim] if isinstance(dim, str) else dim for dim in state.shape], dtype=dtype)


def written(present: Tensor, state: StateTensor, case: Case, run: int) -> Array:
    """What a run's real tokens wrote into a state that grows by columns: (tokens, ...), row by row."""
    if not _grows(state):
        return np.asarray(present.numpy())
    axis = state.shape.index("past_sequence_length")
    T = case.runs[run].input_ids.shape[1]
    new = present.narrow(axis, present.shape[axis] - T, T).movedim(axis, 1)
    return np.asarray(new[torch.from_numpy(case.runs[run].is_real)].numpy())


class DecoderReference:
    """`read(name, dtype)` gives a weight as the bundle has it: rounded to the bundle's precision, then widened."""

    def __init__(
        self, config: ModelConfig, precision: torch.dtype, read: Callable[[str, torch.dtype], Tensor]
    ) -> None:
        self.config, self.precision, self._read = config, precision, read
        self.vocab_size, self.max_context = config.vocab_size, config.context
        with torch.device("meta"):
            self.spec = Decoder(config).state_spec()

    def steps(self, cases: Sequence[Case]) -> int:  # noqa: ARG002 - all go through a layer together
        return self.config.n_layers

    @torch.no_grad()
    def run(
        self, cases: Sequence[Case], pasts: Pasts | None, dtype: torch.dtype, progress: Callable[[], None]
    ) -> list[CaseOutputs]:
        ends = self._part(0, dtype)  # embedding, tables and head
        hidden = [[ends.embedding(torch.from_numpy(run.input_ids)) for run in case.runs] for case in cases]
        results = [CaseOutputs(states=[[] for _ in case.runs]) for case in cases]
        for layer in range(self.config.n_layers):
            block = self._part(layer + 1, dtype).blocks[0]
            for case, xs, result in zip(cases, hidden, results, strict=True):
                self._run_block(layer, block, ends, case, pasts, xs, result)
            progress()
        for xs, result in zip(hidden, results, strict=True):
            result.logits = [np.asarray(ends.logits(x).numpy()) for x in xs]
        return results

    def _run_block(
        self,
        layer: int,
        block: torch.nn.Module,
        ends: Decoder,
        case: Case,
        pasts: Pasts | None,
        xs: list[Tensor],
        result: CaseOutputs,
    ) -> None:
        states = self.spec[2 * layer : 2 * layer + 2]
        dtype = ends.norm.weight.dtype
        key, value = (start(pasts, case, 2 * layer + i, state, dtype) for i, state in enumerate(states))
        for index, run in enumerate(case.runs):
            mask, positions = torch.from_numpy(run.attention_mask), torch.from_numpy(run.position_ids)
            xs[index], key, value = block(xs[index], mask, positions, ends.rotary(positions), key, value)
            result.states[index] += [
                written(t, s, case, index) for t, s in zip((key, value), states, strict=True)
            ]

    def _part(self, part: int, dtype: torch.dtype) -> Decoder:
        """Part 0 is the model without its layers; part n has layer n-1 and nothing else."""
        layer = part - 1
        config = replace(self.config, n_layers=1, windows=(self.config.window(max(layer, 0)),))
        if part:
            config = replace(config, vocab_size=1, context=1)
        with torch.device("meta"):
            model = Decoder(config)
        if part and model.has_rotary_tables:
            del model.cos, model.sin
        if part == 0:
            wanted = [(name, name) for name, _ in model.named_parameters() if not name.startswith("blocks.")]
        else:
            wanted = [
                (name, name.replace("blocks.0.", f"blocks.{layer}.", 1))
                for name, _ in model.named_parameters()
                if name.startswith("blocks.")
            ]
        model.load_state_dict(
            {name: self._read(source, dtype) for name, source in wanted}, strict=False, assign=True
        )
        if part == 0 and config.tied_head:
            model.head.weight = model.embed.weight
        if part == 0 and model.has_rotary_tables:
            model.set_rotary_tables(dtype)
        return model.eval()


class ModuleReference:
    """A user's own module, run whole."""

    def __init__(self, build: Callable[[], ExportableModule], precision: torch.dtype) -> None:
        self._build, self.precision = build, precision
        module = build()
        self.spec, self.vocab_size, self.max_context = (
            module.state_spec(),
            module.vocab_size,
            module.max_context,
        )

    def steps(self, cases: Sequence[Case]) -> int:
        return len(cases)

    @torch.no_grad()
    def run(
        self, cases: Sequence[Case], pasts: Pasts | None, dtype: torch.dtype, progress: Callable[[], None]
    ) -> list[CaseOutputs]:
        module = self._build().to(self.precision).to(dtype).eval()
        return [self._run_case(module, case, pasts, dtype, progress) for case in cases]

    def _run_case(
        self,
        module: ExportableModule,
        case: Case,
        pasts: Pasts | None,
        dtype: torch.dtype,
        progress: Callable[[], None],
    ) -> CaseOutputs:
        result = CaseOutputs()
        state = [start(pasts, case, i, s, dtype) for i, s in enumerate(self.spec)]
        for index, run in enumerate(case.runs):
            ids, mask, positions = map(
                torch.from_numpy, (run.input_ids, run.attention_mask, run.position_ids)
            )
            logits, state = module(ids, mask, positions, state)
            result.logits.append(np.asarray(logits.numpy()))
            result.states.append([written(t, s, case, index) for t, s in zip(state, self.spec, strict=True)])
        progress()
        return result
