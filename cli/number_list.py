"""Numbers of layers and heads as they are typed: `0,2-4` or `all`."""

from __future__ import annotations

import re

import click

_SPAN = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")  # four digits: a slip must not ask for billions


def parse_numbers(text: str, option: str, words: dict[str, int] | None = None) -> list[int] | None:
    """The numbers in the order given, each once; `all` is None, and `words` stand for numbers of their own."""
    words = words or {}
    if text.strip() == "all":
        return None
    found: dict[int, None] = {}  # in order, without repetitions
    for part in map(str.strip, text.split(",")):
        span = _SPAN.fullmatch(part)
        if part in words:
            found[words[part]] = None
        elif span and int(span[1]) <= int(span[2] or span[1]):
            found |= dict.fromkeys(range(int(span[1]), int(span[2] or span[1]) + 1))
        else:
            wanted = ", ".join(["all", *words])
            raise click.UsageError(f"{option} is {text[:60]!r}; wanted {wanted} or numbers such as 0,2-4")
    return list(found)
