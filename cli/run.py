"""`tfmx run`: generate from a bundle, or print what it gives for an input, by the kind that its manifest says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .answer import Answer, make_printer
from .boundary import EXIT_CODES, debug_option
from .choice import Choice
from .given import refuse_options
from .model import DeviceName, open_model
from .model_input import read_input
from .output_file import check_place
from .sampling import SAMPLING_FIELDS, sampling_options

if TYPE_CHECKING:
    from ..runtime.manifest import Manifest
    from ..runtime.sampling import SamplingOptions

# What a bundle that does not generate gives, in words.
_GIVES = {
    "tokens": "a token for each position at once",
    "classes": "classes",
    "values": "values",
    "embedding": "an embedding",
    "hidden": "hidden states",
}


@click.command(short_help="Generate text, chat, or apply a bundle to an input.", epilog=EXIT_CODES)
@click.argument("bundle")
@click.argument("given", metavar="[INPUT]", required=False)
@click.option("--file", metavar="FILE", help="Take the input from a file.")
@click.option("--ids", metavar="ID,ID,...", help="Take token ids as the input, as they are.")
@click.option(
    "--chat", is_flag=True, help="Use the model's chat template; without a prompt, talk turn by turn."
)
@click.option(
    "--system", metavar="TEXT", help="With --chat: what the model is told first.  [default: nothing]"
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object with everything instead of text."
)
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    help="What does not generate: save the main output as .npy, or all outputs as .npz.  [default: print it]",
)
@sampling_options
@click.option(
    "--speculate",
    is_flag=True,
    help="Guess tokens that the text has had before and check several in one run: sooner where an answer repeats its prompt. Exact in float; with 8-bit activations the answer may differ.",
)
@click.option(
    "--draft",
    metavar="BUNDLE",
    help="Guess with this smaller model, which has the same tokens; implies --speculate.  [default: none]",
)
@click.option(
    "--device",
    type=Choice(["cpu", "cuda", "auto"]),
    default="cpu",
    show_default=True,
    help="Where to run; auto takes CUDA where it works and says on stderr what it took.",
)
@click.option("--threads", type=int, metavar="N", help="CPU threads.  [default: one a physical core]")
@click.option("--no-check", is_flag=True, help="Skip the sha256 sums of the bundle's files (0.7 s a GiB).")
@click.option(
    "-q", "--quiet", is_flag=True, help="No statistics or notes on stderr, but for what --device auto took."
)
@debug_option
def command(
    bundle: str,
    given: str | None,
    file: str | None,
    ids: str | None,
    chat: bool,
    system: str | None,
    as_json: bool,
    out: str | None,
    sampling: SamplingOptions,
    speculate: bool,
    draft: str | None,
    device: DeviceName,
    threads: int | None,
    no_check: bool,
    quiet: bool,
) -> None:
    """Give INPUT to the model in BUNDLE.

    A language model continues a text, and the new text streams to stdout; an encoder-decoder takes it as
    its source. Without INPUT (or with - for it) a text is read from standard input. One newline at the end
    of standard input or of a file is not part of it. Names of special tokens stay text.

    What does not generate prints its output: classes with their probabilities, best first, or numbers, a
    line a position. Bundles over vectors take a .npy or .csv file (a row a position), those over images an
    image file.

    In a chat at the terminal, Ctrl-C stops an answer, Ctrl-D ends the chat, and /help lists the commands;
    from a pipe each line is a turn.
    """
    from ..runtime.bundle import Bundle

    manifest = Bundle.look(bundle).manifest  # what makes sense is known before weights are read
    is_conversation = chat and given is None and file is None
    place = _check_usage(manifest, bundle, chat, system, ids, as_json, out, sampling)
    found = None
    if not is_conversation:
        found = read_input(manifest.inputs, given, file, ids, quiet=quiet)
        if found is None:
            talk = ", or --chat to talk" if manifest.generates else ""
            raise click.UsageError(f"there is no prompt; give INPUT, --file, --ids or standard input{talk}")
    if chat:
        from ..runtime.chat import start_worker

        start_worker()
    model = open_model(bundle, device, threads, check=not no_check)
    if not manifest.generates:
        from .apply import apply

        assert found is not None  # only --chat goes without
        apply(model, found, as_json=as_json, out=place, quiet=quiet)
        return
    speculates = speculate or draft is not None
    if speculates:
        from ..runtime.speculation import Speculation

        guesses = None if draft is None else open_model(draft, device, threads, check=not no_check)
        model.speculate(Speculation(draft=guesses))
    printer = make_printer(
        model, as_json=as_json, quiet=quiet, sampled=sampling.temperature > 0, speculates=speculates
    )
    if not chat:
        assert found is not None
        printer.show(model.generate(found, sampling), Answer())
        return
    from .chat import Conversation

    conversation = Conversation(model, sampling, printer, system)
    if found is None:
        conversation.talk()
    else:
        assert isinstance(found, str)  # _check_usage refuses --ids
        conversation.answer(found)


def _check_usage(
    manifest: Manifest,
    bundle: str,
    chat: bool,
    system: str | None,
    ids: str | None,
    as_json: bool,
    out: str | None,
    sampling: SamplingOptions,
) -> Path | None:
    """Refuse options that the bundle or each other have no use for; the place of --out."""
    if not manifest.generates:
        gives = _GIVES[manifest.outputs.kind]
        refuse_options(
            {"chat", "system", "speculate", "draft", *SAMPLING_FIELDS},
            f"is for bundles that generate tokens one by one; {bundle} gives {gives}",
        )
        if out is None:
            return None
        if as_json:
            raise click.UsageError("--json prints and --out saves; give one of them")
        from .apply import SUFFIXES

        return check_place(out, SUFFIXES)
    if out is not None:
        raise click.UsageError(
            f"--out is for bundles that do not generate; {bundle} does, so redirect stdout"
        )
    if system is not None and not chat:
        raise click.UsageError("--system goes with --chat")
    if chat and manifest.inputs.kind != "tokens":
        raise click.UsageError(f"--chat takes text; {bundle} takes {manifest.inputs.kind}")
    if ids is not None and chat:
        raise click.UsageError("--chat takes text, not --ids")
    if sampling.logprobs is not None and not as_json:
        raise click.UsageError("--logprobs goes with --json")
    return None
