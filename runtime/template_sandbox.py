"""Jinja's sandbox as transformers sets it up, so that checkpoints' templates render the same.

It stops code, not CPU or memory, so it runs in a process of its own: `template_worker.py`.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

OUTPUT = 4_000_000  # characters


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PublicNamespace(jinja2.utils.Namespace):
    """namespace() without attributes that begin with an underscore: they lead to Python's internals."""

    def __init__(self, *entries: Any, **more: Any) -> None:
        attributes = dict(*entries, **more)
        for name in attributes:
            check_public(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        check_public(name)
        super().__setitem__(name, value)


def check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def make_environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=PublicNamespace, dict=make_dict
    )
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:  # noqa: A002 (the name that templates may use)
    return datetime.now().strftime(format)  # noqa: DTZ005 (the user's own day)


def make_dict(*entries: Any, **more: Any) -> dict[Any, Any]:
    return dict(*entries, **more)


@functools.lru_cache(maxsize=4)
def compile_template(source: str) -> jinja2.Template:
    return make_environment().from_string(source)


def render(source: str, variables: dict[str, Any]) -> str:
    parts, size = [], 0
    for part in compile_template(source).generate(**variables):
        size += len(part)
        if size > OUTPUT:
            raise jinja2.TemplateError(f"it gives more than {OUTPUT} characters")
        parts.append(part)
    return "".join(parts)
