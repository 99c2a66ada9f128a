"""`tfmx verify`: is the bundle whole, and does it still compute what it should?"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import click

from .. import InputError, TfmxError
from .boundary import EXIT_CODES, debug_option
from .choice import Choice
from .console import plural, say, size, write_line, write_table
from .progress import Bars
from .quality_table import write_quality

if TYPE_CHECKING:
    from ..export.parity import CaseParity
    from ..export.quality import Quality
    from ..export.quality_windows import Windows
    from ..runtime.bundle import Bundle
    from ..runtime.golden import CaseResult


class VerifyError(TfmxError):
    """The bundle does not compute what it should."""


@click.command(short_help="Check a bundle's files and what it computes.", epilog=EXIT_CODES)
@click.argument("bundle", required=False, metavar="BUNDLE")
@click.option(
    "--against",
    metavar="SOURCE",
    help="What the bundle was exported from: repeat the whole comparison with PyTorch (needs the extra `export`).",
)
@click.option(
    "--quality",
    metavar="[TEXT]",
    is_flag=False,
    flag_value="",
    help="With --against: also compare predictions on a text with the source's in float32, and record the "
    "figures in the bundle. TEXT is a file; without it, a text that ships with tfmx (20,440 tokens).",
)
@click.option(
    "--device",
    type=Choice(["cpu", "cuda", "auto"]),
    default="cpu",
    show_default=True,
    help="Where to replay the stored cases.",
)
@click.option(
    "-q", "--quiet", is_flag=True, help="No stages or notes on stderr, but for what --device auto took."
)
@debug_option
def command(
    bundle: str | None,
    against: str | None,
    quality: str | None,
    device: Literal["cpu", "cuda", "auto"],
    quiet: bool,
) -> None:
    """Check every file of BUNDLE against its sha256, then what its graphs compute.

    Without --against the cases that the export stored in the bundle are replayed: inputs with what
    PyTorch gives for them in float64. That needs no PyTorch, so a device can be checked where it stands.
    """
    if bundle is None:
        taken = f": --quality took {quality!r} as its text; put BUNDLE first" if quality else ""
        raise click.UsageError(f"Missing argument 'BUNDLE'{taken}")
    if against is not None and device != "cpu":
        raise click.UsageError("--against compares on the CPU; leave --device out")
    if quality is not None and against is None:
        raise click.UsageError("--quality compares with the source; add --against SOURCE")
    if against is not None:
        from ..export.source_check import check_source

        check_source(against, None, ())  # before seconds go into loading PyTorch
    with Bars(lines=True, quiet=quiet) as progress:
        progress.stage("checking the files", 1)
        from ..runtime.bundle import Bundle

        found = Bundle.open(bundle)
        files = found.manifest.files.values()
        if found.unlisted and not quiet:
            say(f"note: beside the bundle's files, and read by nothing: {', '.join(found.unlisted)}")
        windows = None
        if quality is not None:
            _check_recordable(found)  # before minutes go into what could not be kept
            windows = _windows(found, quality or None, progress)
        if against is None:
            results = _replay(found, device, progress)
        else:
            cases = _compare(found, against, progress)
            if windows is not None and all(case.passed for case in cases):
                measured = _measure(found, against, windows, progress)
    total = size(sum(info.size for info in files))
    write_line(f"{bundle}: {plural(len(files), 'file')} ({total}) as exported")
    if against is None:
        _report_replay(results)
    else:
        _report_comparison(cases)
        if windows is not None:
            _record(found, measured, quiet=quiet)


def _replay(bundle: Bundle, device: Literal["cpu", "cuda", "auto"], progress: Bars) -> list[CaseResult]:
    from ..runtime.devices import choose_device
    from ..runtime.golden import GOLDEN, replay_golden
    from .model import tell_device

    if GOLDEN not in bundle.manifest.files:
        raise VerifyError(
            f"{bundle.path} was exported with --no-verify, so it holds no cases to replay; its files are as "
            "exported. Compare it with --against SOURCE, or export it again"
        )
    chosen = choose_device(device, bundle)
    tell_device(device, chosen)
    progress.stage("replaying", 1)
    return replay_golden(bundle, chosen)


def _report_replay(results: list[CaseResult]) -> None:
    rows = [("case", "steps", "error", "allowed", "")]
    rows += [
        (case.name, str(case.steps), f"{case.error:.2e}", f"{case.budget:.2e}", _verdict(case.passed))
        for case in results
    ]
    write_table(rows, align="<>>>")
    _conclude([case.passed for case in results], "stored case")


def _compare(bundle: Bundle, source: str, progress: Bars) -> tuple[CaseParity, ...]:
    progress.stage("loading PyTorch", 1)
    from ..export.verify import verify_against

    parity = verify_against(bundle, source, progress)
    if parity.rounding is None:
        return parity.cases
    rounded = (replace(case, name=f"{case.name}, rounding") for case in parity.rounding.cases)
    return (*parity.cases, *rounded)


def _report_comparison(cases: tuple[CaseParity, ...]) -> None:
    has_cache = any(case.state_budget for case in cases)
    rows = [
        ("case", "error", "allowed", *(("in cache", "allowed") if has_cache else ()), "ratio", "argmax", "")
    ]
    rows += [
        (
            case.name,
            f"{case.error:.2e}",
            f"{case.budget:.2e}",
            *((f"{case.state_error:.2e}", f"{case.state_budget:.2e}") if has_cache else ()),
            f"{case.ratio:.2f}",
            f"{case.argmax_agreement:.1%}",
            _verdict(case.passed),
        )
        for case in cases
    ]
    write_table(rows, align="<" + ">" * (len(rows[0]) - 2))
    _conclude([case.passed for case in cases], "case")


def _check_recordable(bundle: Bundle) -> None:
    folder = bundle.path.resolve()
    for place in (folder, folder.parent):  # a new manifest is first written beside the bundle
        if not os.access(place, os.W_OK):
            raise InputError(f"--quality records its figures in the bundle, but {place} cannot be written to")


def _windows(bundle: Bundle, text: str | None, progress: Bars) -> Windows:
    """Before the gate: what cannot be measured should not first take its minutes."""
    progress.stage("reading the text", 1)
    from ..export.quality_windows import read_text, text_windows

    return text_windows(bundle, read_text(text))


def _measure(bundle: Bundle, source: str, windows: Windows, progress: Bars) -> Quality:
    from ..export.quality import quality_against

    return quality_against(bundle, source, windows, progress)


def _record(bundle: Bundle, quality: Quality, *, quiet: bool) -> None:
    from ..export.quality import record_quality

    write_quality(quality.certificate())
    record_quality(bundle, quality)
    if not quiet:
        say(f"recorded in {bundle.path / 'manifest.json'}")


def _verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def _conclude(passed: list[bool], noun: str) -> None:
    if not all(passed):
        raise VerifyError(
            f"{passed.count(False)} of {plural(len(passed), noun)} failed: it is further from PyTorch than rounding explains; "
            "if it is compared with what it was exported from (other weights, or ones drawn anew, differ as much), export it again, "
            "and please report it if that does not help"
        )
    write_line(f"verified: {plural(len(passed), noun)} pass")
