"""A user's own code raised: what is said about it, in one line that names their file and line.

torch wraps what it meets while tracing into a page of advice of its own; what counts is the error behind it, the line of
the user's that led there, and what torch suggests to write instead.
"""

from __future__ import annotations

import contextlib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import InputError, TfmxError

MOST = 400  # characters of an error's own text
_OURS = Path(__file__).parents[1]
_NOT_THE_USERS = (
    *(_OURS / folder for folder in ("cli", "export", "runtime", "tfm_model")),
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    Path(torch.__file__).parent,
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ASIDE = re.compile(r" *\((unhinted|Size-like symbols): [^()]*(\([^()]*\)[^()]*)*\)\.?")
# where torch's errors stop to say what happened, and begin to say how one might look into it
_NOISE = re.compile(
    r"(?m)^\s*(consider using data-dependent|Caused by: |For more information|For extended logs|The following call raised|"
    r"The error above occurred|While executing %|Original traceback|Use tlparse|To fix the error|Suggested fixes)"
)
_FIX = re.compile(r"(?m)^\s+\d+\. (torch\._check\(.*\))$")
_OTHER_DTYPE = re.compile(r"dtype|scalar type|got \w+ and \w+", re.IGNORECASE)


class UserCodeError(InputError):
    """The user's own code raised."""


@contextlib.contextmanager
def users_code(
    step: str, module: nn.Module | None = None, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """What is raised inside ends in a line. `module`, `dtype`: what runs, in case that is the reason."""
    try:
        yield
    except TfmxError:
        raise
    except (Exception, SystemExit) as error:
        is_signal = isinstance(error, SystemExit) and type(error) is not SystemExit
        if is_signal or isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise  # no fault of this code; the command line has words for it
        hint = "" if module is None or dtype is None else _dtype_hint(error, module, dtype)
        raise UserCodeError(f"{step}: {told(error)}{hint}") from error


def told(error: BaseException) -> str:
    """Type, message, and the user's line; of what is behind torch's own errors."""
    while type(error).__module__.startswith("torch.onnx") and error.__cause__ is not None:
        error = error.__cause__
    text = _ANSI.sub("", str(error))
    said = " ".join(_ASIDE.sub("", _NOISE.split(text, maxsplit=1)[0]).split())
    said = f"{said[:MOST]}..." if len(said) > MOST else said.rstrip(".")
    place = user_line(traceback.extract_tb(error.__traceback__)) or traced_line(text)
    fixes = list(dict.fromkeys(_FIX.findall(text)))
    return (
        f"{type(error).__name__}{': ' if said else ''}{said}"
        + (f", at {place}" if place and place not in said else "")
        + (f"; torch suggests {' or '.join(fixes)}" if fixes else "")
    )


def user_line(frames: Iterable[traceback.FrameSummary]) -> str | None:
    """The last place in a stack that is neither ours nor a package's."""
    found = [frame for frame in frames if _is_users(frame.filename)]
    if not found:
        return None
    code = " ".join((found[-1].line or "").split())
    return f"{Path(found[-1].filename).name}:{found[-1].lineno}" + (f" `{code[:120]}`" if code else "")


def traced_line(stack: str) -> str | None:
    """The same of a stack that torch wrote down while it traced."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)', stack)
    return user_line(
        traceback.FrameSummary(file, int(line), name, line=code) for file, line, name, code in frames
    )


def _is_users(file: str) -> bool:
    path = Path(file)
    return not file.startswith("<") and not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS)


def _dtype_hint(error: BaseException, module: nn.Module, dtype: torch.dtype) -> str:
    """Tensors that are neither parameters nor buffers keep their dtype, whatever the module is converted to."""
    kept = plain_tensors(module) if _OTHER_DTYPE.search(str(error)) else {}
    names = [f"{name} ({_short(found)})" for name, found in kept.items() if found != dtype]
    if not names:
        return ""
    return (
        f"; the module runs in {_short(dtype)}, which plain tensors do not follow: make {', '.join(names[:3])} "
        "a buffer with register_buffer"
    )


def plain_tensors(module: nn.Module) -> dict[str, torch.dtype]:
    """Floating tensors that are kept as plain attributes, by name."""
    found = {}
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if not attribute.startswith("_"):
                held = value.values() if isinstance(value, dict) else value
                values = held if isinstance(value, dict | list | tuple) else [value]
                dtypes = [x.dtype for x in values if isinstance(x, Tensor) and x.is_floating_point()]
                if dtypes:
                    found[f"{name}.{attribute}".lstrip(".").removeprefix("own.")] = dtypes[0]
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
