"""What torch says when it cannot trace an own module, as one line; and what it traces that no bundle may hold."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from .. import TfmxError
from ..runtime.audit.contracts import OPS
from .trace import Fragment
from .user_code import told, traced_line, user_line

_SHAPES = "torch.fx.experimental.symbolic_shapes"
_GUARD = re.compile(r"eval Eq\(\w+, (\d+)\) \[guard added\]")
_FIXED = re.compile(r"static shape of (\d+) for dimension inputs\['args'\]\[(\d+)\]\.shape\[(\d+)\]")
_NO_FORM = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>")
_STACK = "pkg.torch.onnx.stack_trace"

Shapes = Sequence[tuple[int | str, ...]]  # of a trace's inputs; a text is a free dimension


class TraceError(TfmxError):
    """torch.export or its ONNX translation could not follow the module."""


class FixedSizes(logging.Handler):
    """Notes the user's line at which the trace takes a size for a constant: torch's error names the size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        found, place = _GUARD.search(record.getMessage()), user_line(traceback.extract_stack())
        if found and place:
            self.lines.setdefault(int(found[1]), place)


@contextlib.contextmanager
def noted_sizes() -> Iterator[FixedSizes]:
    """Listens to torch while it traces, and keeps what it prints beside its errors off the user's terminal."""
    logger, notes = logging.getLogger(_SHAPES), FixedSizes()
    level, handlers, propagates = logger.level, logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [notes], False
    logger.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stderr(_WithoutTorch(sys.stderr)):
            yield notes
    finally:
        logger.handlers, logger.propagate = handlers, propagates
        logger.setLevel(level)


class _WithoutTorch:
    """stderr, but for the half-made graph that torch.export prints there."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if sys._getframe(1).f_globals.get("__name__") == "torch.export._trace":  # noqa: SLF001 (who prints)
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def trace_failure(
    error: Exception, shapes: Shapes, notes: FixedSizes, lines: Mapping[str, str | None]
) -> TraceError:
    """`lines`: at which of the user's lines PyTorch's ops run."""
    said = told(error)
    behind = "\n".join(_chain(error))
    fixed = {str(shapes[int(index)][int(axis)]): int(size) for size, index, axis in _FIXED.findall(behind)}
    if fixed:
        sizes = " and ".join(f"{name} at {size}" for name, size in fixed.items())
        places = dict.fromkeys(notes.lines[size] for size in fixed.values() if size in notes.lines)
        return TraceError(
            f"torch could not trace the module: the trace fixes {sizes}, which must stay free"
            + (f"; see {' and '.join(places)}" if places else "")
            + ". Python loops over elements, and values taken out of tensors, cannot be traced: write them with tensors"
        )
    if found := _NO_FORM.search(behind):
        operator = f"{found[1]}.{found[2]}"
        place = lines.get(operator)
        return TraceError(
            f"torch could not trace the module: {found[1]} has no ONNX form{f', at {place}' if place else ''}; "
            "write it with other operations"
        )
    if "data-dependent" in said:
        said += (
            "; a graph cannot branch on what tensors hold, nor take sizes from it: use torch.where, or a mask"
        )
    return TraceError(f"torch could not trace the module: {said}")


def _chain(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__


def check_operators(fragments: Iterable[Fragment]) -> None:
    """Before anything is written; the runtime would refuse them without the line that they come from."""
    for fragment in fragments:
        for node in fragment.nodes:
            if node.domain in OPS and node.op_type not in OPS[node.domain]:
                place = traced_line(node.metadata_props.get(_STACK, ""))
                raise TraceError(
                    f"{f'{place} is' if place else 'something in the module is'} traced to the operator {node.op_type}, "
                    "which bundles do not contain; write it with other operations (sizes may depend on no tensor's values)"
                )
