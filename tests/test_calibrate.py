"""GPTQ, and the text that runs through a decoder for it: lower error where inputs agree, and what the layers really see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_models import PLAIN, random_decoder

from tfmx import InputError
from tfmx.export import gptq
from tfmx.export.calibrate import (
    LEAST_TOKENS,
    TOKENS,
    WINDOW,
    calibrate,
    calibration_windows,
)
from tfmx.export.gptq import CalibrationError, round_gptq
from tfmx.export.progress import Silent
from tfmx.export.rounding import round_nearest, round_search
from tfmx.tfm_model.blocks import BlockFormat
from tfmx.tfm_model.config import HeadConfig
from tfmx.tfm_model.transformer import Transformer, positions

FORMATS = [BlockFormat(bits=4), BlockFormat(bits=4, zero_points=True), BlockFormat(bits=8, block=16)]
TIED, UNTIED = replace(PLAIN, head=HeadConfig(tied=True)), replace(PLAIN, head=HeadConfig(tied=False))
formats = pytest.mark.parametrize("format_", FORMATS, ids=str)


def correlated(n: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Inputs that are mixtures of fewer, some much larger than others."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns // 4, columns, generator=torch.Generator().manual_seed(99))
    sizes = torch.logspace(-1, 1, columns)[
        torch.randperm(columns, generator=torch.Generator().manual_seed(98))
    ]
    x = torch.randn(n, columns // 4, generator=random) @ mixing
    return (x + 0.3 * torch.randn(n, columns, generator=random)) * sizes


def output_error(w: torch.Tensor, rounded: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (rounded - w).T).square().sum() / (x @ w.T).square().sum())


# --- GPTQ ------------------------------------------------------------------------------------------------


@formats
def test_gptq_has_a_lower_error_on_other_inputs_of_the_same_kind(format_):
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    seen, other = correlated(4096, 256), correlated(1024, 256, seed=1)
    moments = seen.T @ seen
    errors = {
        "nearest": output_error(w, round_nearest(w, format_).dequantised(), other),
        "search": output_error(w, round_search(w, format_).dequantised(), other),
        "weighted": output_error(
            w, round_search(w, format_, importance=moments.diagonal()).dequantised(), other
        ),
        "gptq": output_error(w, round_gptq(w, moments, format_).dequantised(), other),
    }
    assert errors["gptq"] < 0.5 * errors["weighted"] < 0.5 * errors["search"], errors


@formats
def test_gptq_is_search_where_inputs_have_nothing_to_do_with_each_other(format_):
    w = torch.randn(40, 128, generator=torch.Generator().manual_seed(1))
    gptq, search = round_gptq(w, torch.eye(128) * 7, format_), round_search(w, format_)
    assert torch.equal(gptq.codes, search.codes)
    torch.testing.assert_close(gptq.scales, search.scales, rtol=0.02, atol=0)  # fitted once more


@formats
def test_gptq_is_what_the_slow_formula_gives(format_):
    """Round a column, let all later ones answer as least squares has it, strike it out, and so on."""
    w, moments = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), damped_moments(64)
    rounded = gptq._round_rows(w, gptq._answers(moments), format_)
    rest, steps = w.double(), torch.empty(5, 64)
    for i in range(64):
        scale, zero = (part[:, i // format_.block] for part in (rounded.scales.double(), rounded.zeros))
        steps[:, i] = ((rest[:, i] / scale).round() + zero).clamp(0, format_.top) - zero
        lost = rest[:, i] - steps[:, i] * scale
        if i < 63:
            answer = torch.linalg.solve(moments[i + 1 :, i + 1 :], moments[i + 1 :, i])
            rest[:, i + 1 :] += lost[:, None] * answer
    assert torch.equal(steps, rounded.steps.flatten(1))


@formats
def test_a_sweep_moves_each_code_to_where_it_is_best(format_):
    w, moments = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), damped_moments(64)
    rounded = gptq._round_rows(w, torch.eye(64), format_)  # knows nothing of the moments
    steps, scales = (
        rounded.steps.flatten(1).double(),
        rounded.scales.double().repeat_interleave(format_.block, 1),
    )
    zeros = rounded.zeros.repeat_interleave(format_.block, 1)
    gptq._sweep(rounded, moments.float(), format_)
    for i in range(64):
        others = torch.arange(64) != i
        wish = w[:, i] + (w - steps * scales)[:, others].double() @ moments[others, i] / moments[i, i]
        steps[:, i] = ((wish / scales[:, i]).round() + zeros[:, i]).clamp(0, format_.top) - zeros[:, i]
    assert torch.equal(steps, rounded.steps.flatten(1).double())


@formats
def test_scales_are_fitted_together_as_least_squares_has_it(format_):
    w, x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), correlated(500, 64)
    rounded = gptq._round_rows(w, torch.eye(64), format_)
    gptq._refit(rounded, x.T @ x)
    for row, steps, scales in zip(w, rounded.steps, rounded.scales, strict=True):
        parts = torch.stack(
            [x[:, i * format_.block :][:, : format_.block] @ s for i, s in enumerate(steps)], dim=1
        )
        best = torch.linalg.lstsq(parts.double(), (x @ row).double()[:, None]).solution[:, 0]
        torch.testing.assert_close(scales.double(), best, rtol=1e-3, atol=1e-4)


@formats
def test_the_sweep_and_the_fit_lower_the_error_of_every_row(format_):
    w, moments = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)), damped_moments(256)

    def errors(values: torch.Tensor) -> torch.Tensor:
        return (((values - w).double() @ moments) * (values - w)).sum(dim=1)

    once = gptq._round_rows(w, gptq._answers(moments), format_)
    swept = gptq._round_rows(w, gptq._answers(moments), format_)
    gptq._sweep(swept, moments.float(), format_)
    first, second = errors(w - once.error), errors(w - swept.error)
    x = correlated(500, 256).double()
    last = errors(round_gptq(w, x.T @ x, format_).dequantised())
    assert (second <= first * (1 + 1e-6)).all()
    assert (last <= second * (1 + 1e-6)).all()
    assert last.sum() < 0.99 * second.sum() < 0.97 * first.sum()


def test_a_block_of_zeros_stays_zero():
    w, x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), correlated(500, 64)
    w[2], w[3, 32:] = 0.0, 0.0
    found = round_gptq(w, x.T @ x, BlockFormat(bits=4)).dequantised()
    assert found.isfinite().all()
    assert found[2].eq(0).all()


def damped_moments(columns: int) -> torch.Tensor:
    x = correlated(500, columns).double()
    return gptq._damped(x.T @ x, "w")


@formats
def test_rows_beyond_one_chunk_are_rounded_alike(format_):
    w, x = torch.randn(4100, 32, generator=torch.Generator().manual_seed(1)), correlated(200, 32)
    whole, part = round_gptq(w, x.T @ x, format_), round_gptq(w[4090:], x.T @ x, format_)
    assert torch.equal(whole.codes[4090:], part.codes)


def test_inputs_that_were_never_seen_are_rounded_all_the_same():
    w, format_ = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), BlockFormat(bits=4)
    moments = torch.zeros(64, 64)
    assert torch.equal(round_gptq(w, moments, format_).codes, round_search(w, format_).codes)
    moments[3, 3] = 1e9
    errors = (round_gptq(w, moments, format_).dequantised() - w).abs()
    assert errors[:, 3].max() < 0.05  # the others: up to 2
    assert errors.max() < 2


def test_inputs_that_are_not_finite_are_an_error_with_the_name():
    with pytest.raises(CalibrationError, match=r"the inputs of blocks\.0\.mlp\.down\.weight are not finite"):
        round_gptq(
            torch.ones(4, 32),
            torch.full((32, 32), torch.inf),
            BlockFormat(bits=4),
            "blocks.0.mlp.down.weight",
        )


# --- windows of a text -----------------------------------------------------------------------------------


def test_windows_are_spread_over_the_whole_text():
    ids = list(range(100_000))
    windows = calibration_windows(ids, context=8192)
    assert windows.shape == (TOKENS // WINDOW, WINDOW)
    assert (windows[0, 0], windows[-1, -1]) == (0, 99_999)
    assert (windows.diff(dim=1) == 1).all()
    assert calibration_windows(ids, context=100).shape[1] == 100
    assert calibration_windows(ids[:LEAST_TOKENS], context=8192).shape == (LEAST_TOKENS // WINDOW, WINDOW)


def test_a_text_that_is_too_short_is_refused_with_what_is_wanted():
    with pytest.raises(InputError, match=r"has 1,999 tokens, wanted at least 2,048; give a longer one"):
        calibration_windows(list(range(1999)), context=512)


# --- a text through a decoder ----------------------------------------------------------------------------


def weights_of(decoder: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def reader(weights: dict[str, torch.Tensor]):
    return lambda name, dtype: weights[name].to(dtype)


def windows_of(config, n: int = 12, T: int = 24) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (n, T), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def run(decoder: Transformer, windows: torch.Tensor):
    """Logits and the whole cache."""
    mask = torch.ones_like(windows)
    return decoder(windows, mask, positions(mask), decoder.empty_state(len(windows), []))


def with_weights(config, weights: dict[str, torch.Tensor]) -> Transformer:
    decoder = random_decoder(config)
    decoder.load_state_dict(weights, strict=False)
    return decoder


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_calibrated_decoder_is_nearer_to_the_original_than_a_searched_one(config, bits):
    weights, format_ = weights_of(random_decoder(config)), BlockFormat(bits=bits, block=16)
    few = torch.randn(
        2, 211, 8, generator=torch.Generator().manual_seed(5)
    )  # inputs that agree, as trained ones do
    weights["embed.weight"] = few[0] @ few[1, :64].T / 8
    matrices = [name for name, weight in weights.items() if weight.dim() == 2]
    found = calibrate(config, reader(weights), windows_of(config, 40), lambda _: format_, Silent())
    assert set(found.blocks) == set(matrices)
    exact, _ = run(with_weights(config, weights), windows_of(config))
    errors = []
    for rounded in (found.blocks, {name: round_search(weights[name], format_) for name in matrices}):
        dequantised = {name: blocks.dequantised() for name, blocks in rounded.items()}
        logits, _ = run(with_weights(config, weights | dequantised), windows_of(config))
        errors.append(float((logits - exact).square().mean()))
    assert errors[0] < 0.8 * errors[1]


def test_the_head_is_rounded_for_what_reaches_it():
    decoder, windows, format_ = random_decoder(UNTIED), windows_of(UNTIED), BlockFormat(bits=4)
    wanted = {"head.weight": format_, "embed.weight": format_}
    found = calibrate(UNTIED, reader(weights_of(decoder)), windows, wanted.get, Silent()).blocks
    with torch.no_grad():
        mask = torch.ones_like(windows)
        x = decoder.norm(
            decoder.body(windows, mask, positions(mask), decoder.empty_state(len(windows), [])).main
        )
    moments = x.flatten(0, 1).T @ x.flatten(0, 1)
    expected = round_gptq(decoder.head.weight.detach(), moments, format_)
    assert (found["head.weight"].codes == expected.codes).float().mean() > 0.999  # sums in another order
    assert torch.equal(
        found["embed.weight"].codes, round_search(decoder.embed.weight.detach(), format_).codes
    )


def test_only_what_has_a_format_is_rounded_and_each_as_it_says():
    weights = weights_of(random_decoder(TIED))
    wanted = {"blocks.1.mlp.up.weight": FORMATS[0], "blocks.0.attention.out.weight": FORMATS[2]}
    found = calibrate(TIED, reader(weights), windows_of(TIED), wanted.get, Silent())
    assert {name: blocks.format for name, blocks in found.blocks.items()} == wanted


def test_a_layer_is_calibrated_with_what_the_rounded_layers_before_it_give():
    """The second layer's blocks are those that GPTQ finds for a model whose first layer is the rounded one already."""
    weights, format_ = weights_of(random_decoder(TIED)), BlockFormat(bits=4)
    both = calibrate(TIED, reader(weights), windows_of(TIED), lambda _: format_, Silent()).blocks
    first = {name: blocks.dequantised() for name, blocks in both.items() if name.startswith("blocks.0.")}
    name = "blocks.1.attention.qkv.weight"
    second = calibrate(
        TIED, reader(weights | first), windows_of(TIED), lambda n: format_ if n == name else None, Silent()
    )
    alone = calibrate(
        TIED, reader(weights), windows_of(TIED), lambda n: format_ if n == name else None, Silent()
    )
    assert torch.equal(both[name].codes, second.blocks[name].codes)
    assert not torch.equal(both[name].codes, alone.blocks[name].codes)


def test_ranges_are_those_of_the_cache_that_the_decoder_writes():
    decoder, windows = random_decoder(PLAIN), windows_of(PLAIN)
    _, state = run(decoder, windows)
    ranges = calibrate(PLAIN, reader(weights_of(decoder)), windows, lambda _: None, Silent()).ranges
    assert len(ranges) == PLAIN.n_layers
    for layer, (keys, values) in enumerate(ranges):
        assert keys.shape == (PLAIN.attention.n_kv_heads, PLAIN.attention.head_dim)
        for part, cached in zip((keys, values), state[2 * layer : 2 * layer + 2], strict=True):
            torch.testing.assert_close(part, cached.abs().amax(dim=(0, 2)))


def test_ranges_of_a_rounded_decoder_are_its_own():
    weights, windows, format_ = weights_of(random_decoder(TIED)), windows_of(TIED), BlockFormat(bits=4)
    body = lambda name: format_ if name.startswith("blocks.") else None  # noqa: E731 (a format by name)
    found = calibrate(TIED, reader(weights), windows, body, Silent())
    dequantised = {name: blocks.dequantised() for name, blocks in found.blocks.items()}
    theirs = calibrate(TIED, reader(weights | dequantised), windows, lambda _: None, Silent()).ranges
    for pair, other in zip(found.ranges, theirs, strict=True):
        torch.testing.assert_close(pair, other)


def test_progress_counts_layers_and_the_head():
    class Counter(Silent):
        total = done = 0

        def stage(self, title, total):
            self.total += total

        def advance(self, amount=1):
            self.done += amount

    counter = Counter()
    calibrate(PLAIN, reader(weights_of(random_decoder(PLAIN))), windows_of(PLAIN), lambda _: None, counter)
    assert counter.done == counter.total > PLAIN.n_layers
