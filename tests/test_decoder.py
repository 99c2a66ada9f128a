"""The PyTorch definition itself: the ladder's first rungs, before any ONNX."""

from __future__ import annotations

import pytest
import torch
from random_models import VARIANTS, random_decoder

from tfmx.tfm_model.transformer import Transformer

FAR = 1e-10  # float64: what reordered sums may differ by


def empty_state(decoder: Transformer, batch: int) -> list[torch.Tensor]:
    dims = {"batch_size": batch, "past_sequence_length": 0}
    return [
        torch.zeros([dims.get(d, d) for d in state.shape], dtype=torch.float64)
        for state in decoder.state_spec()
    ]


def double(name: str) -> Transformer:
    decoder = random_decoder(VARIANTS[name]).double()
    if decoder.has_rotary_tables:
        decoder.set_rotary_tables(torch.float64)
    return decoder


def run(decoder: Transformer, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return decoder(ids, mask, positions, empty_state(decoder, len(ids)))[0]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "dynamic scaling"])
def test_step_by_step_equals_all_at_once(name: str) -> None:
    decoder = double(name)
    ids = torch.randint(0, decoder.vocab_size, (2, 12))
    whole = run(decoder, ids)
    state = empty_state(decoder, 2)
    steps = []
    for t in range(12):
        with torch.no_grad():
            logits, state = decoder(
                ids[:, t : t + 1], torch.ones(2, t + 1, dtype=torch.int64), torch.full((2, 1), t), state
            )
        steps.append(logits)
    assert (torch.cat(steps, dim=1) - whole).abs().max() < FAR


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name: str, side: str) -> None:
    decoder = double(name)
    ids = torch.randint(0, decoder.vocab_size, (1, 9))
    pads = torch.randint(0, decoder.vocab_size, (1, 4))
    order = (pads, ids) if side == "left" else (ids, pads)
    mask = torch.cat([torch.ones_like(part) * (part is ids) for part in order], dim=1)
    padded = run(decoder, torch.cat(order, dim=1), mask)
    real = padded[:, 4:] if side == "left" else padded[:, :9]
    assert (real - run(decoder, ids)).abs().max() < FAR


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_token_changes_nothing_before_it(name: str) -> None:
    decoder = double(name)
    ids = torch.randint(0, decoder.vocab_size, (1, 10))
    changed = ids.clone()
    changed[0, 6] = (ids[0, 6] + 1) % decoder.vocab_size
    before, after = run(decoder, ids), run(decoder, changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-3


def test_a_window_hides_what_is_before_it() -> None:
    decoder = double("windows")
    for block in decoder.blocks:
        block.attention.window = 3
    ids = torch.randint(0, decoder.vocab_size, (1, 12))
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % decoder.vocab_size
    reach = 3 * (3 - 1)  # each of 3 layers looks 2 tokens back
    difference = (run(decoder, ids) - run(decoder, changed)).abs().amax(-1)[0]
    assert (difference[: reach + 1] > 0).all()
    assert (difference[reach + 1 :] == 0).all()


@pytest.mark.parametrize("name", list(VARIANTS))
def test_gradients_reach_every_parameter(name: str) -> None:
    decoder = random_decoder(VARIANTS[name])
    ids = torch.randint(0, decoder.vocab_size, (2, 8))
    mask = torch.ones_like(ids)
    state = [value.float() for value in empty_state(decoder, 2)]
    logits, _ = decoder(ids, mask, mask.cumsum(1) - 1, state)
    logits.square().mean().backward()
    for parameter_name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name
