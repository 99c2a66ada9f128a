"""The text that quality is measured on, as windows of tokens.

`quality_text.txt` is prose and dialogue in the public domain: chapters I to VI of Lewis Carroll's "Alice's Adventures
in Wonderland" and acts I and II of Shakespeare's "As You Like It", from alice29.txt and asyoulik.txt of the
Canterbury corpus (in the source of brotli 1.2.1 on PyPI, under tests/testdata). Edition marks and rows of stars are
gone, paragraphs of prose are one line each, speakers are set off by a full stop; nothing else was changed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import InputError
from ..runtime.bundle import Bundle
from ..runtime.engine import Wiring
from ..runtime.inputs import check_ids
from ..runtime.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("quality_text.txt")
WINDOW = 512  # tokens, the first from an empty cache; as llama.cpp's perplexity tool has by default
TOKENS = 40 * (WINDOW - 1)  # that are scored, if the text has as many
LEAST_TOKENS = 2048  # of a text
LEAST_WINDOWS = 16  # error bars come from how windows differ: a short text is cut into shorter ones
COST_WINDOWS, COST_WINDOW = (
    4,
    129,
)  # what export looks at: 512 tokens, about as long as a question and its answer
_LARGEST = 32 << 20  # bytes of a text: half a minute of tokenizing


class QualityError(InputError):
    """What was given cannot be measured."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Pieces of a text, spread evenly over it, each begun as the tokenizer begins a text."""

    token_ids: npt.NDArray[np.int64]  # (N, W)
    text_sha256: str
    text_tokens: int  # of the whole text

    @property
    def scored(self) -> int:
        """Tokens that are predicted: all but each window's first."""
        N, W = self.token_ids.shape
        return int(N * (W - 1))


def read_text(path: str | None) -> str:
    """A file's text; None is the one that ships with tfmx."""
    try:
        content = TEXT.read_bytes() if path is None else _read_limited(Path(path))
        return content.decode("utf-8-sig")
    except OSError as error:
        raise QualityError(f"{path or TEXT} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise QualityError(f"{path} is not UTF-8 text (byte {error.start}); give plain text") from error


def text_windows(bundle: Bundle, text: str) -> Windows:
    """Cut a text into windows for a bundle; refused if it is too short for error bars, or no use to the bundle."""
    tokenizer = _tokenizer(bundle)
    before, ids = _split(tokenizer, text)
    found, vocab_size = len(ids), bundle.manifest.vocab_size
    if found < LEAST_TOKENS:
        raise QualityError(
            f"the text has {found:,} tokens, wanted at least {LEAST_TOKENS:,} for error bars; give a longer one, or none for the one that ships with tfmx"
        )
    assert vocab_size is not None
    check_ids([*before, *ids], "the text", vocab_size, len(before) + found)
    room = min(WINDOW, bundle.manifest.max_context) - len(before)  # text tokens in a window
    room = min(room, found // LEAST_WINDOWS)
    if room < 2:
        raise QualityError(
            f"the bundle's context is {bundle.manifest.max_context}, too short to measure; wanted at least {2 + len(before)}"
        )
    wanted = -(-TOKENS // (len(before) + room - 1))
    return _cut(before, ids, min(wanted, found // room), room, text)


def cost_windows(bundle: Bundle) -> Windows:
    """A few short ones of the text that ships with tfmx; QualityError where a bundle has no use for them."""
    text, manifest = read_text(None), bundle.manifest
    before, ids = _split(_tokenizer(bundle), text)
    room = min(COST_WINDOW, manifest.max_context, len(ids) // COST_WINDOWS) - len(before)
    unknown = [token_id for token_id in (*before, *ids) if token_id >= (manifest.vocab_size or 0)]
    if room < 2 or unknown:
        why = (
            f"token {unknown[0]} of tfmx's text is none of its own" if unknown else "its context is too short"
        )
        raise QualityError(why)
    return _cut(before, ids, COST_WINDOWS, room, text)


def _cut(before: list[int], ids: list[int], count: int, room: int, text: str) -> Windows:
    starts = np.linspace(0, len(ids) - room, count).astype(np.int64)
    pieces = np.asarray(ids, np.int64)[starts[:, None] + np.arange(room)]  # (N, room)
    prefix = np.tile(np.asarray(before, np.int64), (len(starts), 1))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Windows(np.concatenate((prefix, pieces), axis=1), digest, len(ids))


def _read_limited(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise QualityError(f"{path} has more than {_LARGEST >> 20} MiB; 200 KB are enough")
    return content


def _tokenizer(bundle: Bundle) -> Tokenizer:
    manifest = bundle.manifest
    predicts = manifest.kind == "decoder" and manifest.generates and manifest.inputs.kind == "tokens"
    if not predicts or Wiring.of(manifest).last_only:
        raise QualityError(
            "quality is measured on decoders that predict the next token at every position; this bundle is "
            f"of kind {manifest.kind}, takes {manifest.inputs.kind} and gives {manifest.outputs.kind}"
        )
    content = bundle.read("tokenizer.json")
    if content is None:
        raise QualityError(
            "this bundle has no tokenizer to read a text with; export from a source that has one"
        )
    return Tokenizer(content)


def _split(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before a text (e.g. its begin token), and the text's own ids."""
    ids, around = tokenizer.encode(text, add_special=False), tokenizer.encode(text)
    for place in range(len(around) - len(ids) + 1):
        if around[place : place + len(ids)] == ids:
            return around[:place], ids
    return [], ids  # it changes the text itself when it adds tokens: then none are added
