"""A decoder's side of the gate, layer by layer: all cases through one layer before the next is read.

The tokens are known beforehand, so nothing needs the layers together, and a model that does not fit into memory in
float64 is verified all the same. Nor does anything need the steps one after another: a case's runs go through a layer
as one, whose later columns the earlier ones do not see. (One by one, each step would read the layer's weights anew.)
All the ways that are asked for go through a layer together too, since reading it may mean to dequantise it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ..tfm_model.config import ModelConfig, TokenInputs
from ..tfm_model.layers import Attention, Reads, Rotary
from ..tfm_model.state import StateTensor
from ..tfm_model.transformer import Block, Transformer
from .arithmetic import EXACT, Arithmetic
from .cases import Case
from .layout import BlockLayout
from .reference import Array, CaseOutputs, Pasts, Way, by_element, start, written
from .rounded import round_inputs, rounded_cache
from .signature import model_signature
from .stored import StoredMatrices


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

    def run(
        self,
        cases: Sequence[Case],
        pasts: Pasts | None,
        dtype: torch.dtype,
        progress: Callable[[], None],
        sample: int = 0,
        arithmetic: Arithmetic = EXACT,
    ) -> list[CaseOutputs]:
        ways = [Way(dtype, sample, arithmetic)]
        return [outputs for [outputs] in self.run_ways(cases, pasts, ways, progress)]

    @torch.no_grad()
    def run_ways(
        self, cases: Sequence[Case], pasts: Pasts | None, ways: Sequence[Way], progress: Callable[[], None]
    ) -> Iterator[list[CaseOutputs]]:
        ends = self._parts(0, ways)  # embedding, tables and head
        walks = [[_Walk(case, end, way) for way, end in zip(ways, ends, strict=True)] for case in cases]
        for layer in range(self.config.n_layers):
            states = self.spec[2 * layer : 2 * layer + 2]
            parts = self._parts(layer + 1, ways)
            for each in walks:
                past = [
                    start(pasts, each[0].case, 2 * layer + i, s, self.precision) for i, s in enumerate(states)
                ]
                for walk, part, way in zip(each, parts, ways, strict=True):
                    walk.through(part.blocks[0], [values.to(way.dtype) for values in past], states)
            for _ in ways:
                progress()
        for each in walks:
            yield [walk.finish(end) for walk, end in zip(each, ends, strict=True)]

    def part(self, part: int, dtype: torch.dtype, arithmetic: Arithmetic) -> Transformer:
        """Part 0 is the model without its layers; part n has layer n-1 and nothing else."""
        [model] = self._parts(part, [Way(dtype, arithmetic=arithmetic)])
        return model

    def _parts(self, part: int, ways: Sequence[Way]) -> list[Transformer]:
        """The same part for each way, its weights read once."""
        read = functools.cache(lambda name: self._read(name, torch.float32))  # which holds float16 exactly
        models: dict[tuple[torch.dtype, Arithmetic], Transformer] = {}
        for way in ways:
            kind = way.dtype, way.arithmetic
            if kind not in models:
                models[kind] = self._part(part, *kind, read)
        return [models[way.dtype, way.arithmetic] for way in ways]

    def _part(
        self, part: int, dtype: torch.dtype, arithmetic: Arithmetic, read: Callable[[str], Tensor]
    ) -> Transformer:
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
            {name: read(source).to(dtype) for name, source in wanted}, strict=False, assign=True
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


class _Walk:
    """A case on its way through the layers."""

    def __init__(self, case: Case, ends: Transformer, way: Way) -> None:
        self.case, self._sample = case, way.sample
        self._random = torch.Generator().manual_seed(way.sample)  # its own: no case depends on the others
        inputs, positions = (
            torch.from_numpy(np.concatenate(parts, axis=1))
            for parts in zip(*((run.inputs, run.position_ids) for run in case.runs), strict=True)
        )
        self._x = ends.embedding(inputs, positions)  # (B, T of all runs, width)
        self._reads = Reads(torch.from_numpy(case.runs[-1].attention_mask), positions, self._rotary(ends))
        self._states: list[list[Array]] = [[] for _ in case.runs]
        self._maps: list[list[Array]] = [[] for _ in case.runs]

    def _rotary(self, ends: Transformer) -> Rotary:
        """Tables; or each run's own, where the turn depends on how long the sequence is by then."""
        found = [ends.rotary(torch.from_numpy(run.position_ids)) for run in self.case.runs]
        if ends.has_rotary_tables or found[0] is None:
            return found[0]
        cos, sin = (torch.cat(parts, dim=1) for parts in zip(*(pair for pair in found if pair), strict=True))
        return cos, sin

    def through(self, block: nn.Module, state: list[Tensor], specs: Sequence[StateTensor]) -> None:
        """A layer, whose state the case finds."""
        assert isinstance(block, Block)
        kept = block.attention.kept if isinstance(block.attention, Attention) else None
        if kept is not None:
            state = list(kept(*state))
        x = nudged(self._x, self._random) if self._sample else self._x
        self._x, state, weights = block(x, self._reads, state)
        end = self.case.past_mask.shape[1]
        for run, states, maps in zip(self.case.runs, self._states, self._maps, strict=True):
            before, end = end, end + run.length
            rows = slice(before - self.case.past_mask.shape[1], end - self.case.past_mask.shape[1])
            for present, spec in zip(state, specs, strict=True):
                columns = present.narrow(spec.shape.index("past_sequence_length"), 0, end)
                states.append(written(columns, spec, run))
            for part in weights:
                if part is not None:
                    maps.append(by_element(part[:, :, rows, :end].numpy(), run))

    def finish(self, ends: Transformer) -> CaseOutputs:
        main = torch.split(ends.logits(self._x), [run.length for run in self.case.runs], dim=1)
        states = [states + maps for states, maps in zip(self._states, self._maps, strict=True)]
        return CaseOutputs([part.numpy() for part in main], states)


def nudged(x: Tensor, random: torch.Generator) -> Tensor:
    """Each number moved by up to a step of its precision."""
    noise = torch.rand(x.shape, generator=random).mul_(2).sub_(1)
    return x * (1 + noise.double() * torch.finfo(x.dtype).eps).to(x.dtype)
