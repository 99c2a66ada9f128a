"""Lengths of axes as polynomials over the manifest's symbols: what the audit can prove about sizes without running.

A dimension is an int, a `Symbolic`, or None where it hangs on data. Two are the same if they are equal here; None is
equal to nothing. Symbols are lengths, so none is negative, and each has a least value that the runtime sees to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

Monomial = tuple["Atom", ...]
# what is more is no size that we write: it counts as unknown, or a few nodes could keep the audit busy for ever
_MOST_TERMS, _MOST_FACTORS, _LONGEST_NAME, _LARGEST = 32, 12, 400, 2**63
_ROUNDS = 4  # of putting in what is known about an atom


class Atom:
    """A symbol, or the result of a minimum or a division, with what is known about it."""

    __slots__ = ("above", "below", "least", "name")

    def __init__(
        self,
        name: str,
        least: int = 0,
        above: tuple[tuple[int, Known], ...] = (),
        below: tuple[tuple[int, Known], ...] = (),
    ) -> None:
        """`above`: (n, d) where n times the atom is at most d; `below`: where it is at least d."""
        self.name, self.least, self.above, self.below = name, least, above, below

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atom) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __lt__(self, other: Atom) -> bool:
        return self.name < other.name


class Symbolic:
    """A sum of products of atoms, in one canonical order."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = hash(terms)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Symbolic) and self._hash == other._hash and self.terms == other.terms
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        text = ""
        for atoms, factor in self.terms:
            names = "*".join(atom.name for atom in atoms)
            number = str(abs(factor)) if not names or abs(factor) != 1 else ""
            sign = "-" if factor < 0 else "+" if text else ""
            text += sign + "*".join(part for part in (number, names) if part)
        return text


Known = int | Symbolic
Dim = Known | None
Shape = tuple[Dim, ...]


def symbol(name: str, least: int, most: Dim = None) -> Symbolic:
    return _of(Atom(name, least, above=() if most is None else ((1, most),)))


def add(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return _plain(a + b)
    if a is None or b is None:
        return None
    terms = dict(_terms(a))
    for atoms, factor in _terms(b):
        terms[atoms] = terms.get(atoms, 0) + factor
    return _polynomial(terms)


def multiply(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return _plain(a * b)
    if 0 in (a, b):
        return 0
    if a is None or b is None:
        return None
    terms: dict[Monomial, int] = {}
    for left, m in _terms(a):
        for right, n in _terms(b):
            atoms = tuple(sorted(left + right))
            terms[atoms] = terms.get(atoms, 0) + m * n
    return _polynomial(terms)


def subtract(a: Dim, b: Dim) -> Dim:
    return add(a, multiply(b, -1))


def product(dims: Iterable[Dim]) -> Dim:
    found: Dim = 1
    for dim in dims:
        found = multiply(found, dim)
    return found


def exact_quotient(whole: Dim, part: Dim) -> Dim:
    """whole / part where the part is one product that divides each term; else unknown."""
    if whole is None or part is None or part == 0:
        return None
    if whole == part:
        return 1
    [(atoms, factor), *others] = _terms(part)
    if others:
        return None
    terms: dict[Monomial, int] = {}
    for found, m in _terms(whole):
        rest = list(found)
        for atom in atoms:
            if atom not in rest:
                return None
            rest.remove(atom)
        if m % factor:
            return None
        terms[tuple(rest)] = m // factor
    return _polynomial(terms)


def floor_quotient(a: Dim, n: int) -> Dim:
    """a // n, for n above 0 and a not below 0."""
    if isinstance(a, int):
        return a // n
    exact = exact_quotient(a, n)
    if exact is not None or a is None or not is_at_least(a, 0):
        return exact
    lower = add(a, 1 - n)
    if lower is None:
        return None
    return _named(Atom(f"({a})//{n}", 0, above=((n, a),), below=((n, lower),)))


def minimum(a: Dim, b: Dim) -> Dim:
    return _extreme("min", a, b, min)


def maximum(a: Dim, b: Dim) -> Dim:
    return _extreme("max", a, b, max)


def is_at_least(a: Dim, b: Dim) -> bool:
    """Whether a >= b is sure."""
    if isinstance(a, int) and isinstance(b, int):
        return a >= b
    difference = subtract(a, b)
    return difference is not None and _is_positive(difference, _ROUNDS)


def _extreme(name: str, a: Dim, b: Dim, choose: Callable[[int, int], int]) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return choose(a, b)
    if a is None or b is None:
        return None
    small, large = (a, b) if name == "min" else (b, a)
    for first, second in ((small, large), (large, small)):
        if is_at_least(second, first):
            return first if name == "min" else second
    if not (is_at_least(a, 0) and is_at_least(b, 0)):
        return None
    first, second = sorted((a, b), key=str)
    facts = ((1, first), (1, second))
    least = choose(_least(a), _least(b))
    text = f"{name}({first}, {second})"
    return _named(Atom(text, least, above=facts) if name == "min" else Atom(text, least, below=facts))


def _least(dim: Known) -> int:
    """A lower bound of what is not negative."""
    if isinstance(dim, int):
        return dim
    if any(factor < 0 for _, factor in dim.terms):
        return 0
    return _smallest(dim)


def _smallest(dim: Symbolic) -> int:
    total = 0
    for atoms, factor in dim.terms:
        total += factor * math.prod(atom.least for atom in atoms)
    return total


def _is_positive(dim: Known, rounds: int) -> bool:
    """Whether it is sure to be 0 or more."""
    if isinstance(dim, int):
        return dim >= 0
    if all(factor >= 0 for atoms, factor in dim.terms if atoms):
        return _smallest(dim) >= 0
    if not rounds:
        return False
    for atoms, factor in dim.terms:  # what is subtracted is at most this, what is added at least that
        if len(atoms) != 1:
            continue
        for n, bound in atoms[0].above if factor < 0 else atoms[0].below:
            if factor % n == 0:
                rest = add(subtract(dim, multiply(_of(atoms[0]), factor)), multiply(bound, factor // n))
                if rest is not None and _is_positive(rest, rounds - 1):
                    return True
    return False


def _plain(value: int) -> Dim:
    return value if abs(value) <= _LARGEST else None


def _named(atom: Atom) -> Dim:
    return _of(atom) if len(atom.name) <= _LONGEST_NAME else None


def _of(atom: Atom) -> Symbolic:
    return Symbolic((((atom,), 1),))


def _terms(dim: Known) -> tuple[tuple[Monomial, int], ...]:
    return (((), dim),) if isinstance(dim, int) else dim.terms


def _polynomial(terms: dict[Monomial, int]) -> Dim:
    kept = sorted(
        ((atoms, factor) for atoms, factor in terms.items() if factor),
        key=lambda term: [atom.name for atom in term[0]] or ["~"],  # the plain number last
    )
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return _plain(kept[0][1])
    if len(kept) > _MOST_TERMS or any(
        len(atoms) > _MOST_FACTORS or abs(factor) > _LARGEST for atoms, factor in kept
    ):
        return None
    return Symbolic(tuple(kept))
