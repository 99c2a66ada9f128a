"""Which matrices a recipe rounds to what, and what it refuses: nobody's option goes without effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tfmx import InputError
from tfmx.export.recipe import Matrix, Quant
from tfmx.tfm_model.blocks import BlockFormat, LazyBlocks

INT4 = Quant(bits=4)
NAMES = ("attention.qkv.weight", "mlp.down.weight")


def never_read():
    raise AssertionError("a recipe needs no weights")


def kept(block: int = 32) -> LazyBlocks:
    return LazyBlocks(BlockFormat(bits=4, block=block), shifted=False, read=never_read)


def model(n_layers: int, blocks: LazyBlocks | None = None, part: str = "") -> dict[str, Matrix]:
    layers = [f"blocks.{layer}.{name}" for layer in range(n_layers) for name in NAMES]
    return {f"{part}{name}": Matrix((64, 128), blocks) for name in ("embed.weight", *layers, "head.weight")}


def bits(quant: Quant, matrices: dict[str, Matrix]) -> dict[str, int]:
    return {name: layout.format.bits for name, layout in quant.layouts(matrices).items()}


def test_a_mixed_recipe_widens_both_ends_of_the_decoder_and_of_the_encoder() -> None:
    matrices = model(4) | model(3, part="encoder.")
    matrices |= {"embed.project.weight": Matrix((64, 128)), "blocks.1.cross.kv.weight": Matrix((64, 128))}
    found = bits(replace(INT4, mixed=True), matrices)
    assert found.keys() == matrices.keys()
    narrow = {name for name in found if found[name] == 4}
    assert narrow == {
        *(f"blocks.{layer}.{name}" for layer in (1, 2) for name in NAMES),
        "blocks.1.cross.kv.weight",
        *(f"encoder.blocks.1.{name}" for name in NAMES),
    }


def test_the_checkpoints_blocks_are_kept_and_what_has_none_is_rounded() -> None:
    matrices = model(2, kept()) | {"head.weight": Matrix((64, 128))}
    found = Quant(bits=8).layouts(matrices)
    assert {name for name, layout in found.items() if layout.format.bits == 8} == {"head.weight"}
    assert set(bits(Quant(bits=8, again=True), matrices).values()) == {8}


@pytest.mark.parametrize(
    ("quant", "matrices", "words"),
    [
        (replace(INT4, again=True), model(1), "--requantise is for checkpoints with blocks"),
        (replace(INT4, block=64), model(1, kept()), "has blocks of 32 weights, --quant-block is 64"),
        (replace(INT4, calibrate=Path("text")), model(1, kept()), "--calibrate has nothing to round"),
        (replace(INT4, mixed=True), model(1, kept()), "--quant-mixed has nothing to round"),
        (replace(INT4, zero_points=True), model(1, kept()), "--quant-zero-points has nothing to round"),
        (replace(INT4, rounding="nearest"), model(1, kept()), "--quant-round nearest has nothing to round"),
        (Quant(bits=8), model(1, kept()), "--quant is int8, the checkpoint's blocks are int4"),
        (replace(INT4, skip=("*",)), model(1), "leaves no matrix to quantise"),
        (replace(INT4, mixed=True), model(2), "--quant-mixed leaves no matrix at int4"),
    ],
)
def test_options_without_effect_are_refused(quant: Quant, matrices: dict[str, Matrix], words: str) -> None:
    with pytest.raises(InputError, match=words):
        quant.layouts(matrices)


@pytest.mark.parametrize("quant", [replace(INT4, block=64, again=True), INT4])
def test_blocks_of_the_checkpoint_are_kept_or_rounded_again_as_asked(quant: Quant) -> None:
    found = quant.layouts(model(1, kept()))
    assert {layout.format.block for layout in found.values()} == {quant.block}


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (48, r"rows of 48 weights .*\(blocks.\*.narrow.weight\); use --quant-block 16$"),
        (40, r"rows of 40 weights .*; use --quant-block 16 --quant-skip 'blocks.\*.narrow.weight'$"),
    ],
)
def test_rows_that_are_no_whole_blocks_are_told_together_with_what_to_do(width: int, words: str) -> None:
    narrow = {f"blocks.{layer}.narrow.weight": Matrix((64, width)) for layer in range(3)}
    with pytest.raises(InputError, match=words):
        INT4.layouts(model(3) | narrow)
