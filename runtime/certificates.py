"""Whether the certificates in a manifest, `parity` and `quality`, have the form that the gate and `tfmx verify` write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .manifest_parts import MANIFEST, BundleError

_QUALITY_TEXTS = {"reference", "runtime", "text_sha256", "errors"}
_QUALITY_COUNTS = {"tokens", "windows", "window"}
_PARITY_TEXTS = {"rule", "reference", "runtime"}
_PARITY_KEYS = _PARITY_TEXTS | {"passed", "worst_ratio", "cases"}
_CASE_FIGURES = {"error", "budget", "ratio", "argmax_agreement"}
_MOST = 1e300  # a figure: what is more, Python may not be able to print


def check_parity(parity: Mapping[str, Any] | None, place: str = "parity") -> None:
    """`rounding`: the same once more, of graphs that round on the way."""
    if parity is None:
        return
    if parity.keys() - {"rounding"} != _PARITY_KEYS:
        raise BundleError(
            f"{MANIFEST}: {place} has the keys {repr(sorted(parity))[:100]}, expected {sorted(_PARITY_KEYS)}"
        )
    for name, value in parity.items():
        if name == "rounding":
            if not isinstance(value, dict) or place != "parity":
                raise _cannot_be(f"{place}.rounding", value)
            check_parity(value, "parity.rounding")
        elif not _fits_parity(name, value):
            raise _cannot_be(f"{place}.{name}", value)


def check_quality(quality: Mapping[str, Any] | None) -> None:
    for name, value in (quality or {}).items():
        if not _fits_quality(name, value):
            raise _cannot_be(f"quality[{name[:60]!r}]", value)


def _fits_parity(name: str, value: object) -> bool:
    if name in _PARITY_TEXTS:
        return isinstance(value, str)
    if name == "passed":
        return isinstance(value, bool)
    if name == "worst_ratio":
        return _is_figure(value)
    return isinstance(value, list | tuple) and all(map(_is_case, value))


def _is_case(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"name", *_CASE_FIGURES}:
        return False
    return isinstance(value["name"], str) and all(_is_figure(value[name]) for name in _CASE_FIGURES)


def _fits_quality(name: str, value: object) -> bool:
    """Texts, counts and the largest difference have their names; all else is a figure with its error."""
    if name in _QUALITY_TEXTS:
        return isinstance(value, str)
    if name in _QUALITY_COUNTS:
        return type(value) is int and value >= 0
    if name == "kl_max":
        return _is_figure(value)
    if not isinstance(value, dict):
        return False
    if name == "source":  # sha256 by file
        return all(isinstance(digest, str) for digest in value.values())
    return value.keys() == {"value", "error"} and all(map(_is_figure, value.values()))


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


def _cannot_be(place: str, value: object) -> BundleError:
    return BundleError(f"{MANIFEST}: {place} is {repr(value)[:60]}, which cannot be")
