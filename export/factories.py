"""What a user's Python file offers as a factory, read from its text: nothing in it is run, PyTorch is not loaded."""

from __future__ import annotations

import ast
from pathlib import Path

from .. import InputError
from ..tfm_model.checks import did_you_mean

_MOST = 10  # names that are listed
# A file that uses one of these may have names that its text does not show.
_HIDDEN = {"globals", "locals", "vars", "exec", "eval", "setattr", "__dict__", "__getattr__", "*"}


class FactoryError(InputError):
    """A Python file that names no factory, or one that is not there."""


def check_factory(file: Path, name: str) -> None:
    """Refuse a factory that the file cannot have; an empty name is answered with those that it has."""
    tree = _parsed(file)
    if not name:
        found = factories_in(tree)
        raise FactoryError(
            f"{file} is a Python file; say which function in it makes the model, as in {file}:{found[0] if found else 'build'} "
            f"({_listed(found)})"
        )
    names = {found for node in ast.walk(tree) for found in _names(node)}
    if name not in names and not names & _HIDDEN:
        raise missing_factory(file, name, tree)


def missing_factory(file: Path, name: str, tree: ast.Module | None = None) -> FactoryError:
    found = factories_in(tree or _parsed(file))
    return FactoryError(f"{file} has no function {name!r}{did_you_mean(name, found)}; {_listed(found)}")


def factories_in(tree: ast.Module) -> list[str]:
    """Functions, then classes, at the top that can be called without arguments."""
    top = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    public = [node for node in top if not node.name.startswith("_") and _takes_nothing(node)]
    return [node.name for node in sorted(public, key=lambda node: isinstance(node, ast.ClassDef))]


def _parsed(file: Path) -> ast.Module:
    if not file.is_file():
        raise FactoryError(f"{file} is not a file; wanted path/to/file.py:factory")
    try:
        return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise FactoryError(f"{file}{where}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # a NUL; deep nesting
        raise FactoryError(f"{file} cannot be read as Python: {error}") from error
    except OSError as error:
        raise FactoryError(f"{file} cannot be read: {error.strerror}") from error


def _takes_nothing(node: ast.FunctionDef | ast.ClassDef) -> bool:
    if isinstance(node, ast.FunctionDef):
        return _required(node) == 0
    init = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    return not init or _required(init[-1]) <= 1  # self; what a class inherits is not known here


def _required(function: ast.FunctionDef) -> int:
    given = function.args
    positional = len(given.posonlyargs) + len(given.args) - len(given.defaults)
    return positional + sum(default is None for default in given.kw_defaults)


def _names(node: ast.AST) -> tuple[str, ...]:
    """What a node calls by name, defined or used."""
    if isinstance(node, ast.alias):
        return (node.asname or node.name).split(".")[0], node.name
    found = (getattr(node, field, None) for field in ("name", "id", "attr", "arg"))
    return tuple(name for name in found if isinstance(name, str))


def _listed(found: list[str]) -> str:
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    names = ", ".join(found[:_MOST])
    return f"it has {names}{more}" if found else "it has none that can be called without arguments"
