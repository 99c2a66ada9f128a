"""Options that were really given on the command line, to refuse those that a bundle has no use for."""

from __future__ import annotations

from collections.abc import Collection

import click
from click.core import ParameterSource


def refuse_options(names: Collection[str], reason: str) -> None:
    """A usage error for the first of these parameters that was given: an option is never ignored."""
    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name in names and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            unset = ctx.params.get(name) is False and parameter.secondary_opts  # the second of --this/--that
            raise click.UsageError(f"{max(unset or parameter.opts, key=len)} {reason}")
