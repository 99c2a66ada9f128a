"""Medians of the runs, and the tables that the README shows: who is how fast, and how tfmx stands to the best peer."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from models import CANDIDATES, Candidate

Run = dict[str, float]  # what a worker prints, with bandwidth, moved, others and discarded
LENGTHS = (32, 512, 1024)
MOVED = 0.2  # of the bandwidth, across a measurement that counts as clean
OTHERS = 0.05  # of the cores, that others took meanwhile
PRECISIONS = ("int4", "int8", "fp32")
# Bits of a weight: blocks of 32 with a scale in float16. What an engine adds to that is its own.
BITS = {"int4": 4.5, "int8": 8.5, "fp32": 32.0}
NAMES = {
    "S": "Shape S: random weights in the shape of SmolLM2-135M",
    "M": "Shape M: random weights in the shape of Qwen2.5-0.5B",
    "smollm2": "SmolLM2-135M-Instruct",
}
# (key, as the table calls it, digits, whether more is better)
SPEEDS = [
    *((f"prefill_{length}", f"prefill {length}", 0, True) for length in LENGTHS),
    *((f"decode_{length}", f"decode at {length}", 1, True) for length in LENGTHS),
]
COLUMNS = [
    "prefill 32 / 512 / 1024 (tokens/s)",
    "decode at 32 / 512 / 1024 (tokens/s)",
    "share of the limit at 32",
    "start to first token (s)",
    "peak memory (MB)",
    "disk (MB)",
]
COSTS = [("first_token", "start to first token", 2, False), ("peak_memory", "peak memory", 0, False)]


def summary(candidate: Candidate, runs: list[Run], disk: float) -> dict[str, Any]:
    keys = list(runs[0])
    return {
        "label": candidate.label,
        "precision": candidate.precision,
        "disk": round(disk, 1),
        "median": {key: _rounded(statistics.median(run[key] for run in runs)) for key in keys},
        "spread": {key: _rounded(_spread([run[key] for run in runs])) for key in keys},
        "runs": [{key: _rounded(value) for key, value in run.items()} for run in runs],
    }


def _spread(values: list[float]) -> float:
    """The range, as a share of the median."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def as_markdown(results: dict[str, Any]) -> str:
    parts = [part for shape in NAMES if shape in results["shapes"] for part in _shape(results, shape)]
    return "\n".join([*parts, *_versions(results)]) + "\n"


def _shape(results: dict[str, Any], shape: str) -> list[str]:
    found = results["shapes"][shape]
    machine, candidates = found["machine"], found["candidates"]
    bandwidth = statistics.median(entry["median"]["bandwidth"] for entry in candidates.values())
    spread = statistics.median(entry["spread"]["decode_512"] for entry in candidates.values())
    disturbed = sum(
        run["moved"] > MOVED or run["others"] > OTHERS for e in candidates.values() for run in e["runs"]
    )
    lines = [
        f"### {NAMES[shape]}",
        "",
        f"{found['date']}; {machine['cpu']} ({machine['vectors']}), {machine['cores']} cores, {machine['memory']}, "
        f"{machine['system']}; batch 1, greedy, {found['threads']} threads. Medians of {found['rounds']} interleaved "
        f"rounds, a fresh process each; a median candidate's decode at 512 has a range of {spread:.0%}."
        + (f" {disturbed} of the runs were disturbed by others." if disturbed else "")
        + f" Memory is read at {bandwidth:.1f} GB/s; the limit of decode is that over the weights' bytes.",
        "",
        f"| | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for precision in PRECISIONS:
        group = {name: entry for name, entry in candidates.items() if entry["precision"] == precision}
        limit = bandwidth * 1e3 / (found["parameters"] * BITS[precision] / 8)
        lines += [_row(entry, group, limit) for entry in group.values()]
    lines += [f"\n{CANDIDATES[name].label}: failed." for name in found["failed"]]
    return [*lines, "", *_standing(candidates)]


def _row(entry: dict[str, Any], group: dict[str, Any], limit: float) -> str:
    best = _best(group)

    def cell(key: str, digits: int, *, more: bool) -> str:
        value = entry["median"][key]
        text = f"{value:.{digits}f}"
        return f"**{text}**" if value == best(key, more=more) else text

    speeds = [cell(key, digits, more=more) for key, _, digits, more in SPEEDS]
    costs = [cell(key, digits, more=more) for key, _, digits, more in COSTS]
    share = f"{entry['median']['decode_32'] / limit:.2f}"
    columns = [" / ".join(speeds[:3]), " / ".join(speeds[3:]), share, *costs, f"{entry['disk']:.0f}"]
    return f"| {entry['label']} | {' | '.join(columns)} |"


def _best(group: dict[str, Any]) -> Callable[..., float]:
    def best(key: str, *, more: bool) -> float:
        values: list[float] = [entry["median"][key] for entry in group.values()]
        return max(values) if more else min(values)

    return best


def _standing(candidates: dict[str, Any]) -> list[str]:
    """tfmx over the best peer of the same precision, each figure on its own; above 1 tfmx is ahead."""
    lines = []
    for name, entry in candidates.items():
        if not CANDIDATES[name].is_ours:
            continue
        peers = {
            other: each
            for other, each in candidates.items()
            if each["precision"] == entry["precision"] and not CANDIDATES[other].is_ours
        }
        if peers:
            ratios = [_ratio(entry, peers, key, more=more) for key, _, _, more in SPEEDS + COSTS]
            lines.append(f"| {entry['label']} | {' | '.join(ratios)} |")
    if not lines:
        return []
    names = " | ".join(name for _, name, _, _ in SPEEDS + COSTS)
    intro = "tfmx to the best peer of the same precision, figure by figure (above 1: tfmx is ahead):"
    return [intro, "", f"| | {names} |", "|---" * (len(SPEEDS + COSTS) + 1) + "|", *lines, ""]


def _ratio(entry: dict[str, Any], peers: dict[str, Any], key: str, *, more: bool) -> str:
    choose = max if more else min
    name = choose(peers, key=lambda peer: peers[peer]["median"][key])
    ratio = entry["median"][key] / peers[name]["median"][key]
    return f"{ratio if more else 1 / ratio:.2f} ({name})"


def _versions(results: dict[str, Any]) -> list[str]:
    wanted = {
        "tfmx": ["onnxruntime"], "llama": ["llama_cpp_python"], "genai": ["onnxruntime-genai", "onnxruntime"],
        "openvino": ["openvino-genai"], "ctranslate2": ["ctranslate2"],
        "optimum-onnx": ["optimum-onnx", "onnxruntime"], "pytorch": ["torch", "transformers"],
    }  # fmt: skip
    parts = []
    for environment, packages in wanted.items():
        installed = results["versions"].get(environment)
        if installed:
            parts.append(f"{environment}: " + ", ".join(f"{name} {installed.get(name)}" for name in packages))
    return [f"Versions: {'; '.join(parts)}."] if parts else []
