"""Channels that are evened out: the same model to the bit, rounded better, and found again in the bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from random_models import PLAIN, VARIANTS, random_decoder, random_source

from tfmx.export.arithmetic import Arithmetic
from tfmx.export.layer_walk import LayerWalk
from tfmx.export.options import ExportOptions
from tfmx.export.parity_error import ParityError
from tfmx.export.pipeline import export_model
from tfmx.export.progress import Silent
from tfmx.export.recipe import Quant, parse_layout
from tfmx.export.rounded import rounded_blocks
from tfmx.export.rounding import round_search
from tfmx.export.smoothing import Smoothing, _add_squares, check_same, find_smoothing, recover_smoothing
from tfmx.export.source import CheckpointSource
from tfmx.export.stored import StoredMatrices
from tfmx.export.verify import run_gate
from tfmx.runtime.bundle import Bundle
from tfmx.tfm_model.blocks import BlockFormat
from tfmx.tfm_model.checkpoint import Checkpoint, GenerationDefaults, LazyTensor
from tfmx.tfm_model.layers import Linear
from tfmx.tfm_model.transformer import Transformer

WINDOWS = torch.randint(211, (4, 32), generator=torch.Generator().manual_seed(1))


def uneven(config=PLAIN) -> Transformer:
    """With a few channels that are much larger than their neighbours, as trained models have them."""
    model = random_decoder(config)
    with torch.no_grad():
        for block in model.blocks:
            block.attention_norm.weight[5] *= 16
            block.mlp_norm.weight[::17] *= 16
            block.mlp.up.weight[-3] *= 24  # a row that reaches down
    return model


def read_of(model: Transformer):
    tensors = dict(model.named_parameters())
    return lambda name, dtype: tensors[name].detach().to(dtype)


def source_of(model: Transformer) -> CheckpointSource:
    tensors = {
        name: LazyTensor(name, tuple(values.shape), values.detach)
        for name, values in model.named_parameters()
    }
    checkpoint = Checkpoint(
        kind="huggingface", files=(), config=model.config, tensors=tensors, generation=GenerationDefaults()
    )
    return CheckpointSource(checkpoint, ir.DataType.FLOAT)


def found_for(model: Transformer, is_rounded=lambda _: True) -> Smoothing:
    return find_smoothing(model.config, read_of(model), WINDOWS, is_rounded, Silent())


def changed(model: Transformer, smoothing: Smoothing) -> Transformer:
    other = Transformer(model.config).eval()
    weights = {name: smoothing.applied(name, values) for name, values in model.named_parameters()}
    other.load_state_dict(weights, strict=False)
    return other


def logits(model: Transformer) -> torch.Tensor:
    walk = LayerWalk(model.config, read_of(model), WINDOWS)
    for _, block in walk:
        walk.run(block)
    return torch.cat([walk.ends.logits(x) for x in walk.hidden])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_stays_the_same_to_the_bit(variant: str) -> None:
    model = uneven(VARIANTS[variant])
    smoothing = found_for(model)
    factors = torch.cat([*smoothing.rows.values(), *smoothing.columns.values()])
    assert factors.max() >= 4
    assert torch.equal(factors.log2(), factors.log2().round())
    with torch.no_grad():
        assert torch.equal(logits(changed(model, smoothing)), logits(model))


def test_large_channels_are_divided_and_what_reads_them_multiplied() -> None:
    smoothing = found_for(uneven())
    columns, rows = smoothing.columns, smoothing.rows
    assert columns["blocks.0.attention.qkv.weight"].argmax() == 5
    assert torch.equal(rows["blocks.0.attention_norm.weight"], 1 / columns["blocks.0.attention.qkv.weight"])
    half = PLAIN.mlp.hidden
    assert torch.equal(rows["blocks.1.mlp.up.weight"][:half], torch.ones(half))  # the gate's half
    assert torch.equal(rows["blocks.1.mlp.up.weight"][half:], 1 / columns["blocks.1.mlp.down.weight"])
    assert columns["blocks.1.mlp.down.weight"].argmax() == half - 3


def test_rounding_loses_less() -> None:
    model = uneven()
    smooth = changed(model, found_for(model))

    def error(one: Transformer) -> float:
        hooks = [
            module.register_forward_pre_hook(lambda _, args: (rounded_blocks(args[0], 32),))
            for module in one.modules()
            if isinstance(module, Linear)
        ]
        walk = LayerWalk(one.config, read_of(one), WINDOWS)
        for layer, _ in walk:
            walk.run(one.blocks[layer])
        for hook in hooks:
            hook.remove()
        return float((torch.cat([walk.ends.logits(x) for x in walk.hidden]) - logits(model)).norm())

    with torch.no_grad():
        assert error(smooth) < 0.5 * error(model)


@pytest.mark.parametrize("left", ["blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight", "blocks.1.attention.qkv.weight"])  # fmt: skip
def test_what_is_not_rounded_stays_as_it_is(left: str) -> None:
    smoothing = found_for(uneven(), lambda name: name != left)
    assert left not in smoothing.columns
    assert left not in smoothing.rows
    assert "blocks.0.mlp.down.weight" in smoothing.columns


def test_a_layer_that_computes_something_else_is_noticed() -> None:
    model = uneven()
    smoothing = found_for(model)
    walk = LayerWalk(PLAIN, read_of(model), WINDOWS)
    with torch.no_grad():
        check_same(model.blocks[1], 1, smoothing, walk.reads(2))
        del smoothing.columns["blocks.1.mlp.down.weight"]
        with pytest.raises(ParityError, match="layer 1 computes something else"):
            check_same(model.blocks[1], 1, smoothing, walk.reads(2))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("target", ["ort", "portable"])
def test_a_bundle_is_verified_against_the_source_as_it_was(tmp_path: Path, bits, target) -> None:
    model = uneven()
    parity = export_model(
        source_of(model), tmp_path / "b", ExportOptions(target=target, quant=Quant(bits=bits))
    )
    assert parity is not None
    assert parity.passed
    bundle = Bundle.open(tmp_path / "b")
    quant = bundle.manifest.quant
    assert quant is not None
    assert quant.rounding == "smooth"
    layouts = {name: parse_layout(text) for name, text in quant.matrices.items()}
    stored = StoredMatrices(bundle.path, ["prefill", "decode"], layouts, target)
    again = recover_smoothing(PLAIN, read_of(model), stored, Silent())
    assert again.columns["blocks.0.attention.qkv.weight"].max() >= 4
    smoothed = source_of(model).smoothed_as(stored, Silent())
    stored.check(smoothed.weight)
    with pytest.raises(ParityError, match="away from its source"):
        stored.check(source_of(model).weight)
    wanted = arithmetic(target)
    assert run_gate(bundle.path, source_of(model), target, layouts, wanted, Silent(), evened_out=True).passed


def arithmetic(target) -> Arithmetic:
    return Arithmetic(activations="int8" if target == "ort" else "float")


def test_a_bundle_of_another_source_is_still_found_out(tmp_path: Path) -> None:
    export_model(source_of(uneven()), tmp_path / "b", ExportOptions(verify=False, quant=Quant(bits=8)))
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.manifest.quant is not None
    layouts = {name: parse_layout(text) for name, text in bundle.manifest.quant.matrices.items()}
    other = source_of(random_decoder(PLAIN, seed=3))
    with pytest.raises(ParityError, match="away from its source"):
        run_gate(bundle.path, other, "ort", layouts, arithmetic("ort"), Silent(), evened_out=True)


def test_a_norm_that_is_no_power_of_two_off_fails_the_gate(tmp_path: Path) -> None:
    model = uneven()
    export_model(source_of(model), tmp_path / "b", ExportOptions(verify=False, quant=Quant(bits=8)))
    with torch.no_grad():
        model.blocks[1].mlp_norm.weight *= 1.02
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.manifest.quant is not None
    layouts = {name: parse_layout(text) for name, text in bundle.manifest.quant.matrices.items()}
    parity = run_gate(
        bundle.path, source_of(model), "ort", layouts, arithmetic("ort"), Silent(), evened_out=True
    )
    assert not parity.passed


def test_plain_rounding_leaves_the_channels(tmp_path: Path) -> None:
    options = ExportOptions(verify=False, quant=Quant(bits=8, rounding="search"))
    export_model(random_source(replace(PLAIN, n_layers=1)), tmp_path / "b", options)
    bundle = Bundle.open(tmp_path / "b")
    stored = StoredMatrices(bundle.path, ["prefill"], {}, "ort")
    assert torch.equal(
        stored.vector("blocks.0.mlp_norm.weight"),
        dict(random_decoder(replace(PLAIN, n_layers=1)).named_parameters())["blocks.0.mlp_norm.weight"],
    )


@pytest.mark.parametrize("variant", ["plain", "biases and query/key norm"])
def test_importance_is_the_square_of_what_a_matrix_reads(variant: str) -> None:
    """Seen from the model that is evened out: a walk of its own gives the same sums."""
    model = uneven(VARIANTS[variant])
    smoothing = found_for(model)
    other = changed(model, smoothing)
    walk = LayerWalk(other.config, read_of(other), WINDOWS)
    sums: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer, block in walk:
            for name, module in block.named_modules():
                if isinstance(module, Linear):
                    whole = f"blocks.{layer}.{name}.weight"
                    sums[whole] = torch.zeros(module.in_features)
                    module.register_forward_pre_hook(
                        lambda _, args, total=sums[whole]: _add_squares(total, args[0])
                    )
            walk.run(block)
        sums[walk.head] = sum(x.square().sum(dim=(0, 1)) for x in walk.head_inputs())
    assert smoothing.importance.keys() == sums.keys()
    for name, expected in sums.items():
        torch.testing.assert_close(smoothing.importance[name], expected)


def test_weighing_inputs_loses_less_of_what_the_model_computes() -> None:
    """Matrix by matrix, of the squares of the outputs' error that inputs which do not go together would give."""
    model = uneven()
    smoothing, source = found_for(model), source_of(model)
    smoothed = CheckpointSource(smoothing.smoothed(source._checkpoint), ir.DataType.FLOAT)
    for name, importance in smoothing.importance.items():
        w = smoothed.weight(name)
        assert w is not None
        errors = [
            (round_search(w, BlockFormat(bits=4, block=32), name, given).dequantised() - w).square()
            @ importance
            for given in (None, importance)
        ]
        assert errors[1].sum() < errors[0].sum()


def test_a_channel_that_nothing_writes_stays_and_is_found_again(tmp_path: Path) -> None:
    model = uneven()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.up.weight[-5] = 0
    source = source_of(model)
    export_model(source, tmp_path / "bundle", ExportOptions(quant=Quant(bits=8), verify=False))
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.manifest.quant is not None
    layouts = {name: parse_layout(text) for name, text in bundle.manifest.quant.matrices.items()}
    stored = StoredMatrices(bundle.path, ["prefill"], layouts, "ort")
    stored.check(source.smoothed_as(stored, Silent()).weight)
