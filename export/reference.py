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

from ..tfm_model.config import ModelConfig, TokenInputs
from ..tfm_model.layers import Attention, Reads
from ..tfm_model.state import StateSpec, StateTensor
from ..tfm_model.transformer import Block, Transformer
from .arithmetic import EXACT, Arithmetic
from .cases import Case, Run, warm_up_case
from .layout import BlockLayout
from .rounded import round_inputs, rounded_cache
from .signature import Signature, model_signature
from .stored import StoredMatrices

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@dataclass(slots=True)
class CaseOutputs:
    """Main outputs of the runs that answer; and of all what else they gave for real elements: state, then maps."""

    main: list[Array] = field(default_factory=list)
    states: list[list[Array]] = field(default_factory=list)


class Reference(Protocol):
    signature: Signature
    spec: StateSpec
    precision: torch.dtype  # the bundle's
    samples: int  # how often PyTorch's own error is looked at

    def steps(self, cases: Sequence[Case]) -> int:
        """How often `run` will call `progress`."""

    def run(
        self,
        cases: Sequence[Case],
        pasts: Pasts | None,
        dtype: torch.dtype,
        progress: Callable[[], None],
        sample: int = 0,
        arithmetic: Arithmetic = EXACT,
    ) -> list[CaseOutputs]:
        """Sample 0 is the model; others have weights nudged by up to half a rounding step.

        `arithmetic`: rounds on the way what the graphs round, as they do.
        """


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


def nudged(x: Tensor, random: torch.Generator) -> Tensor:
    """Each number moved by up to a step of its precision."""
    noise = torch.rand(x.shape, generator=random).mul_(2).sub_(1)
    return x * (1 + noise.double() * torch.finfo(x.dtype).eps).to(x.dtype)


class DecoderReference:
    """A decoder, layer by layer.

    Its second and third sample nudge what reaches each layer. Trained models have tokens at which an error grows thirtyfold within
    a few layers; PyTorch alone can be right there by luck (SmolLM2 at its last positions, on a processor with AVX-512).
    `read(name, dtype)` gives a weight as the bundle has it: rounded to the bundle's precision, then widened.
    """

    samples = 3

    def __init__(
        self,
        config: ModelConfig,
        precision: torch.dtype,
        read: Callable[[str, torch.dtype], Tensor],
        stored: StoredMatrices | None = None,
    ) -> None:
        self.config, self.precision, self._read, self._stored = config, precision, read, stored
        self.signature = model_signature(config)
        with torch.device("meta"):
            self.spec = Transformer(config).state_spec()

    def steps(self, cases: Sequence[Case]) -> int:  # noqa: ARG002 - all go through a layer together
        return self.config.n_layers

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
        ends = self.part(0, dtype, arithmetic)  # embedding, tables and head
        hidden = [
            [ends.embedding(*map(torch.from_numpy, (run.inputs, run.position_ids))) for run in case.runs]
            for case in cases
        ]
        results = [CaseOutputs(states=[[] for _ in case.runs]) for case in cases]
        maps: list[list[list[Array]]] = [[[] for _ in case.runs] for case in cases]
        randoms = [
            torch.Generator().manual_seed(sample) for _ in cases
        ]  # one each: no case depends on the others
        for layer in range(self.config.n_layers):
            if sample:
                hidden = [[nudged(x, random) for x in xs] for xs, random in zip(hidden, randoms, strict=True)]
            block = self.part(layer + 1, dtype, arithmetic).blocks[0]
            assert isinstance(block, Block)
            for case, xs, result, found in zip(cases, hidden, results, maps, strict=True):
                self._run_block(layer, block, ends, case, pasts, xs, result, found)
            progress()
        for xs, result, found in zip(hidden, results, maps, strict=True):
            result.main = [np.asarray(ends.logits(x).numpy()) for x in xs]
            result.states = [states + weights for states, weights in zip(result.states, found, strict=True)]
        return results

    def _run_block(
        self,
        layer: int,
        block: Block,
        ends: Transformer,
        case: Case,
        pasts: Pasts | None,
        xs: list[Tensor],
        result: CaseOutputs,
        maps: list[list[Array]],
    ) -> None:
        states = self.spec[2 * layer : 2 * layer + 2]
        dtype = ends.embed.weight.dtype
        state = [start(pasts, case, 2 * layer + i, spec, dtype) for i, spec in enumerate(states)]
        kept = block.attention.kept if isinstance(block.attention, Attention) else None
        if kept is not None:
            state = list(kept(*state))
        for index, run in enumerate(case.runs):
            mask, positions = torch.from_numpy(run.attention_mask), torch.from_numpy(run.position_ids)
            xs[index], state, weights = block(
                xs[index], Reads(mask, positions, ends.rotary(positions)), state
            )
            result.states[index] += [written(t, s, run) for t, s in zip(state, states, strict=True)]
            maps[index] += [by_element(np.asarray(part.numpy()), run) for part in weights if part is not None]

    def part(self, part: int, dtype: torch.dtype, arithmetic: Arithmetic) -> Transformer:
        """Part 0 is the model without its layers; part n has layer n-1 and nothing else."""
        layer = max(part - 1, 0)
        config = replace(
            self.config,
            n_layers=1,
            windows=(self.config.window(layer),),
            attention_outputs=(0,) if part and layer in self.config.attention_outputs else (),
        )
        if part:
            config = replace(config, inputs=TokenInputs(vocab_size=1), context=1, positions=None)
        with torch.device("meta"):
            model = Transformer(config)
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
        if part == 0:
            self._finish_ends(model, dtype)
        self._round(model, layer, arithmetic)
        return model.eval()

    def _round(self, model: Transformer, layer: int, arithmetic: Arithmetic) -> None:
        stored = self._stored
        if stored is not None and arithmetic.activations == "int8":

            def layout_of(name: str) -> BlockLayout | None:
                if name == "head.weight" and self.config.head.tied:
                    name = "embed.weight"
                return stored.layouts.get(name.replace("blocks.0.", f"blocks.{layer}.", 1))

            round_inputs(model, layout_of)
        scales = stored.cache_scales(layer) if stored is not None and arithmetic.kv == "int8" else None
        if scales is not None:
            attention = model.get_submodule("blocks.0.attention")
            assert isinstance(attention, Attention)
            attention.kept = lambda k, v: (
                rounded_cache(k, scales[0], f"keys of layer {layer}"),
                rounded_cache(v, scales[1], f"values of layer {layer}"),
            )

    def _finish_ends(self, model: Transformer, dtype: torch.dtype) -> None:
        if self.config.head.tied:
            model.head.weight = model.embed.weight
        if model.has_rotary_tables:
            model.set_rotary_tables(dtype)
        if model.embed.positions is not None and model.embed.positions.has_table:
            model.embed.positions.set_table(self.precision)
            model.embed.positions.to(dtype)
