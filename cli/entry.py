"""The command group: it knows the commands by name, and loads the module of one when it is asked for."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

import click

from .. import __version__
from .boundary import EXIT_CODES, INTERRUPTED, debug_option, run_guarded, terminate

COMMANDS = (
    "export",
    "run",
    "attend",
    "verify",
    "inspect",
    "bench",
    "doctor",
)  # each a module beside this one


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".{cmd_name}", __package__).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from ..tfm_model.checks import did_you_mean

            near = did_you_mean(name, COMMANDS)
            raise click.UsageError(f"No such command {name!r}{near}; there are {', '.join(COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, message="tfmx %(version)s", help="Show the version and exit.")
@debug_option
@click.pass_context
def group(ctx: click.Context) -> None:
    """Turn PyTorch transformers into ONNX graphs, proven to compute the same, and run them without PyTorch."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def _spare_threads() -> None:
    """Under `ulimit -v` numpy's OpenBLAS, which we hardly use, may get no memory for its threads, and complains for each."""
    from ..runtime.address_space import free_address_space

    if free_address_space() is not None:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main() -> NoReturn:
    signal.signal(signal.SIGTERM, terminate)
    _spare_threads()
    code = run_guarded(group, sys.argv[1:])
    if code == INTERRUPTED:
        os._exit(
            code
        )  # Python would first give the weights back piece by piece: 0.15 s against 0.25, SmolLM2
    sys.exit(code)
