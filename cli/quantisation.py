"""The options of `tfmx export` that choose how weights and cache are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import click

from .choice import Choice
from .console import write_line
from .given import refuse_options
from .kind_words import describe_matrices

if TYPE_CHECKING:
    from ..export.recipe import Quant
    from ..runtime.manifest import Manifest, QuantInfo

_COMPANIONS = ("quant_block", "quant_zero_points", "quant_round", "quant_mixed", "quant_skip", "requantise", "quant_activations", "calibrate")  # fmt: skip


class Quantisation(TypedDict):
    quant: Literal["int8", "int4"] | None
    quant_block: str
    quant_zero_points: bool | None
    quant_round: Literal["smooth", "search", "nearest"]
    quant_mixed: bool | None
    quant_skip: tuple[str, ...]
    quant_activations: Literal["mixed", "int8", "float"]
    requantise: bool
    calibrate: Path | None
    kv: Literal["fp32", "fp16", "int8"] | None


def quant_options(command: Callable[..., None]) -> Callable[..., None]:
    options: list[Any] = [
        click.option(
            "--quant",
            type=Choice(["int8", "int4"]),
            help="Store matrices as whole numbers of 8 or 4 bits, in blocks.  [default: not]",
        ),
        click.option(
            "--quant-block",
            type=Choice(["16", "32", "64", "128"]),
            default="32",
            show_default=True,
            help="Weights that share a scale.",
        ),
        click.option(
            "--quant-zero-points/--quant-symmetric",
            default=None,
            help="A zero point for each block (more exact, with int4 a tenth slower), or none.  [default: with int8]",
        ),
        click.option(
            "--quant-round",
            type=Choice(["smooth", "search", "nearest"]),
            default="smooth",
            show_default=True,
            help="nearest: a block's scale spans it. search: the scale that loses least. smooth: search, weighted "
            "by what a text of tfmx's shows of the inputs, after large channels were evened out between activations and "
            "weights (decoders of tokens; else as search).",
        ),
        click.option(
            "--calibrate",
            type=click.Path(path_type=Path),
            metavar="TEXT",
            help="Round for what the model computes on this text (smooth, then GPTQ), a few thousand words.  [default: no text]",
        ),
        click.option(
            "--quant-mixed/--quant-uniform",
            default=None,
            help="With int4, embedding, head, first and last layer, and the projections out of the MLPs keep 8 bits; or all "
            "matrices have 4.  [default: mixed, but for models of which that leaves nothing at 4]",
        ),
        click.option(
            "--quant-skip",
            metavar="PATTERN",
            multiple=True,
            help="Leave matrices as they are, such as head.weight or 'blocks.0.*'; may be given again.",
        ),
        click.option(
            "--quant-activations",
            type=Choice(["mixed", "int8", "float"]),
            default="mixed",
            show_default=True,
            help="int8: products with quantised matrices round their inputs too, which is what makes them fast. mixed: "
            "in two steps, nearly as exact as float, where most would be lost (int8 and kept blocks: head, down; some more "
            "where blocks are kept).",
        ),
        click.option(
            "--requantise",
            is_flag=True,
            help="Round the blocks of a quantised GGUF again, instead of taking them over exactly.",
        ),
        click.option(
            "--kv",
            type=Choice(["fp32", "fp16", "int8"]),
            help="Numbers of the cache of keys and values.  [default: those of --dtype]",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def check_quantisation(given: Quantisation, target: str, dtype: str) -> None:
    """Combinations that cannot be, before anything is loaded."""
    if given["quant"] is None:
        refuse_options(_COMPANIONS, "goes with --quant; add --quant int8 or --quant int4")
    if given["quant"] == "int8":
        refuse_options(
            ("quant_mixed",), "chooses between 4 and 8 bits; with --quant int8 all have 8, leave it out"
        )
    if target == "portable":
        refuse_options(("quant_activations",), "is for --target ort; portable graphs round no activations")
    if given["calibrate"] is not None:
        refuse_options(("quant_round",), "does not go with --calibrate, which rounds in its own way")
    kv = given["kv"]
    if kv == "int8" and target != "ort":
        raise click.UsageError(
            f"--kv int8 needs the fused attention of --target ort; with {target} the cache is {dtype}, leave --kv out"
        )
    if kv not in {None, "int8", dtype}:
        works = f"{dtype} or int8" if target == "ort" else dtype
        raise click.UsageError(f"--kv {kv} does not go with --dtype {dtype}: the cache can be {works}")


def read_quant(given: Quantisation) -> Quant | None:
    from ..export.recipe import Quant

    if given["quant"] is None:
        return None
    bits: Literal[4, 8] = 4 if given["quant"] == "int4" else 8
    return Quant(
        bits=bits,
        block=int(given["quant_block"]),  # type: ignore[arg-type]
        zero_points=given["quant_zero_points"],
        rounding=given["quant_round"],
        mixed=given["quant_mixed"],
        skip=given["quant_skip"],
        again=given["requantise"],
        calibrate=given["calibrate"],
        activations=given["quant_activations"],
    )


def report_matrices(quant: QuantInfo, given: Quantisation) -> None:
    write_line(f"matrices: {describe_matrices(quant)}")
    odd = _odd_rows(quant, given)
    if odd:
        write_line(f"  rows that blocks of {given['quant_block']} do not divide: {', '.join(odd)}")


def _odd_rows(quant: QuantInfo, given: Quantisation) -> list[str]:
    """Which matrices got smaller blocks, or none, and were not left out on purpose."""
    from ..export.recipe import general_name, is_left_out

    found: dict[str, None] = {}
    for name, form in quant.matrices.items():
        if form == "float" and not is_left_out(name, given["quant_skip"]):
            found[f"{general_name(name)} stays float"] = None
        elif form != "float" and int(form.split("-")[1]) < int(given["quant_block"]):
            found[f"{general_name(name)} has blocks of {form.split('-')[1]}"] = None
    return list(found)


def report_cost(manifest: Manifest) -> None:
    """One line: what a little text says that quantisation cost."""
    cost = manifest.quality
    if cost is None:
        write_line("quantisation cost: not measured, this bundle continues no text that tfmx could give it")
        return
    write_line(
        f"quantisation cost on {cost['tokens']} tokens of text: divergence {cost['kl_mean']['value']:.2g}, "
        f"top-1 {cost['top_1']['value']:.1%} (tfmx verify --against SOURCE --quality measures it thoroughly)"
    )
