"""`tfmx attend`: draw what each token looks at."""

from __future__ import annotations

import click

from .. import InputError
from .attention_map import AttentionMap
from .attention_source import OF, Maps, apply_for_maps, find_layers
from .boundary import EXIT_CODES, debug_option
from .choice import Choice
from .console import say
from .given import refuse_options
from .model import open_model
from .model_input import read_input
from .number_list import parse_numbers
from .output_file import check_place, write_whole

SUFFIXES = (".png", ".html")
_MANY = 16  # heads; of more, their mean and the first few are shown
_FEW = 3
_MEAN = -1  # a head's number that stands for the mean of all


class HeadError(InputError):
    """There is no such head."""


@click.command(short_help="Draw attention weights as a picture or a page.", epilog=EXIT_CODES)
@click.argument("bundle")
@click.argument("given", metavar="[INPUT]", required=False)
@click.option(
    "-o", "--out", metavar="FILE", required=True, help="The picture (.png) or page (.html) to write."
)
@click.option("--file", metavar="FILE", help="Take the input from a file.")
@click.option("--ids", metavar="ID,ID,...", help="Take token ids as the input, as they are.")
@click.option("--layers", metavar="N,N-N", help="The layers to draw.  [default: all that the bundle gives]")
@click.option(
    "--heads",
    metavar="N,N-N",
    help=f"The heads to draw, and mean for their mean.  [default: all; of more than {_MANY}: mean,0-{_FEW - 1}]",
)
@click.option(
    "--of",
    type=Choice(list(OF)),
    help="Encoder-decoders: what the answer looks at in the source (cross) or in itself (self), or the source "
    "in itself (encoder).  [default: cross]",
)
@click.option(
    "--max-tokens",
    type=int,
    metavar="N",
    help="Encoder-decoders: answer with at most N tokens.  [default: until it ends]",
)
@debug_option
def command(
    bundle: str,
    given: str | None,
    out: str,
    file: str | None,
    ids: str | None,
    layers: str | None,
    heads: str | None,
    of: str | None,
    max_tokens: int | None,
) -> None:
    """Draw the attention weights of BUNDLE for INPUT: a map for each layer and head, tokens along both sides.

    INPUT is what `tfmx run` takes. Of an ablated LSTM the maps are its weights w[t,s], a head for each of its
    dimensions. An encoder-decoder first answers greedily; the maps then show what it looked at for each token
    of the answer. The bundle must have been exported with --attentions.
    """
    from ..runtime.bundle import Bundle

    place = check_place(out, SUFFIXES)
    chosen_heads = None if heads is None else parse_numbers(heads, "--heads", {"mean": _MEAN})
    chosen_layers = None if layers is None else parse_numbers(layers, "--layers")
    opened = Bundle.look(bundle)  # what can be drawn is known before weights are read
    if opened.manifest.kind != "encoder-decoder":
        refuse_options(
            {"of", "max_tokens"}, f"is for encoder-decoders; {bundle} is of kind {opened.manifest.kind}"
        )
    taken = find_layers(opened, of, chosen_layers)
    found = read_input(opened.manifest.inputs, given, file, ids)
    if found is None:
        raise click.UsageError("there is no input; give INPUT, --file, --ids or standard input")
    model = open_model(bundle, "cpu", None, check=True)
    maps = apply_for_maps(model, found, taken, max_tokens)
    drawn = choose_heads(maps, chosen_heads, is_default=heads is None)
    if place.suffix.lower() == ".png":
        from .map_png import draw_png

        content, losses = draw_png(drawn)
    else:
        from .map_html import draw_html

        content, losses = draw_html(drawn), []
    write_whole(place, lambda file: file.write(content))
    for note in (*drawn.notes[1:], *losses):
        say(f"note: {note}")
    say(
        f"saved to {place}: {len(drawn.layers)} x {len(drawn.heads)} maps of {len(drawn.rows)} x {len(drawn.columns)}"
    )


def choose_heads(maps: Maps, wanted: list[int] | None, *, is_default: bool) -> AttentionMap:
    """The heads asked for; of many, the mean and the first few, and a note that says so."""
    import numpy as np

    count = min(len(layer) for layer in maps.weights)
    notes = [maps.shows]
    if is_default and count > _MANY:
        wanted = [_MEAN, *range(_FEW)]
        notes.append(f"the mean of {count} {maps.head}s, and the first {_FEW}; --heads chooses others")
    elif wanted is None:
        wanted = list(range(count))
    for head in wanted:
        if head >= count:
            raise HeadError(f"--heads names {head}; there are {count}: 0 to {count - 1}")
    weights = [[layer.mean(0) if head == _MEAN else layer[head] for head in wanted] for layer in maps.weights]
    return AttentionMap(
        title=maps.title,
        notes=tuple(notes),
        layers=tuple(f"layer {number}" for number in maps.layers),
        heads=tuple("mean" if head == _MEAN else f"{maps.head} {head}" for head in wanted),
        rows=tuple(maps.rows),
        columns=tuple(maps.columns),
        weights=np.array(weights, np.float32),
    )
