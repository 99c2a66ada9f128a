"""What holds for the whole family, in PyTorch and float64: incremental, causal, blind to padding, blind to order.

The formulas themselves are in test_family_formulas.py, the same properties of exported graphs in
test_family_graphs.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from family_bundles import FAMILY, B, S, family_model, random_inputs, random_model, random_source, sequences
from torch import Tensor

from tfmx.tfm_model.config import (
    AttentionConfig,
    HeadConfig,
    ModelConfig,
    PositionConfig,
    RandomFeatureConfig,
    RelativeConfig,
    RotaryConfig,
    TokenInputs,
    VectorInputs,
)
from tfmx.tfm_model.transformer import Outputs, Transformer

FAR = 1e-10  # float64: what reordered sums may differ by
SEEN = 1e-6  # a difference that is none of rounding
T = 9

DECODERS = [name for name, config in FAMILY.items() if config.kind != "encoder"]
CAUSAL = [name for name, config in FAMILY.items() if config.causal]
SEQUENCES = [name for name, config in FAMILY.items() if sequences(config)]
ENCODERS = [name for name in SEQUENCES if not FAMILY[name].causal]
SETS = [name for name in ENCODERS if FAMILY[name].positions is None and FAMILY[name].mixer.relative is None]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def run(model: Transformer, inputs: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Outputs]:
    """What the last block gives for each element, and the outputs; all from nothing."""
    found: list[Tensor] = []
    hook = model.blocks[-1].register_forward_hook(lambda _module, _given, result: found.append(result[0]))
    outputs = model.apply_to(inputs, mask, random_source(model.config, len(inputs)))
    hook.remove()
    return found[0], outputs


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def per_element(config: ModelConfig) -> bool:
    return config.head.pooling == "none"


# --- incremental -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
def test_old_elements_stay_as_they_are_when_one_is_added(name: str) -> None:
    model = family_model(name)
    inputs = random_inputs(model.config, B, T)
    whole, _ = run(model, inputs)
    for n in range(1, T):
        assert distance(run(model, inputs[:, :n])[0], whole[:, :n]) < FAR


CUTS = {
    "one by one": [0, 1, 2, 3, 4, 5, 6, 7, 8, T],
    "after a prefill": [0, 7, 8, T],
    "in pieces": [0, 2, 6, T],
}


@pytest.mark.parametrize("cuts", list(CUTS))
@pytest.mark.parametrize("name", DECODERS)
def test_prefill_of_one_more_is_prefill_and_then_decode(name: str, cuts: str) -> None:
    model = family_model(name)
    inputs, source = random_inputs(model.config, B, T), random_source(model.config)
    fixed = model.encode(source).state if source is not None else []
    whole = model.apply_to(inputs, None, source)
    state = model.empty_state(B, fixed)
    for start, end in itertools.pairwise(CUTS[cuts]):
        mask = torch.ones(B, end, dtype=torch.int64)
        positions = torch.arange(start, end).expand(B, -1)
        step = model.step(inputs[:, start:end], mask, positions, state, None)
        wanted = model.apply_to(inputs[:, :end], None, source)
        assert distance(step.main[:, -1], wanted.main[:, -1]) < FAR
        if per_element(model.config):
            assert distance(step.main, whole.main[:, start:end]) < FAR
        for got, want in zip(step.state, wanted.state, strict=True):
            assert distance(got, want) < FAR
        state = carried(model, step.state, fixed)


def carried(model: Transformer, moving: list[Tensor], fixed: list[Tensor]) -> list[Tensor]:
    """The whole state, in order: what a step gave back, and what the encoder gave once."""
    new, old = iter(moving), iter(fixed)
    return [next(old) if spec.growth == "fixed" else next(new) for spec in model.state_spec()]


def test_a_step_of_several_elements_is_several_steps_past_a_span_of_random_features() -> None:
    model = family_model("random-features")
    inputs = random_inputs(model.config, 1, 128)
    whole = model.apply_to(inputs)
    state = model.empty_state(1, [])
    for start, end in ((0, 3), (3, 70), (70, 71), (71, 128)):
        mask, positions = torch.ones(1, end, dtype=torch.int64), torch.arange(start, end)[None]
        step = model.step(inputs[:, start:end], mask, positions, state)
        assert distance(step.main, whole.main[:, start:end]) < 1e-7  # its denominators may come near 0
        state = step.state


# --- causality -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
def test_a_changed_element_changes_nothing_before_it(name: str) -> None:
    model = family_model(name)
    inputs = random_inputs(model.config, 1, T)
    before, _ = run(model, inputs)
    for j in range(T):
        after, _ = run(model, with_another(model.config, inputs, j))
        changes = (after - before).abs().amax(-1)[0]
        assert (changes[:j] < FAR).all()
        assert changes[j] > SEEN


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_sees_what_comes_after_an_element_too(name: str) -> None:
    model = family_model(name)
    inputs = random_inputs(model.config, 1, T)
    before, _ = run(model, inputs)
    after, _ = run(model, with_another(model.config, inputs, T - 1))
    assert ((after - before).abs().amax(-1) > SEEN).all()


def with_another(config: ModelConfig, inputs: Tensor, j: int) -> Tensor:
    changed = inputs.clone()
    changed[:, j] = (
        (inputs[:, j] + 1) % config.vocab_size if isinstance(config.inputs, TokenInputs) else inputs[:, j] + 1
    )
    return changed


def test_a_long_later_key_changes_nothing_before_it_under_random_features() -> None:
    """The largest key sets what the sums are divided by; that must cancel for the elements before it."""
    attention = AttentionConfig(
        n_heads=1, n_kv_heads=1, head_dim=4, random_features=RandomFeatureConfig(features=64)
    )
    model = random_model(vectors(attention, causal=True, norm_order="post"))  # pre would bring it to size
    inputs = 0.3 * random_inputs(model.config, 1, T)
    inputs[:, -1] *= 80
    with_long, _ = run(model, inputs)
    assert distance(with_long[:, :-1], run(model, inputs[:, :-1])[0]) < FAR


# --- padding ---------------------------------------------------------------------------------------------

PADDINGS = {
    "left": [0, 0, 0, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 0, 0, 0],
    "in between": [1, 0, 1, 1, 0, 0, 1, 1],
    "everywhere": [0, 1, 1, 0, 1, 0, 1, 1, 0],
}


def spread(inputs: Tensor, mask: Tensor, garbage: Tensor) -> Tensor:
    """One row's elements at the mask's ones, garbage elsewhere."""
    padded = garbage.clone()
    padded[:, mask[0] == 1] = inputs
    return padded


@pytest.mark.parametrize("padding", list(PADDINGS))
@pytest.mark.parametrize("name", SEQUENCES)
def test_padding_changes_nothing(name: str, padding: str) -> None:
    model = family_model(name)
    mask = torch.tensor([PADDINGS[padding]])
    inputs = random_inputs(model.config, 1, int(mask.sum()))
    hidden, outputs = run(model, inputs)
    garbage = random_inputs(model.config, 1, mask.shape[1], seed=5)
    padded_hidden, padded = run(model, spread(inputs, mask, garbage), mask)
    assert distance(padded_hidden[:, mask[0] == 1], hidden) < FAR
    main = (
        padded.main
        if outputs.main.dim() == 2 or not per_element(model.config)
        else padded.main[:, mask[0] == 1]
    )
    assert distance(main, outputs.main) < FAR
    for spec, got, want in zip(moving(model), padded.state, outputs.state, strict=True):
        real = got[:, :, mask[0] == 1] if "past_sequence_length" in spec.shape else got
        assert distance(real, want) < FAR


def moving(model: Transformer) -> list:
    return [spec for spec in model.state_spec() if spec.growth != "fixed"]


@pytest.mark.parametrize("name", DECODERS)
def test_pads_of_the_past_are_never_seen_by_a_later_step(name: str) -> None:
    model = family_model(name)
    source = random_source(model.config, 1)
    fixed = model.encode(source).state if source is not None else []
    inputs = random_inputs(model.config, 1, 7)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0]])
    padded = spread(inputs[:, :4], mask, random_inputs(model.config, 1, 7, seed=5))
    state = model.empty_state(1, fixed)
    first = model.step(padded, mask, (mask.cumsum(1) - 1).clamp(min=0), state)
    mask = torch.cat((mask, torch.tensor([[1, 0, 1, 1]])), dim=1)
    new = spread(inputs[:, 4:], mask[:, 7:], random_inputs(model.config, 1, 4, seed=6))
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, 7:]
    second = model.step(new, mask, positions, carried(model, first.state, fixed))
    wanted = model.apply_to(inputs, None, source).main
    assert distance(second.main[:, -1], wanted[:, -1]) < FAR
    if per_element(model.config):
        assert distance(second.main[:, [0, 2, 3]], wanted[:, 4:]) < FAR


@pytest.mark.parametrize("padding", list(PADDINGS))
@pytest.mark.parametrize("name", [n for n in DECODERS if FAMILY[n].encoder and sequences(FAMILY[n].encoder)])
def test_padding_of_the_source_changes_nothing(name: str, padding: str) -> None:
    model = family_model(name)
    mask = torch.tensor([PADDINGS[padding]])
    source = random_inputs(model.config.encoder, 1, int(mask.sum()))
    garbage = random_inputs(model.config.encoder, 1, mask.shape[1], seed=5)
    target = random_inputs(model.config, 1, 4)
    plain = model.apply_to(target, None, source).main
    assert distance(model.apply_to(target, None, spread(source, mask, garbage), mask).main, plain) < FAR


@pytest.mark.parametrize("name", [name for name in DECODERS if FAMILY[name].encoder is not None])
def test_every_element_of_the_source_counts(name: str) -> None:
    model = family_model(name)
    target, source = random_inputs(model.config, 1, 4), random_source(model.config, 1)
    plain = model.apply_to(target, None, source).main
    for j in range(S if source.dim() == 2 else source.shape[-1]):
        changed = source.clone()
        changed[..., j] = (source[..., j] + 1) % 96 if source.dim() == 2 else source[..., j] + 1
        assert ((model.apply_to(target, None, changed).main - plain).abs().amax(-1) > SEEN).all()


# --- order -----------------------------------------------------------------------------------------------

_PLAIN = AttentionConfig(n_heads=2, n_kv_heads=2, head_dim=4)


def vectors(attention: AttentionConfig = _PLAIN, *, causal: bool = False, **settings: object) -> ModelConfig:
    """One block over vectors that are the model's width already; the head gives what it made of them."""
    base = replace(FAMILY["encoder"], head=HeadConfig(kind="hidden"), positions=None, last_norm=False)
    base = replace(base, inputs=VectorInputs(features=8), width=8, n_layers=1, context=T, mixer=attention)
    base = replace(base, causal=causal)
    return replace(base, **settings)


ORDERLESS = {
    "scaled": vectors(),
    "raw": vectors(AttentionConfig(n_heads=1, n_kv_heads=1, head_dim=8, similarity="raw")),
    "symmetric": vectors(replace(_PLAIN, similarity="symmetric")),
    "full rank": vectors(replace(_PLAIN, full_rank_values=True, combination="sum")),
    "grouped": vectors(replace(_PLAIN, n_kv_heads=1)),
    "random features": vectors(replace(_PLAIN, random_features=RandomFeatureConfig(features=16))),
    "post-norm": vectors(norm_order="post"),
    "tokens": vectors(inputs=TokenInputs(vocab_size=50)),
}
ORDERED = {
    "learned": vectors(positions=PositionConfig(kind="learned")),
    "sinusoidal": vectors(positions=PositionConfig(kind="sinusoidal")),
    "sinusoidal features": vectors(positions=PositionConfig(kind="sinusoidal", features=9)),
    "one-hot": vectors(width=8 + T, positions=PositionConfig(kind="one_hot")),
    "joint": vectors(positions=PositionConfig(kind="joint", features=9)),
    "separate": vectors(positions=PositionConfig(kind="separate", features=9)),
    "shaw": vectors(replace(_PLAIN, relative=RelativeConfig(kind="shaw", max_distance=3))),
    "t5": vectors(replace(_PLAIN, relative=RelativeConfig(kind="t5", max_distance=8, buckets=8))),
    "alibi": vectors(replace(_PLAIN, relative=RelativeConfig(kind="alibi"))),
    "rotary": vectors(replace(_PLAIN, rotary=RotaryConfig(dim=4))),
    "rotary random features": vectors(
        replace(_PLAIN, rotary=RotaryConfig(dim=4), random_features=RandomFeatureConfig(features=64))
    ),
}
ORDER = torch.tensor([3, 0, 8, 5, 1, 7, 2, 6, 4])


@pytest.mark.parametrize("name", SETS)
def test_a_preset_without_positions_is_permutation_equivariant(name: str) -> None:
    model = family_model(name)
    inputs = random_inputs(model.config, B, T)
    plain, mixed = model.apply_to(inputs).main, model.apply_to(inputs[:, ORDER]).main
    assert distance(mixed, plain[:, ORDER] if per_element(model.config) else plain) < FAR


@pytest.mark.parametrize("name", list(ORDERLESS))
def test_attention_without_positions_is_permutation_equivariant(name: str) -> None:
    model = random_model(ORDERLESS[name])
    inputs = random_inputs(model.config, B, T)
    assert distance(model.apply_to(inputs[:, ORDER]).main, model.apply_to(inputs).main[:, ORDER]) < FAR


@pytest.mark.parametrize("name", list(ORDERED))
def test_with_positions_it_is_not(name: str) -> None:
    model = random_model(ORDERED[name])
    inputs = random_inputs(model.config, B, T)
    assert distance(model.apply_to(inputs[:, ORDER]).main, model.apply_to(inputs).main[:, ORDER]) > 1e-3


@pytest.mark.parametrize("name", [n for n in ENCODERS if n not in SETS])
def test_a_preset_with_positions_is_not_permutation_equivariant(name: str) -> None:
    model = family_model(name)
    inputs = random_inputs(model.config, B, T)
    plain, mixed = model.apply_to(inputs).main, model.apply_to(inputs[:, ORDER]).main
    assert distance(mixed, plain[:, ORDER] if per_element(model.config) else plain) > 1e-4


def test_relative_positions_do_not_depend_on_where_a_sequence_begins() -> None:
    """Distances only: the state of a decoder may begin at any position."""
    for name in ("relative", "t5-bias", "alibi", "rotary"):
        model = family_model(name)
        inputs = random_inputs(model.config, B, T)
        mask, places = torch.ones_like(inputs), torch.arange(T).expand(B, -1)
        assert (
            distance(
                model.step(inputs, mask, places, model.empty_state(B, [])).main,
                model.apply_to(inputs).main,
            )
            < FAR
        )
