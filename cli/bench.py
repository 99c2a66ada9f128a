"""`tfmx bench`: how fast a bundle is here, and how much of what the machine could do that is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from .boundary import EXIT_CODES, debug_option
from .console import percent, plural, say, size, write_line, write_table
from .kind_words import describe_numbers
from .output_file import check_place, write_whole
from .progress import Bars

if TYPE_CHECKING:
    from ..runtime.bench import AtLength, Benchmark, Spread
    from ..runtime.bundle import Bundle

_CACHES = ("append", "capacity")  # growths of state: one dtype in a bundle
_MOVED = 0.2  # of the bandwidth, between before and after: then something else ran here meanwhile


@click.command(short_help="Measure a bundle's speed, start and memory.", epilog=EXIT_CODES)
@click.argument("bundle")
@click.option(
    "--lengths",
    metavar="N,N,...",
    help="Tokens of context at which to measure.  [default: 32, 512 and 1024, as the context allows]",
)
@click.option("--batch", type=int, default=1, show_default=True, metavar="N", help="Sequences at once.")
@click.option("--threads", type=int, metavar="N", help="CPU threads.  [default: one a physical core]")
@click.option(
    "--repeats", type=int, default=5, show_default=True, metavar="N", help="How often; medians are shown."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with everything.")
@click.option("--plot", metavar="FILE", help="Draw it as well, to a .png file (needs the extra `images`).")
@debug_option
def command(
    bundle: str,
    lengths: str | None,
    batch: int,
    threads: int | None,
    repeats: int,
    as_json: bool,
    plot: str | None,
) -> None:
    """Measure BUNDLE on this machine's CPU: prefill and decode at several lengths, start, peak memory.

    Each figure is a median, with the least and the most in parentheses. What the machine could do at best is
    measured before and after: of reading memory, which limits decode, and of float32 matrix products, which
    limit prefill. Leave the machine alone meanwhile.
    """
    place = None if plot is None else check_place(plot, (".png",), "--plot")
    if place is not None:
        import PIL  # noqa: F401 (minutes before it is used, should it not be there)
    with Bars() as progress:
        progress.stage("checking the files", 1)
        from ..runtime.bench import BenchOptions, bench
        from ..runtime.bundle import Bundle

        options = BenchOptions(lengths=_lengths(lengths), batch=batch, threads=threads, repeats=repeats)
        opened = Bundle.open(bundle)
        found = bench(opened, options, progress)
    if as_json:
        write_line(json.dumps(_as_json(opened, found), indent=2, ensure_ascii=False))
    else:
        _report(opened, found)
    if place is not None:
        from .bench_png import draw_bench

        picture = draw_bench(_title(opened, found), _facts(found), found.lengths)
        write_whole(place, lambda file: file.write(picture))
    if found.limits_moved > _MOVED:
        say(
            f"the machine was not quiet: its bandwidth changed by {found.limits_moved:.0%} meanwhile; measure again"
        )


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise click.UsageError(f"--lengths is {text[:60]!r}; wanted numbers such as 32,512")
    return tuple(map(int, parts))


def _title(bundle: Bundle, found: Benchmark) -> str:
    manifest = bundle.manifest
    return (
        f"{bundle.path}: {manifest.target}, {describe_numbers(manifest)}, {plural(found.threads, 'thread')}, "
        f"batch {found.batch}, {plural(found.repeats, 'repeat')}"
    )


def _report(bundle: Bundle, found: Benchmark) -> None:
    write_line(_title(bundle, found))
    rows = [("context", "prefill, tokens/s", "of limit", "decode, tokens/s", "of limit")]
    rows += [_row(entry) for entry in found.lengths]
    write_table(rows, align=">>>>>")
    write_table(_facts(found))


def _facts(found: Benchmark) -> list[tuple[str, str]]:
    return [
        ("process start to first token", _spread(found.first_token_seconds, ".2f", " s")),
        ("of that, loading", _spread(found.load_seconds, ".2f", " s")),
        ("peak memory", "unknown here" if found.peak_bytes is None else size(found.peak_bytes)),
        ("memory reads, at best", f"{size(found.limits.read_bytes_per_second)}/s"),
        ("float32 matrix products, at best", f"{found.limits.flops_per_second / 1e9:.0f} GFLOP/s"),
    ]


def _row(entry: AtLength) -> tuple[str, str, str, str, str]:
    return (
        f"{entry.length:,}",
        _rate(entry.prefill_tokens_per_second),
        "" if entry.prefill_share is None else percent(entry.prefill_share),
        _rate(entry.decode_tokens_per_second),
        percent(entry.decode_share),
    )


def _spread(found: Spread, form: str, unit: str = "") -> str:
    if found.least == found.most:
        return f"{found.median:{form}}{unit}"
    return f"{found.median:{form}}{unit} ({found.least:{form}} to {found.most:{form}})"


def _rate(found: Spread) -> str:
    return _spread(found, ",.0f" if found.median >= 100 else ".1f")


def _as_json(bundle: Bundle, found: Benchmark) -> dict[str, Any]:
    from ..strict_json import encode

    manifest = bundle.manifest
    about = {
        "bundle": str(bundle.path),
        "target": manifest.target,
        "dtype": manifest.dtype,
        "quant": None if manifest.quant is None else manifest.quant.weights,
        "cache": next((state.dtype for state in manifest.state if state.growth in _CACHES), None),
    }
    return {**about, **encode(found)}
