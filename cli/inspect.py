"""`tfmx inspect`: what is in a bundle, and what running it takes. Nothing is loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from .boundary import EXIT_CODES, debug_option
from .console import plural, size, write_line, write_table
from .kind_words import (
    describe_inputs,
    describe_matrices,
    describe_numbers,
    describe_outputs,
    describe_pixels,
)
from .quality_table import write_quality

if TYPE_CHECKING:
    from ..runtime.bundle import Bundle, GraphInfo, Manifest, TensorInfo

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a dotted name: `past_key_values.7.key`
_WIDEST = 60  # characters of a config value
_GROWTHS = {
    "append": "each step's columns are put behind it",
    "capacity": "a buffer that each step writes into",
    "constant": "of one shape for ever",
    "fixed": "computed once by encode, then only read",
}
_ROLES = ("encode", "prefill", "decode", "select", "sample")  # in the order of a run


@click.command(short_help="Show what a bundle holds and needs.", epilog=EXIT_CODES)
@click.argument("bundle")
@debug_option
def command(bundle: str) -> None:
    """Show BUNDLE: the model's config, graphs with inputs and outputs, operators, files, parity, quality, memory.

    Sizes, names and graphs are checked; `tfmx verify` checks the contents too.
    """
    from ..runtime.bundle import Bundle

    found = Bundle.open(bundle, check=False)
    _show_bundle(found)
    _show_model(found.manifest)
    roles = [role for role in _ROLES if role in found.manifest.graphs]
    for role in roles:
        _show_graph(found, role)
    _show_state(found.manifest)
    _show_operators(found, roles)
    _show_files(found.manifest)
    _show_parity(found.manifest)
    _show_quality(found.manifest)
    _show_memory(found)


def _show_bundle(bundle: Bundle) -> None:
    manifest = bundle.manifest
    tools = ", ".join(f"{name} {version}" for name, version in manifest.tools.items())
    sources = [
        f"{name}, {size(info.size)}, sha256 {info.sha256[:16]}…"
        for name, info in manifest.source.files.items()
    ]
    pixels = describe_pixels(manifest)
    write_line(str(bundle.path))
    write_table(
        [
            ("format", f"{manifest.format}, written by tfmx {manifest.tfmx}"),
            ("tools", tools or "unknown"),
            *zip(
                (f"source ({manifest.source.kind})", *[""] * len(sources)),
                sources or ["no files"],
                strict=False,
            ),
            ("target", f"{manifest.target}, {describe_numbers(manifest)}, opset {manifest.opset}"),
            *_quant_rows(manifest),
            ("kind", manifest.kind),
            ("inputs", describe_inputs(manifest)),
            *([("pixels", pixels)] if pixels else []),
            ("outputs", describe_outputs(manifest)),
            *_generation_rows(manifest),
        ]
    )


def _quant_rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    if manifest.quant is None:
        return
    activations = "int8" if manifest.quant.activations == "int8" else manifest.dtype
    kept = manifest.quant.rounding == "kept"
    rounding = "as the checkpoint had them" if kept else f"rounded by {manifest.quant.rounding}"
    yield (
        "matrices",
        f"{describe_matrices(manifest.quant)}; {rounding}; activations {activations}",
    )


def _generation_rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """The longest sequence; of what generates, its tokens too."""
    if not manifest.generates:
        yield "context", f"{manifest.max_context:,} positions"
        return
    generation = manifest.generation
    ends = ", ".join(map(str, generation.eos_token_ids)) or "none"
    start = generation.decoder_start_token_id
    first = f"begin token {_or_none(generation.bos_token_id)}" if start is None else f"start token {start}"
    yield "vocabulary", f"{manifest.vocab_size:,} tokens; {first}, end tokens {ends}"
    yield "context", f"{manifest.max_context:,} tokens"
    yield "defaults", _pairs(generation.sampling)


def _show_model(manifest: Manifest) -> None:
    _title("model")
    write_table(_flat(manifest.model))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values by dotted name, without those that say nothing."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, [], ()):
            text = str(value)
            yield f"{prefix}{name}", text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _show_graph(bundle: Bundle, role: str) -> None:
    graph: GraphInfo = bundle.manifest.graphs[role]
    summary = bundle.summary(role)
    _title(f"{role}: {graph.file}, {plural(sum(summary.ops.values()), 'node')}")
    rows = [("in", *row) for row in tensor_rows(graph.inputs)] + [
        ("out", *row) for row in tensor_rows(graph.outputs)
    ]
    write_table(rows)


def _show_state(manifest: Manifest) -> None:
    from ..runtime.manifest import TensorInfo

    for growth, meaning in _GROWTHS.items():
        own = [
            TensorInfo(name=state.past, dtype=state.dtype, shape=state.shape)
            for state in manifest.state
            if state.growth == growth
        ]
        if own:
            _title(f"{growth} state: {meaning}")
            write_table(tensor_rows(own))


def tensor_rows(tensors: Iterable[TensorInfo]) -> list[tuple[str, str, str]]:
    """Name, dtype and shape; tensors that differ in a number of their names alone share a row."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for tensor in tensors:
        shape = f"[{', '.join(map(str, tensor.shape))}]"
        number = _NUMBER.search(tensor.name)
        pattern = _NUMBER.sub("\0", tensor.name, count=1)
        groups.setdefault((pattern, tensor.dtype, shape), []).extend([int(number[0])] if number else [])
    return [
        (pattern.replace("\0", _span(numbers)), dtype, shape)
        for (pattern, dtype, shape), numbers in groups.items()
    ]


def _span(numbers: list[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"


def _show_operators(bundle: Bundle, roles: list[str]) -> None:
    _title("operators")
    counts = {role: Counter(bundle.summary(role).ops) for role in bundle.manifest.graphs}
    total = sum(counts.values(), Counter())
    names = sorted(total, key=lambda name: (-total[name], name))
    rows = [("", *roles)]
    rows += [(name, *(f"{counts[role][name]:,}" for role in roles)) for name in names]
    rows.append(("all", *(f"{counts[role].total():,}" for role in roles)))
    write_table(rows, align="<" + ">" * len(roles))


def _show_files(manifest: Manifest) -> None:
    _title("files")
    rows = [(name, size(info.size), f"sha256 {info.sha256[:16]}…") for name, info in manifest.files.items()]
    rows.append(("all", size(sum(info.size for info in manifest.files.values())), ""))
    write_table(rows, align="<>")


def _show_quality(manifest: Manifest) -> None:
    if manifest.quality is not None:
        _title("quality")
        write_quality(manifest.quality)


def _show_parity(manifest: Manifest) -> None:
    _title("parity")
    parity = manifest.parity
    if parity is None:
        write_line("  not verified: exported with --no-verify")
        return
    cases = parity.get("cases", [])
    verdict = "passed" if parity.get("passed") else "FAILED"
    write_table(
        [
            ("rule", str(parity.get("rule"))),
            ("compared", f"{parity.get('runtime')} with {parity.get('reference')}"),
            ("result", f"{verdict}, {plural(len(cases), 'case')}, worst ratio {parity.get('worst_ratio')}"),
        ]
    )
    rows = [("case", "error", "allowed", "ratio", "argmax")]
    columns = ("name", "error", "budget", "ratio", "argmax_agreement")
    rows += [tuple(str(case.get(column)) for column in columns) for case in cases]  # type: ignore[misc]
    write_table(rows, align="<>>>>", indent=4)


def _show_memory(bundle: Bundle) -> None:
    from ..runtime.memory import estimate_memory

    found = estimate_memory(bundle)
    context = bundle.manifest.max_context
    _title("memory of a run on the CPU")
    rows = [
        ("weights, mapped from the file and shared", size(found.weights)),
        ("matrices, packed for the kernels", size(found.packed)),
    ]
    if found.cache_per_token:
        rows.append(("cache of one sequence, a token", size(found.cache_per_token)))
        rows.append((f"cache of one sequence, {context:,} tokens", size(found.cache_at_max_context)))
    if found.constant_state:
        rows.append(("state of one sequence", size(found.constant_state)))
    if found.fixed_state:
        length = bundle.manifest.inputs.length
        rows.append((f"keys and values of one source, {length:,} positions", size(found.fixed_state)))
    rows.append(("one sequence at the full context, beside the weights", size(found.single_sequence)))
    write_table(rows, align="<>")


def _title(text: str) -> None:
    write_line()
    write_line(text)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"


def _or_none(value: object) -> str:
    return "none" if value is None else str(value)
