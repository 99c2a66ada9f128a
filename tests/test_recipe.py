"""Which matrices a recipe rounds to what, and what it refuses: nobody's option goes without effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tfmx import InputError
from tfmx.export.recipe import Matrix, Quant
from tfmx.tfm_model.blocks import BlockFormat, BlockSize, LazyBlocks

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


def test_a_mixed_recipe_widens_both_ends_and_the_way_out_of_mlps_of_decoder_and_encoder() -> None:
    matrices = model(4) | model(3, part="encoder.")
    matrices |= {"embed.project.weight": Matrix((64, 128)), "blocks.1.cross.kv.weight": Matrix((64, 128))}
    found = bits(replace(INT4, mixed=True), matrices)
    assert found.keys() == matrices.keys()
    narrow = {name for name in found if found[name] == 4}
    assert narrow == {
        *(f"blocks.{layer}.attention.qkv.weight" for layer in (1, 2)),
        "blocks.1.cross.kv.weight",
        "encoder.blocks.1.attention.qkv.weight",
    }
    assert bits(replace(INT4, mixed=None), matrices) == found


def test_int4_is_mixed_by_default_but_where_nothing_would_be_left() -> None:
    assert set(bits(replace(INT4, mixed=None), model(3)).values()) == {4, 8}
    assert set(bits(replace(INT4, mixed=None), model(2)).values()) == {4}
    assert set(bits(replace(INT4, mixed=None, skip=("blocks.*",)), model(3)).values()) == {4}
    assert set(bits(Quant(bits=8, mixed=None), model(3)).values()) == {8}
    assert set(bits(replace(INT4, mixed=None), model(3, kept())).values()) == {4}


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
    ("asked", "width", "block"), [(128, 192, 64), (64, 96, 32), (32, 48, 16), (32, 64, 32), (32, 341, None)]
)
def test_rows_that_are_no_whole_blocks_get_the_largest_smaller_ones_or_stay_float(
    asked: BlockSize, width: int, block: BlockSize | None
) -> None:
    matrices = model(2) | {"blocks.0.narrow.weight": Matrix((64, width))}
    found = Quant(bits=4, block=asked).layouts(matrices)
    assert found["embed.weight"].format.block == asked  # rows of 128
    assert ("blocks.0.narrow.weight" in found) == (block is not None)
    assert block is None or found["blocks.0.narrow.weight"].format.block == block


def test_a_model_without_any_whole_blocks_is_refused() -> None:
    with pytest.raises(InputError, match=r"rows of 20 and 341 weights do not even fall into blocks of 16"):
        INT4.layouts({"a.weight": Matrix((64, 341)), "b.weight": Matrix((64, 20))})


@pytest.mark.parametrize(
    ("quant", "blocks", "fine"),
    [
        (Quant(bits=8), None, {"head", "down"}),
        (INT4, None, set()),
        (replace(INT4, mixed=True), None, set()),
        (INT4, kept(), {"head", "down", "qkv"}),
        (replace(INT4, activations="int8"), kept(), set()),
        (Quant(bits=8, activations="float"), None, set()),
    ],
)
def test_inputs_are_rounded_in_two_steps_where_it_is_seen(
    quant: Quant, blocks: LazyBlocks | None, fine: set[str]
) -> None:
    """An embedding that is no head is not multiplied with anything."""
    found = quant.layouts(model(4, blocks))
    assert {name.split(".")[-2] for name, layout in found.items() if layout.fine} == fine
    tied = {name: matrix for name, matrix in model(4, blocks).items() if name != "head.weight"}
    assert quant.layouts(tied)["embed.weight"].fine == ("head" in fine)
