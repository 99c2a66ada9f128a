"""How far a bundle's predictions are from the source's, measured on real text: `--quality`.

For every token of the windows but each one's first, the bundle's distribution q (as the runtime gives it, on the CPU)
is compared with the source's p (PyTorch, float32): KL(p‖q) = Σ p log(p / q) in nats, whether both have the same best
token, and -log of what each gave the token that came. All positions count, also the first after an empty cache, since
that is where answers begin.

Neighbouring tokens are not independent, windows nearly are: every ± is a standard error, the standard deviation of a
figure over 1,000 bootstrap samples of whole windows. The 99th percentile and the perplexities get theirs the same way.

Decoding step by step runs other kernels than a prefill, so one window is also decoded, token by token.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import Tensor

from .. import TfmxError
from ..runtime.bundle import MANIFEST, Bundle
from ..runtime.devices import choose_device, import_onnxruntime
from ..runtime.engine import Graphs, open_engine
from .progress import Progress, Silent
from .quality_windows import QualityError, Windows
from .reference import Reference
from .source import open_source
from .source_logits import source_logits

ERRORS = "standard errors: bootstrap over whole windows"
RESAMPLES = 1000
_ROWS = 64  # positions compared at a time: 25 MB of float64 for each side at a vocabulary of 49,152
_BLOCKS = 16  # of the decoded window, for its error

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class MeasureError(TfmxError):
    """A measurement that came to nothing, or that cannot be kept."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What was found for each predicted token; the last axis is the position."""

    kl: Floats
    agrees: Floats  # 1 where both have the same best token
    source_loss: Floats  # -log p(the token that came)
    bundle_loss: Floats

    def __getitem__(self, rows: Any) -> Scores:
        return Scores(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    error: float  # standard error

    def short(self) -> dict[str, float]:
        """Five digits of the value: more than the error bars ever let one see."""
        return {"value": float(f"{self.value:.5g}"), "error": float(f"{self.error:.2g}")}


_FIGURES: dict[str, Callable[[Scores], float]] = {
    "kl_mean": lambda found: float(found.kl.mean()),
    "kl_99": lambda found: float(np.quantile(found.kl, 0.99)),
    "top_1": lambda found: float(found.agrees.mean()),
    "perplexity_source": lambda found: float(np.exp(found.source_loss.mean())),
    "perplexity_bundle": lambda found: float(np.exp(found.bundle_loss.mean())),
    # paired: what the text itself does to both cancels out
    "perplexity_ratio": lambda found: float(np.exp((found.bundle_loss - found.source_loss).mean())),
}


@dataclass(frozen=True, slots=True)
class Quality:
    scores: Scores  # (N, W-1)
    decoded: (
        Scores | None
    )  # (W-1,): window `decoded_window`, token by token; None where no time was spent on that
    decoded_window: int
    windows: Windows
    source: dict[str, str] = field(default_factory=dict)  # sha256 of what it was compared with, by file

    def estimates(self) -> dict[str, Estimate]:
        """Each figure with its error; `kl_decode` and `kl_prefill` are of the decoded window alone."""
        if self.decoded is None:
            return bootstrap(self.scores)
        same = self.scores[self.decoded_window]
        return {
            **bootstrap(self.scores),
            "kl_decode": batch_means(self.decoded.kl),
            "kl_prefill": batch_means(same.kl),
            "kl_decode_minus_prefill": batch_means(self.decoded.kl - same.kl),
        }

    def certificate(self) -> dict[str, Any]:
        """What the manifest's `quality` says."""
        return {
            "reference": f"torch {torch.__version__.split('+')[0]} float32",
            "runtime": f"onnxruntime {import_onnxruntime().__version__}",
            "source": self.source,
            "text_sha256": self.windows.text_sha256,
            "tokens": self.windows.scored,
            "windows": len(self.windows.token_ids),
            "window": self.windows.token_ids.shape[1],
            "errors": ERRORS,
            "kl_max": float(f"{self.scores.kl.max():.5g}"),
            **{name: estimate.short() for name, estimate in self.estimates().items()},
        }


def quality_against(
    bundle: Bundle, source: str, windows: Windows, progress: Progress | None = None
) -> Quality:
    """Measure a bundle against its source in float32, on `text_windows(bundle, read_text(None))` or another text."""
    manifest = bundle.manifest
    model = open_source(source, ir.DataType.FLOAT, manifest.max_context)
    found, wanted = (model.signature.kind, model.signature.vocab_size), (manifest.kind, manifest.vocab_size)
    if found != wanted:
        raise QualityError(
            f"{bundle.path} is a {wanted[0]} of {wanted[1]} tokens, {source} a {found[0]} of {found[1]}; "
            "give the source that it was exported from"
        )
    quality = measure_quality(bundle, model.reference(), windows, progress)
    return replace(quality, source={name: info.sha256 for name, info in model.digests().items()})


def measure_quality(
    bundle: Bundle,
    reference: Reference,
    windows: Windows,
    progress: Progress | None = None,
    *,
    decodes: bool = True,
) -> Quality:
    """Compare a bundle with PyTorch in float32. `reference` is the source's, not that of dequantised weights.

    `decodes`: one window is decoded token by token, too.
    """
    progress = progress or Silent()
    graphs = Graphs(bundle, choose_device("cpu", bundle))
    ids = windows.token_ids
    decoded_window, decoded = len(ids) // 2, None
    found: list[Scores] = []
    expected = source_logits(reference, ids, progress)
    for index, row in enumerate(ids):
        truth = next(expected)[:-1]  # (W-1, V); the last position's has no token to compare with
        if not found:
            progress.stage("quality: the bundle", len(ids) + decodes)
        engine = open_engine(graphs, 1, len(row))
        found.append(_compare(truth, engine.score(row)["logits"][:-1], row[1:]))
        progress.advance()
        if decodes and index == decoded_window:
            decoded = _compare(truth, _step_by_step(graphs, row[:-1]), row[1:])
            progress.advance()
    return Quality(_joined(found, np.stack), decoded, decoded_window, windows)


def record_quality(bundle: Bundle, quality: Quality) -> None:
    """Put the certificate into the bundle's manifest: the old one or the whole new one is there at any time."""
    path = bundle.path.resolve() / MANIFEST
    content = replace(bundle.manifest, quality=quality.certificate()).to_bytes()
    # beside the bundle: whoever opens it meanwhile would refuse a file that is not in its list
    hidden = path.parent.with_name(f".{path.parent.name}.{secrets.token_hex(4)}")
    try:
        if path.read_bytes() != bundle.manifest.to_bytes():
            raise MeasureError(f"{bundle.path} was replaced while it was measured; nothing was recorded")
        _write_flushed(hidden, content)
        hidden.replace(path)
        _flush_folder(path.parent)
    except OSError as error:
        raise MeasureError(f"the figures cannot be recorded in {path}: {error.strerror or error}") from error
    finally:
        hidden.unlink(missing_ok=True)


# --- comparing -------------------------------------------------------------------------------------------


def _compare(truth: Tensor, logits: npt.NDArray[np.float32], came: Ids) -> Scores:
    """(T, V) of the source and of the bundle; `came`: the tokens that followed, (T,)."""
    ours = torch.from_numpy(logits)
    parts = [
        _compare_rows(truth[at : at + _ROWS], ours[at : at + _ROWS], torch.from_numpy(came[at : at + _ROWS]))
        for at in range(0, len(came), _ROWS)
    ]
    found = _joined(parts, np.concatenate)
    for side, loss in (("source", found.source_loss), ("bundle", found.bundle_loss + found.kl)):
        if not np.isfinite(loss).all():
            place = int(np.argmin(np.isfinite(loss)))
            raise MeasureError(f"the {side}'s logits give no finite figure at position {place} of a window")
    return found


def _compare_rows(truth: Tensor, ours: Tensor, came: Tensor) -> Scores:
    """In float64: float32 would lose differences of 1e-7 among logarithms near 20."""
    log_p, log_q = truth.double().log_softmax(-1), ours.double().log_softmax(-1)
    p = log_p.exp()
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    losses = [-log.gather(1, came[:, None])[:, 0] for log in (log_p, log_q)]
    agrees = (truth.argmax(-1) == ours.argmax(-1)).double()
    return Scores(kl.numpy(), agrees.numpy(), losses[0].numpy(), losses[1].numpy())


def _step_by_step(graphs: Graphs, row: Ids) -> npt.NDArray[np.float32]:
    """The logits of every position, (T, V), by decode steps."""
    engine = open_engine(graphs, 1, len(row))
    first = engine.prefill([row[:1]]).numpy()
    logits = np.empty((len(row), first.shape[1]), np.float32)
    logits[0] = first[0]
    for place in range(1, len(row)):
        logits[place] = engine.decode(row[place : place + 1]).numpy()[0]
    return logits


def _joined(parts: Sequence[Scores], join: Callable[[list[Floats]], Floats]) -> Scores:
    return Scores(*(join([getattr(part, name) for part in parts]) for name in Scores.__slots__))


# --- error bars ------------------------------------------------------------------------------------------


def bootstrap(scores: Scores, seed: int = 0) -> dict[str, Estimate]:
    """Every figure of (N, T) scores, with its standard deviation over samples of N windows, drawn with replacement."""
    draw = np.random.default_rng(seed)
    count = len(scores.kl)
    samples: dict[str, list[float]] = {name: [] for name in _FIGURES}
    for _ in range(RESAMPLES):
        sample = scores[draw.integers(count, size=count)]
        for name, figure in _FIGURES.items():
            samples[name].append(figure(sample))
    return {
        name: Estimate(figure(scores), float(np.std(samples[name], ddof=1)))
        for name, figure in _FIGURES.items()
    }


def batch_means(values: Floats) -> Estimate:
    """The mean of one sequence, (T,); its error from how the means of blocks of neighbours differ."""
    blocks = [block.mean() for block in np.array_split(values, min(_BLOCKS, len(values)))]
    error = float(np.std(blocks, ddof=1) / np.sqrt(len(blocks))) if len(blocks) > 1 else 0.0
    return Estimate(float(values.mean()), error)


# --- files -----------------------------------------------------------------------------------------------


def _write_flushed(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
