"""Mutant number N of a seed: which base, which kind of change, and what tfmx is asked to do with it."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fuzz import file_mutants, folder_tricks, graph_mutants, manifest_mutants
from fuzz.attached import attach_operator
from fuzz.draft import Draft, signed_manifest, write_files
from fuzz.mutant import Mutant
from PIL import Image

# kind: how many of 100 mutants are of it
KINDS = {
    "graph edited": 33,
    "operator attached": 40,
    "manifest fields": 9,
    "manifest and graphs": 8,
    "file contents": 7,
    "folder": 3,
}
_CHATS = 0.5  # share of changed tokenizers and templates that are asked by --chat


def kind_of(seed: int, index: int) -> str:
    """Known before the mutant is made: a generator that fails still has its place in the table."""
    return _draw(seed, index)[0]


def _draw(seed: int, index: int) -> tuple[str, Random]:
    rng = Random(f"{seed}:{index}")
    return rng.choices(list(KINDS), list(KINDS.values()))[0], rng


def make_mutant(seed: int, index: int, bases: dict[str, Draft], folder: Path) -> Mutant:
    """Write it to `folder`, which does not exist yet."""
    kind, rng = _draw(seed, index)
    base = bases[rng.choice(_bases_for(kind, bases))]
    draft = base.copy()
    folder.mkdir()
    _write(kind, rng, draft, folder)
    commands = [("inspect", str(folder)), ("verify", str(folder))]
    if not _only_for_verify(base.manifest, draft):
        given = given_input(rng, base.manifest, draft, folder)
        commands.insert(1, ("run", str(folder), *given, "--threads", "1", "--quiet"))
    return Mutant(kind, draft.base, "; ".join(draft.what), tuple(commands))


def _only_for_verify(base: dict[str, Any], draft: Draft) -> bool:
    """Whether `tfmx run` would not look at what was changed: the decode graph of all but recurrent models, golden vectors."""
    recurrent = any(state["growth"] == "constant" for state in base["state"])
    parts = ("golden",) if recurrent else ("golden", "decode:")
    return all(what.startswith(parts) for what in draft.what)


def _bases_for(kind: str, bases: dict[str, Draft]) -> list[str]:
    """Contents are those of bundles that have a tokenizer, half the time."""
    if kind != "file contents":
        return list(bases)
    return [*bases, *[name for name, draft in bases.items() if "chat_template.jinja" in draft.files] * 8]


def _write(kind: str, rng: Random, draft: Draft, folder: Path) -> None:
    if kind == "graph edited":
        graph_mutants.edit_graph(rng, draft)
    elif kind == "operator attached":
        attach_operator(rng, draft)
        if rng.random() < 0.15:
            graph_mutants.edit_graph(rng, draft)
    elif kind == "manifest and graphs":
        manifest_mutants.change_together(rng, draft)
    elif kind == "file contents":
        file_mutants.change_content(rng, draft)
    contents = draft.contents()
    draft.sign()
    if kind == "manifest fields":
        manifest_mutants.change_fields(rng, draft)
    write_files(folder, contents, draft.manifest)
    if kind == "folder":
        if rng.random() < 0.2:
            folder_tricks.huge_sizes(rng, draft, folder)
            (folder / "manifest.json").write_bytes(signed_manifest(draft.manifest))
        else:
            draft.what.append(folder_tricks.trick(rng, folder))


def given_input(rng: Random, base: dict[str, Any], draft: Draft, place: Path) -> tuple[str, ...]:
    """What the base takes, written beside the folder if it is a file; a chat where the mutant is about that."""
    inputs = base["inputs"]
    if inputs["kind"] == "vectors":
        np.save(place.with_suffix(".npy"), np.full((5, inputs["features"]), 0.5, np.float32))
        return (str(place.with_suffix(".npy")), "--json")
    if inputs["kind"] == "images":
        mode = "L" if inputs["image"][0] == 1 else "RGB"
        Image.new(mode, (inputs["image"][2], inputs["image"][1])).save(place.with_suffix(".png"))
        given: tuple[str, ...] = (str(place.with_suffix(".png")), "--json")
    elif (
        any(what.startswith(("tokenizer", "chat template")) for what in draft.what) and rng.random() < _CHATS
    ):
        given = ("--chat", "Hello <|im_start|> you", "--json")
    elif "tokenizer.json" in draft.files and rng.random() < 0.3:
        given = ("Hello you", "--json")
    else:
        given = ("--ids", ",".join(str(rng.randrange(40)) for _ in range(rng.choice((1, 5, 12)))), "--json")
    if base["outputs"]["kind"] != "tokens" or base["kind"] == "encoder":
        return given
    return (*given, "--max-tokens", "4", "--logprobs", "8")
