"""An option's choices; a value that is none of them is answered with the nearest one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    _Choice = click.Choice  # generic since click 8.2 only

_ALIKE = 0.8  # a slip of the hand; below it, `gpu` would be answered with cpu and int5 with int4


class Choice(_Choice):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            from ..tfm_model.checks import did_you_mean

            near = did_you_mean(str(value), self.choices, least=_ALIKE)
            raise click.BadParameter(f"{error.message.rstrip('.')}{near}", ctx, param) from error
