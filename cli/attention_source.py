"""Attention weights of a run, with the tokens that they are about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import InputError
from .apply import apply_finite
from .attention_map import readable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..runtime.bundle import Bundle
    from ..runtime.manifest import InputInfo, Manifest
    from ..runtime.model import Model

# --of: the outputs, the graph that gives them, and what they show
OF = {
    "cross": (
        "cross_attentions",
        "prefill",
        "what each token of the answer (rows) looks at in the source (columns)",
    ),
    "self": ("attentions", "prefill", "what the decoder looks at (columns) from each of its tokens (rows)"),
    "encoder": (
        "encoder_attentions",
        "encode",
        "what each part of the source (rows) looks at in it (columns)",
    ),
}
_POSITIONS = {"tokens": "token", "vectors": "position", "images": "patch"}


class NoMapsError(InputError):
    """The bundle does not give the attention weights that are asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Which outputs to draw."""

    name: str  # "attentions", "cross_attentions" or "encoder_attentions"
    numbers: list[int]
    shows: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Maps:
    """The weights of every head, before some are chosen."""

    title: str
    shows: str
    head: str  # what the bundle's heads are called
    layers: list[int]
    rows: list[str]
    columns: list[str]
    weights: list[npt.NDArray[np.float32]]  # of each layer, (H, rows, columns)


def find_layers(bundle: Bundle, of: str | None, wanted: list[int] | None) -> Layers:
    """The layers whose weights the bundle gives; an error that says what to do where it gives none."""
    manifest = bundle.manifest
    if manifest.kind == "encoder-decoder":
        name, role, shows = OF[of or "cross"]
    else:
        name, role = "attentions", "encode" if manifest.kind == "encoder" else "prefill"
        shows = f"what each {_POSITIONS[manifest.inputs.kind]} (rows) looks at (columns)"
    prefix = f"{name}."
    there = sorted(
        int(extra.removeprefix(prefix)) for extra in manifest.extras(role) if extra.startswith(prefix)
    )
    if not there:
        own = " (modules of your own cannot be)" if manifest.source.kind == "python" else ""
        raise NoMapsError(
            f"{bundle.path} gives no {_words(name)}; export it with them{own}: "
            "`tfmx export SOURCE -o OUT --attentions all`"
        )
    for number in wanted or ():
        if number not in there:
            raise NoMapsError(
                f"--layers names {number}; {bundle.path} gives the {_words(name)} of layers "
                f"{', '.join(map(str, there))}"
            )
    return Layers(name=name, numbers=there if wanted is None else wanted, shows=shows)


def apply_for_maps(model: Model, given: Any, layers: Layers, max_tokens: int | None) -> Maps:
    """Run the input through, and an encoder-decoder's own answer after it."""
    if model.manifest.kind == "encoder-decoder":
        answer = [step.token_id for step in model.generate(given, max_new_tokens=max_tokens)]
        found = apply_finite(model, given, answer[:-1])  # the last token is chosen, and looks at nothing yet
    else:
        answer = []
        found = apply_finite(model, given)
    weights = [found[f"{layers.name}.{number}"].astype("float32") for number in layers.numbers]
    rows, columns = _labels(model, given, answer, layers, weights[0].shape[2])
    is_lstm = _is_ablated_lstm(model.manifest)
    return Maps(
        title=f"{model.bundle.path.resolve().name}: {'weights w[t,s]' if is_lstm else _words(layers.name)}",
        shows=layers.shows,
        head="dim" if is_lstm else "head",
        layers=layers.numbers,
        rows=rows,
        columns=columns,
        weights=weights,
    )


def _labels(
    model: Model, given: Any, answer: list[int], layers: Layers, length: int
) -> tuple[list[str], list[str]]:
    """Names of rows and columns; `length`: how many columns there are."""
    if layers.name == "attentions" and model.manifest.kind == "encoder-decoder":
        start = model.manifest.generation.decoder_start_token_id
        own = _token_labels(model, [start, *answer[:-1]] if start is not None else answer)
        return own, own
    columns = _input_labels(model, given, length)
    return _token_labels(model, answer) if layers.name == "cross_attentions" else columns, columns


def _input_labels(model: Model, given: Any, length: int) -> list[str]:
    """One a position; a class token that the model itself puts first is one too."""
    if model.manifest.inputs.kind == "images":
        return patch_labels(model.manifest.inputs, length)
    if model.manifest.inputs.kind == "tokens":
        found = _token_labels(model, model.encode(given) if isinstance(given, str) else given)
    else:
        found = [str(position) for position in range(len(given))]
    return ["class"] * (length - len(found)) + found


def _token_labels(model: Model, token_ids: list[int]) -> list[str]:
    return [_token_label(model, token_id) for token_id in token_ids]


def _token_label(model: Model, token_id: int) -> str:
    if model.tokenizer is None:
        return str(token_id)
    text = model.tokenizer.decode([token_id], skip_special=False)
    if not text or "\ufffd" in text:  # a part of a character
        text = model.tokenizer.token(token_id) or str(token_id)
    return readable(text)


def patch_labels(inputs: InputInfo, length: int) -> list[str]:
    """Patches by row and column, if the positions are those of a grid over the image, perhaps after a class token."""
    assert inputs.image is not None
    _, height, width = inputs.image
    for first in ([], ["class"]):
        count = length - len(first)
        for rows in range(1, count + 1):
            columns = count // rows
            if rows * columns == count and height * columns == width * rows and height % rows == 0:
                return first + [f"{row},{column}" for row in range(rows) for column in range(columns)]
    return [str(position) for position in range(length)]


def _is_ablated_lstm(manifest: Manifest) -> bool:
    """Its maps are for dimensions, not heads. The manifest's config is for people, and so are the words chosen."""
    mixer = manifest.model.get("mixer")
    return isinstance(mixer, dict) and bool(mixer.get("ablated"))


def _words(name: str) -> str:
    """`cross_attentions` as people call them."""
    return f"{name.removesuffix('s').replace('_', '-')} weights"
