"""`tfmx run`: generate from a bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .answer import Answer, make_printer
from .boundary import debug_option
from .model import DeviceName, open_model
from .prompt import Prompt, read_prompt
from .sampling import sampling_options

if TYPE_CHECKING:
    from ..runtime.sampling import SamplingOptions


@click.command(short_help="Generate text, or chat, with a bundle.")
@click.argument("bundle")
@click.argument("prompt", required=False)
@click.option("--file", metavar="FILE", help="Take the prompt from a file.")
@click.option("--ids", metavar="ID,ID,...", help="Take token ids as the prompt, as they are.")
@click.option(
    "--chat", is_flag=True, help="Use the model's chat template; without a prompt, talk turn by turn."
)
@click.option(
    "--system", metavar="TEXT", help="With --chat: what the model is told first.  [default: nothing]"
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object for the answer instead of its text."
)
@sampling_options
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda", "auto"]),
    default="cpu",
    show_default=True,
    help="Where to run; auto takes CUDA where it works and says on stderr what it took.",
)
@click.option("--threads", type=int, metavar="N", help="CPU threads.  [default: one a physical core]")
@click.option("--no-check", is_flag=True, help="Skip the sha256 sums of the bundle's files (0.7 s a GiB).")
@click.option("-q", "--quiet", is_flag=True, help="No statistics on stderr.")
@debug_option
def command(
    bundle: str,
    prompt: str | None,
    file: str | None,
    ids: str | None,
    chat: bool,
    system: str | None,
    as_json: bool,
    sampling: SamplingOptions,
    device: DeviceName,
    threads: int | None,
    no_check: bool,
    quiet: bool,
) -> None:
    """Continue PROMPT with the model in BUNDLE; the new text streams to stdout.

    Without PROMPT (or with - for it) the prompt is read from standard input. One newline at the end of
    standard input or of a file is not part of the prompt. Names of special tokens in a prompt stay text.

    In a chat at the terminal, Ctrl-C stops an answer, Ctrl-D ends the chat, and /help lists the commands;
    from a pipe each line is a turn.
    """
    _check_usage(chat, system, ids, as_json, sampling)
    is_conversation = chat and prompt is None and file is None
    given = None if is_conversation else _require_prompt(read_prompt(prompt, file, ids))
    model = open_model(bundle, device, threads, check=not no_check)
    printer = make_printer(model, as_json=as_json, quiet=quiet, sampled=sampling.temperature > 0)
    if chat:
        from .chat import Conversation

        conversation = Conversation(model, sampling, printer, system)
        if given is None:
            conversation.talk()
        else:
            assert isinstance(given, str)  # _check_usage refuses --ids
            conversation.answer(given)
    else:
        assert given is not None
        printer.show(model.generate(given, sampling), Answer())


def _check_usage(
    chat: bool, system: str | None, ids: str | None, as_json: bool, sampling: SamplingOptions
) -> None:
    if system is not None and not chat:
        raise click.UsageError("--system goes with --chat")
    if ids is not None and chat:
        raise click.UsageError("--chat takes text, not --ids")
    if sampling.logprobs is not None and not as_json:
        raise click.UsageError("--logprobs goes with --json")


def _require_prompt(prompt: Prompt | None) -> Prompt:
    if prompt is None:
        raise click.UsageError(
            "there is no prompt; give PROMPT, --file, --ids or standard input, or --chat to talk"
        )
    return prompt
