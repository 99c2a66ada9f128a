"""What an operator's contract is made of: its inputs and outputs, their dtypes, its attributes, and the rule for its shapes.

A signature is a line such as `x:F scale:F bias?:F -> y:F`: `?` an input that may be absent, `!` one that is always a
constant of the graph, `*` one or more. What stands after the colon is a dtype or a set of them (`TYPES`); the same
set within a line is the same dtype, and a number behind it makes it another (`I2`). `@to` and `@value` are what the attribute says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .dims import Dim, Shape
from .reading import DTYPES, read_tensor

Elements = tuple[Dim, ...]  # of integers in a list, or of one alone
REQUIRED = object()
_FLOATS, _INTEGERS = frozenset({"float32", "float16"}), frozenset({"int64", "int32"})
TYPES = {
    "F": _FLOATS,
    "I": _INTEGERS,
    "N": _FLOATS | _INTEGERS,
    "A": frozenset(DTYPES.values()),
    "cache": _FLOATS | {"int8"},
    **{name: frozenset({name}) for name in DTYPES.values()},
}


class ContractError(Exception):
    """What was found in a node, and what was wanted."""


class Value(NamedTuple):
    """What is known of a tensor before anything runs."""

    dtype: str
    shape: Shape
    elements: Elements | None = None
    is_constant: bool = False


class Made(NamedTuple):
    """An output by the rule: its dtype is the signature's."""

    shape: Shape
    elements: Elements | None = None


class Call(NamedTuple):
    """A node's inputs (None: absent) and attributes, checked, with the defaults of those that it does not have."""

    opset: int
    inputs: Sequence[Value | None]
    attributes: dict[str, Any]
    n_outputs: int

    def given(self, index: int) -> Value:
        value = self.inputs[index]
        assert value is not None
        return value

    def get(self, index: int) -> Value | None:
        return self.inputs[index] if index < len(self.inputs) else None


Rule = Callable[[Call], Sequence[Made]]


class Attribute(NamedTuple):
    kind: type
    wanted: str
    fits: Callable[[Any], bool]
    default: object  # None: it may be absent and means nothing then; REQUIRED: it must be there


def whole(low: int, high: int, default: object = REQUIRED) -> Attribute:
    return Attribute(int, f"{low} to {high}", lambda value: low <= value <= high, default)


def number(low: float, high: float, default: object = REQUIRED) -> Attribute:
    """NaN fits nothing."""
    return Attribute(float, f"{low:g} to {high:g}", lambda value: low <= value <= high, default)


def one_of(*values: object, default: object = REQUIRED) -> Attribute:
    shown = [value.decode() if isinstance(value, bytes) else str(value) for value in values]
    return Attribute(type(values[0]), " or ".join(shown), lambda value: value in values, default)


def wholes(low: int, high: int, default: object = REQUIRED) -> Attribute:
    return Attribute(
        tuple,
        f"numbers from {low} to {high}",
        lambda value: all(type(part) is int and low <= part <= high for part in value),
        default,
    )


class Slot(NamedTuple):
    name: str
    types: str
    is_optional: bool
    is_constant: bool
    is_many: bool


class Contract(NamedTuple):
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    attributes: dict[str, Attribute]
    rule: Rule
    opsets: range
    why: str  # nothing of ours emits it: who does; "" else

    @property
    def least_inputs(self) -> int:
        """As many as reach the last that must be there."""
        return max((index for index, slot in enumerate(self.inputs, 1) if not slot.is_optional), default=0)

    @property
    def most_inputs(self) -> int:
        return 64 if self.inputs and self.inputs[-1].is_many else len(self.inputs)


def contract(
    signature: str,
    rule: Rule,
    attributes: dict[str, Attribute] | None = None,
    *,
    opsets: range = range(17, 25),
    why: str = "",
) -> Contract:
    inputs, _, outputs = signature.partition(" -> ")
    return Contract(_slots(inputs), _slots(outputs), attributes or {}, rule, opsets, why)


def _slots(line: str) -> tuple[Slot, ...]:
    slots = []
    for word in line.split():
        name, _, types = word.partition(":")
        slots.append(Slot(name.rstrip("?!*"), types, "?" in name, "!" in name, "*" in name))
    return tuple(slots)


def check_inputs(wanted: Contract, inputs: Sequence[Value | None]) -> dict[str, str]:
    """The dtype that each set of the signature stands for here."""
    if not wanted.least_inputs <= len(inputs) <= wanted.most_inputs:
        most = wanted.most_inputs
        raise ContractError(f"{len(inputs)} inputs, wanted {wanted.least_inputs} to {most}")
    if inputs and inputs[-1] is None:  # some kernels count the names, and look at what is not there
        raise ContractError("its last input has no name, wanted it left out")
    bound: dict[str, str] = {}
    for index, value in enumerate(inputs):
        slot = wanted.inputs[min(index, len(wanted.inputs) - 1)]
        if value is None:
            if not slot.is_optional:
                raise ContractError(f"input {slot.name} is absent, wanted a tensor")
            continue
        types = TYPES[slot.types.rstrip("23") if slot.types[0].isupper() else slot.types]
        if value.dtype not in types:
            raise ContractError(f"input {slot.name} is {value.dtype}, wanted {' or '.join(sorted(types))}")
        if bound.setdefault(slot.types, value.dtype) != value.dtype:
            raise ContractError(
                f"input {slot.name} is {value.dtype}, wanted {bound[slot.types]} as the others"
            )
        if slot.is_constant and not value.is_constant:
            raise ContractError(f"input {slot.name} is computed, wanted a constant of the graph")
    return bound


def check_attributes(wanted: Contract, found: dict[str, Any]) -> dict[str, Any]:
    """All that the contract knows, with defaults."""
    for name, value in found.items():
        kind = wanted.attributes.get(name)
        shown = value.decode(errors="replace") if isinstance(value, bytes) else value
        if kind is None:
            raise ContractError(f"the attribute {name} = {str(shown)[:80]}, wanted none of that name")
        if type(value) is not kind.kind or not kind.fits(value):
            raise ContractError(f"the attribute {name} = {str(shown)[:80]}, wanted {kind.wanted}")
    for name, kind in wanted.attributes.items():
        if name not in found and kind.default is REQUIRED:
            raise ContractError(f"no attribute {name}, wanted {kind.wanted}")
    return {name: found.get(name, kind.default) for name, kind in wanted.attributes.items()}


def check_outputs(
    wanted: Contract, outputs: Sequence[str], bound: dict[str, str], attributes: dict[str, Any]
) -> list[str]:
    """The dtype of each output."""
    least = sum(not slot.is_optional for slot in wanted.outputs)
    is_many = wanted.outputs[-1].is_many
    if not least <= len(outputs) <= (64 if is_many else len(wanted.outputs)):
        raise ContractError(
            f"{len(outputs)} outputs, wanted {least} to {'64' if is_many else len(wanted.outputs)}"
        )
    dtypes = []
    for index, name in enumerate(outputs):
        slot = wanted.outputs[min(index, len(wanted.outputs) - 1)]
        if not name and not slot.is_optional:
            raise ContractError(f"no output {slot.name}, wanted one")
        if slot.types == "@to":
            dtypes.append(DTYPES[attributes["to"]])
        elif slot.types == "@value":
            value = attributes["value"]
            dtypes.append("float32" if value is None else read_tensor(value).dtype)
        else:
            dtypes.append(bound.get(slot.types, slot.types))
    return dtypes


# --- what rules share ------------------------------------------------------------------------------------


def show(shape: Shape) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    if not -rank <= axis < rank:
        raise ContractError(f"axis {axis} of {rank} dimensions, wanted {-rank} to {rank - 1}")
    return axis + rank if axis < 0 else axis


def want_rank(value: Value, name: str, *ranks: int) -> Shape:
    if len(value.shape) not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise ContractError(f"{name} has the shape {show(value.shape)}, wanted {wanted} dimensions")
    return value.shape


def want_shape(value: Value, name: str, wanted: Shape) -> None:
    """Every dimension is known and the same."""
    if value.shape != wanted or None in wanted:
        raise ContractError(f"{name} has the shape {show(value.shape)}, wanted {show(wanted)}")


def want_same(found: Dim, wanted: Dim, what: str) -> None:
    """Known dimensions are the same; what hangs on data, onnxruntime compares when it runs."""
    if found is not None and wanted is not None and found != wanted:
        raise ContractError(f"{what} is {found}, wanted {wanted}")


def want_elements(value: Value, name: str) -> Elements:
    """Integers that are known, in a list or alone."""
    if value.elements is None or None in value.elements:
        raise ContractError(f"{name} hangs on data, wanted numbers that are known")
    return value.elements


def want_integers(value: Value, name: str) -> list[int]:
    elements = want_elements(value, name)
    found = [element for element in elements if isinstance(element, int)]
    if len(found) != len(elements):
        raise ContractError(f"{name} is {show(elements)}, wanted plain numbers")
    return found


def broadcast(*shapes: Shape) -> Shape:
    rank = max(map(len, shapes), default=0)
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for index, dim in enumerate(shape, rank - len(shape)):
            result[index] = _joined(result[index], dim, shapes)
    return tuple(result)


def _joined(a: Dim, b: Dim, shapes: Sequence[Shape]) -> Dim:
    if b == 1 or (a == b and a is not None):
        return a
    if a == 1:
        return b
    if a is None or b is None:
        return a if isinstance(a, int) else b if isinstance(b, int) else None
    raise ContractError(f"inputs of the shapes {' and '.join(map(show, shapes))}, wanted ones that broadcast")
