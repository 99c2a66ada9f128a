"""The one error boundary: whatever goes wrong becomes one line on stderr and an exit code.

    0    done
    1    it failed: a TfmxError, the system (disk, memory, permission), a package that is missing, a bug
    2    what was given cannot be used: an InputError, wrong usage
    130  Ctrl-C
    141  nobody reads the output any more (`tfmx run ... | head`), as for any Unix tool
    143  SIGTERM

A traceback is shown with --debug alone.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from .. import InputError, TfmxError
from .console import say

if TYPE_CHECKING:
    from ..runtime.extras import Extra

INTERRUPTED = 130  # 128 + SIGINT, what shells give
BROKEN_PIPE = 141  # 128 + SIGPIPE
TERMINATED = 143  # 128 + SIGTERM

# package: the extra that brings it
_EXTRAS: dict[str, Extra] = {
    **dict.fromkeys(("torch", "onnx", "onnx_ir", "onnxscript", "safetensors", "gguf"), "export"),
    "onnxruntime": "cpu",
    "PIL": "images",
}
# In the help of every command, and in README.
EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage or unusable input, 130 interrupted, 141 nobody reads the output any "
    "more, 143 terminated (SIGTERM)."
)
_NO_MEMORY = "there is not enough memory for this; see what `tfmx inspect` says that a run needs"

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(slots=True)
class Settings:
    """What holds for every command; click hands it down as the context's object."""

    debug: bool = False


def debug_option(command: Decorated) -> Decorated:
    """`--debug`, for the group and for each command, so that it may stand anywhere."""

    def switch_on(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value:
            ctx.find_object(Settings).debug = True  # type: ignore[union-attr]
            warnings.simplefilter("default")

    option = click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=switch_on,
        help="Show the traceback of an error.",
    )
    return option(command)


class Terminated(SystemExit):
    """SIGTERM, from `timeout` or a service manager: half-written folders are removed, then it ends."""


def terminate(*_: object) -> NoReturn:
    """The handler of the signal."""
    raise Terminated


def run_guarded(command: click.Command, arguments: Sequence[str]) -> int:
    """Run a command line and give its exit code. Nothing but that code comes out of it."""
    settings = Settings()
    try:
        _never_fail_to_encode()
        code = _run(command, arguments, settings)
        _flush_stdout()
    except BrokenPipeError:
        code = BROKEN_PIPE
    except Terminated:
        code = TERMINATED
    except BaseException as error:  # noqa: BLE001 (the boundary; also SystemExit, from a user's own module)
        code = _report(error, settings)
    _abandon_stdout()
    return code


def _report(error: BaseException, settings: Settings) -> int:
    if _is_interrupt(error):
        if sys.stderr is not None and sys.stderr.isatty():
            say("")  # the shell's prompt begins on a line of its own
        return INTERRUPTED
    if settings.debug:
        traceback.print_exception(error)
    line, code = explain(error)
    say(f"tfmx: error: {line}")
    return code


def _is_interrupt(error: BaseException | None) -> bool:
    """Also behind another error: Ctrl-C while onnxruntime is imported comes as its ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _run(command: click.Command, arguments: Sequence[str], settings: Settings) -> int:
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")  # those of libraries, which a user can do nothing about
        try:
            with command.make_context("tfmx", list(arguments), obj=settings) as ctx:
                command.invoke(ctx)
        except click.exceptions.Exit as request:
            return request.exit_code
    return 0


def explain(error: BaseException) -> tuple[str, int]:
    """The line that a user sees, and the exit code."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "tfmx"
        return f"{_one_line(error.format_message()).rstrip('.')} (see `{path} --help`)", 2
    if isinstance(error, click.ClickException):
        return _one_line(error.format_message()), error.exit_code
    if isinstance(error, TfmxError):
        return _one_line(str(error)), 2 if isinstance(error, InputError) else 1
    return _explain_foreign(error), 1


def _explain_foreign(error: BaseException) -> str:
    from ..runtime.address_space import lacks_memory

    text = _one_line(str(error))
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        from ..runtime.extras import install_advice

        advice = install_advice(_EXTRAS[error.name])
        return f"{error.name} is not installed, and this command needs it; {advice}"
    if lacks_memory(error):  # torch raises a RuntimeError, an import an ImportError
        return _NO_MEMORY
    if isinstance(error, OSError):
        reason = error.strerror or text
        return f"{os.fsdecode(error.filename)}: {reason}" if error.filename is not None else reason
    name = type(error).__name__
    return f"internal error: {name}{': ' if text else ''}{text[:300]}; run it again with --debug, and please report it"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _never_fail_to_encode() -> None:
    """A character that the terminal's encoding lacks becomes `?`; the default is an exception."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def _flush_stdout() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _abandon_stdout() -> None:
    """What could not be written is dropped here, or Python would try once more at its exit and complain."""
    try:
        _flush_stdout()
    except (OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
