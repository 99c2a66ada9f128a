"""What a bundle that does not generate gives for one input: printed, as JSON, or saved as arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import TfmxError
from .console import plural, say, write_line
from .output_file import write_whole

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..runtime.inputs import Input
    from ..runtime.model import Model

    Array = npt.NDArray[np.floating[Any]]

SUFFIXES = (".npy", ".npz")
_BEST = 5  # classes of a pooled output that are shown


class NotFiniteError(TfmxError):
    """The model gives NaN or infinity."""


def apply_finite(model: Model, given: Input, target: list[int] | None = None) -> dict[str, Array]:
    """All outputs for one input, none of which has a number that is none."""
    import numpy as np

    found = model.apply(given, target=target)
    for name, array in found.items():
        if not np.isfinite(array).all():
            raise NotFiniteError(f"the model gives {name} that are not finite (NaN or infinity)")
    return found


def apply(model: Model, given: Input, *, as_json: bool, out: Path | None, quiet: bool) -> None:
    found = apply_finite(model, given)
    if out is not None:
        _save(out, found, model.manifest.outputs.name, quiet=quiet)
    elif as_json:
        write_line(json.dumps(_json(model, found), allow_nan=False))
    else:
        for line in output_lines(model, found[model.manifest.outputs.name]):
            write_line(line)


def output_lines(model: Model, main: Array) -> Iterator[str]:
    """The main output for people: one line a position, or the best classes of the whole."""
    outputs = model.manifest.outputs
    if outputs.kind not in {"classes", "tokens"}:
        for row in main.reshape(-1, outputs.size):
            yield ",".join(f"{value:.6g}" for value in row)
        return
    name = _namer(model)
    for logits in main.reshape(-1, outputs.size):
        chances = _softmax(logits)
        best = (-chances).argsort(kind="stable")[: _BEST if outputs.pooled else 1]
        names = [name(int(index)) for index in best]
        width = max(map(len, names)) if outputs.pooled else 0
        yield from (f"{text:<{width}}  {chances[i]:.4f}" for text, i in zip(names, best, strict=True))


def _namer(model: Model) -> Callable[[int], str]:
    """What a class is called: its label, its token's text, or its number."""
    outputs, tokenizer = model.manifest.outputs, model.tokenizer
    if outputs.labels is not None:
        return outputs.labels.__getitem__
    if outputs.kind == "tokens" and tokenizer is not None:
        return lambda index: tokenizer.token(index) or str(index)
    return str


def _softmax(logits: Array) -> Array:
    import numpy as np

    grown = np.exp(logits.astype(np.float64) - logits.max())
    chances: Array = grown / grown.sum()
    return chances


def _json(model: Model, found: dict[str, Array]) -> dict[str, object]:
    outputs = model.manifest.outputs
    return {
        "kind": outputs.kind,
        "output": outputs.name,
        "labels": outputs.labels,
        "device": model.device.kind,
        "outputs": {name: array.tolist() for name, array in found.items()},
    }


def _save(path: Path, found: dict[str, Array], main: str, *, quiet: bool) -> None:
    import numpy as np

    if path.suffix.lower() == ".npy":
        write_whole(path, lambda file: np.save(file, found[main].astype(np.float32)))
        what = f"{main} {_shape(found[main])}"
    else:
        write_whole(path, lambda file: np.savez(file, **found))  # type: ignore[arg-type]
        what = f"{plural(len(found), 'array')}: " + ", ".join(
            f"{name} {_shape(array)}" for name, array in found.items()
        )
    if not quiet:
        say(f"saved to {path}: {what}")


def _shape(array: Array) -> str:
    return f"({', '.join(map(str, array.shape))})"
