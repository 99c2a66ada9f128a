"""`tfmx export`: a checkpoint becomes a bundle."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

import click

from .boundary import EXIT_CODES, debug_option
from .choice import Choice
from .console import plural, size, write_line, write_table
from .kind_words import describe_length, describe_numbers
from .number_list import parse_numbers
from .progress import Bars
from .quantisation import (
    Quantisation,
    check_quantisation,
    quant_options,
    read_quant,
    report_cost,
    report_matrices,
)

if TYPE_CHECKING:
    from ..export.parity import Parity
    from ..runtime.bundle import Bundle


@click.command(short_help="Turn a checkpoint into a verified bundle.", epilog=EXIT_CODES)
@click.argument("source")
@click.option(
    "-o", "--out", metavar="OUT", required=True, help="The folder to write; a bundle there is replaced."
)
@click.option(
    "--target",
    type=Choice(["ort", "portable"]),
    default="ort",
    show_default=True,
    help="ort: fused operators of ONNX Runtime, fastest. portable: standard operators only, for other runtimes.",
)
@click.option(
    "--dtype",
    type=Choice(["fp32", "fp16"]),
    default="fp32",
    show_default=True,
    help="The precision of weights, cache and arithmetic.",
)
@click.option(
    "--opset", type=int, metavar="N", help="The version of ONNX's operators, 17 to 24.  [default: 18]"
)
@click.option(
    "--max-context",
    type=int,
    metavar="N",
    help="The longest sequence.  [default: what the model was made for]",
)
@click.option(
    "--attentions",
    metavar="LAYERS",
    help="Layers whose attention weights the graphs also give: all, or numbers such as 0,2.  [default: none]",
)
@quant_options
@click.option(
    "--no-verify", is_flag=True, help="Skip the comparison with PyTorch; the bundle then carries no proof."
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@debug_option
def command(
    source: str,
    out: str,
    target: Literal["ort", "portable"],
    dtype: Literal["fp32", "fp16"],
    opset: int | None,
    max_context: int | None,
    attentions: str | None,
    no_verify: bool,
    quiet: bool,
    **quantisation: Unpack[Quantisation],
) -> None:
    """Turn a checkpoint into a bundle: ONNX graphs, weights, tokenizer.

    SOURCE is a Hugging Face folder, a GGUF file, a model of your own as path/to/file.py:factory (that file
    is run), or preset:NAME, a small model of the built-in family with random weights (an unknown name lists
    them). The graphs are compared with PyTorch in float64, and unless they compute the same, nothing is
    written.
    """
    layers = () if attentions is None else parse_numbers(attentions, "--attentions")
    check_quantisation(quantisation, target, dtype)
    _check_places(Path(out), quantisation["calibrate"])
    _check_source(
        source, target, opset, max_context, "all" if layers is None else tuple(layers), quantisation
    )
    started = time.perf_counter()
    with Bars(lines=True, quiet=quiet) as progress:
        progress.stage("loading PyTorch", 1)
        from ..export.options import DEFAULT_OPSET, ExportOptions
        from ..export.pipeline import export
        from ..runtime.bundle import Bundle

        options = ExportOptions(
            target=target,
            dtype=dtype,
            opset=DEFAULT_OPSET if opset is None else opset,
            max_context=max_context,
            attentions="all" if layers is None else tuple(layers),
            verify=not no_verify,
            quant=read_quant(quantisation),
            kv="int8" if quantisation["kv"] == "int8" else "float",
        )
        with contextlib.redirect_stdout(sys.stderr):  # what a user's own module prints is no result
            parity = export(source, Path(out), options, progress)
    seconds = time.perf_counter() - started
    if not quiet:
        _report(Bundle.open(out, check=False), parity, source, seconds, quantisation)


def _check_places(out: Path, text: Path | None) -> None:
    """Minutes before they are used."""
    from ..export.publish import check_target
    from ..export.quality_windows import read_text

    check_target(out)
    if text is not None and (text.is_file() or text.is_dir() or not text.exists()):  # a pipe is read once
        read_text(str(text))


def _check_source(
    source: str,
    target: Literal["ort", "portable"],
    opset: int | None,
    max_context: int | None,
    attentions: tuple[int, ...] | Literal["all"],
    quantisation: Quantisation,
) -> None:
    """Whatever can be known without PyTorch, which takes seconds to load."""
    from ..export.fitting import check_max_context, check_recipe
    from ..export.source_check import check_source
    from ..runtime.ops import check_opset

    if opset is not None:
        check_opset(opset)
    if max_context is not None:
        check_max_context(max_context)
    config = check_source(source, max_context, attentions)
    if config is not None:
        check_recipe(
            config,
            target,
            kv_int8=quantisation["kv"] == "int8",
            calibrates=quantisation["calibrate"] is not None,
            requantises=quantisation["requantise"],
        )


def _report(
    bundle: Bundle, parity: Parity | None, source: str, seconds: float, quantisation: Quantisation
) -> None:
    manifest = bundle.manifest
    write_line(
        f"{bundle.path}: {manifest.target}, {describe_numbers(manifest)}, opset {manifest.opset}, "
        f"{describe_length(manifest)}, made in {seconds:.1f} s"
    )
    nodes = {graph.file: sum(bundle.summary(role).ops.values()) for role, graph in manifest.graphs.items()}
    by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0]))
    rows = [
        (name, size(info.size), f"{nodes[name]:,} nodes" if name in nodes else "") for name, info in by_size
    ]
    rows.append(("total", size(sum(info.size for info in manifest.files.values())), ""))
    write_table(rows, align="<>>")
    if manifest.quant is not None:
        report_matrices(manifest.quant, quantisation)
        if plain := manifest.model.get("plain_matrices"):
            write_line(f"  as they are: {', '.join(map(str, plain))}")
    if parity is None:
        write_line("not verified (--no-verify); this compares it with PyTorch:")
        write_line(f"  tfmx verify {shlex.quote(str(bundle.path))} --against {shlex.quote(source)}")
    else:
        _report_parity(parity)
        if manifest.quant is not None:
            report_cost(manifest)


def _report_parity(parity: Parity) -> None:
    from ..export.parity import FACTOR

    passed = sum(case.passed for case in parity.cases)
    write_line(f"verified against PyTorch: {passed} of {plural(len(parity.cases), 'case')} pass")
    write_line(
        f"  worst: {parity.worst.ratio:.2f} times PyTorch's own rounding error ({FACTOR:g} allowed), "
        f"in '{parity.worst.name}'"
    )
    if parity.rounding is not None:
        write_line(
            f"  with what the graphs round on the way: {parity.rounding.worst.ratio:.2f} times the error of PyTorch "
            "rounding the same"
        )
