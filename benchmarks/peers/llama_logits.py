"""llama.cpp's logits for given tokens in given windows, so that its quality is measured as ours is.

    ~/.cache/tfmx/peers/env/llama/bin/python benchmarks/peers/llama_logits.py TOKENS.npy MODEL.gguf [MODEL.gguf ...] \\
        [--window 512] [--limit WINDOWS] [--out LOGITS.npy | --reference F32.gguf] [--float32-cache] [--threads 2]

TOKENS.npy holds ids, (N,). They are cut into windows of equal length, each run from an empty cache; a last one that is
shorter is left out. `--out` writes one model's float32 logits, (windows, window, V): 100 MB for 512 tokens of SmolLM2.
`--reference` runs that model over the same windows and prints, a line of JSON a model, the KL divergence from it (mean,
its standard error by windows, 99 % and maximum), how often both have the same largest logit, and the perplexity of both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parent / "workers"))
from llama_binding import Context

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


def window_logits(model: str, windows: Tokens, threads: int, *, float32_cache: bool) -> Iterator[Logits]:
    """(T, V) of each window; valid until the next."""
    count = windows.shape[1]
    context = Context(model, threads, count, "F32" if float32_cache else None)
    for window in windows:
        context.forget()
        context.decode(window.tolist(), every=True)
        found = context.binding.llama_get_logits(context.context)
        yield np.ctypeslib.as_array(found, (count, context.vocab_size))


def log_softmax(logits: Logits) -> Logits:
    """Float32, its sum in float64: off by a few 1e-7, where the divergences of interest begin at 1e-4."""
    shifted: Logits = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    shifted -= np.log(total).astype(np.float32)
    return shifted


class Comparison:
    """One model's distributions against the reference's, window by window."""

    def __init__(self) -> None:
        self._divergences: list[npt.NDArray[np.float64]] = []
        self._agreements: list[npt.NDArray[np.bool_]] = []
        self._losses: list[tuple[float, float]] = []

    def add(self, window: Tokens, wanted: Logits, found: Logits) -> None:
        """`wanted`, `found`: log-probabilities, (T, V), of the reference and of the model."""
        kl = (np.exp(wanted) * (wanted - found)).sum(
            axis=-1, dtype=np.float64
        )  # KL(reference || model), (T,)
        self._divergences.append(kl)
        self._agreements.append(wanted.argmax(axis=-1) == found.argmax(axis=-1))
        at = np.arange(len(window) - 1), window[1:]
        self._losses.append((float(-wanted[at].mean()), float(-found[at].mean())))

    def figures(self) -> dict[str, float]:
        kl = np.stack(self._divergences)  # (windows, T)
        reference_loss, loss = np.mean(self._losses, axis=0)
        error = kl.mean(axis=1).std(ddof=1) / np.sqrt(len(kl)) if len(kl) > 1 else float("nan")
        return {
            "tokens": kl.size,
            "kl_mean": float(kl.mean()),
            "kl_error": float(error),
            "kl_99": float(np.quantile(kl, 0.99)),
            "kl_max": float(kl.max()),
            "top1": float(np.mean(self._agreements)),
            "perplexity": float(np.exp(loss)),
            "reference_perplexity": float(np.exp(reference_loss)),
        }


def compare(models: list[str], reference: str, windows: Tokens, threads: int, *, float32_cache: bool) -> None:
    """The reference has its cache in float32 always."""
    comparisons = [Comparison() for _ in models]
    wanted = window_logits(reference, windows, threads, float32_cache=True)
    found = [window_logits(model, windows, threads, float32_cache=float32_cache) for model in models]
    for window in windows:
        target = log_softmax(next(wanted))
        for comparison, each in zip(comparisons, found, strict=True):
            comparison.add(window, target, log_softmax(next(each)))
    for model, comparison in zip(models, comparisons, strict=True):
        print(json.dumps({"model": Path(model).name, **comparison.figures()}))


def write(model: str, windows: Tokens, threads: int, out: Path, *, float32_cache: bool) -> None:
    file = None
    for i, logits in enumerate(window_logits(model, windows, threads, float32_cache=float32_cache)):
        if file is None:
            file = np.lib.format.open_memmap(out, "w+", np.float32, (len(windows), *logits.shape))
        file[i] = logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("tokens", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--limit", type=int, help="so many windows at most")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path)
    what.add_argument("--reference")
    parser.add_argument("--float32-cache", action="store_true", help="llama.cpp's own is float16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    tokens = np.load(options.tokens).astype(np.int64)
    whole = len(tokens) // options.window
    if whole == 0:
        parser.error(
            f"{options.tokens} has {len(tokens)} tokens, wanted at least one window of {options.window}"
        )
    windows = tokens[: whole * options.window].reshape(whole, options.window)[: options.limit]
    threads, cache = options.threads, options.float32_cache
    if options.reference:
        compare(options.models, options.reference, windows, threads, float32_cache=cache)
    elif len(options.models) > 1:
        parser.error(f"--out takes one model, found {len(options.models)}")
    else:
        write(options.models[0], windows, threads, options.out, float32_cache=cache)


if __name__ == "__main__":
    main()
