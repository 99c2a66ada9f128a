"""Text to ids and back, with the checkpoint's own tokenizer.json.

Special tokens (<|im_end|> and the like) steer the model, so text from a user must never become one. Text
that contains such a token's name is encoded by a twin of the tokenizer in which every special token has a
secret name: the user's spelling is ordinary text to it, and all else (merges, prefixes, ids) is the same. In
a chat the template's own special tokens are renamed along, so they keep their meaning.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from .. import InputError
from .address_space import require_address_space
from .manifest import BundleError
from .token_bytes import TokenBytes

# Bytes of memory that `tokenizers` takes, measured at most: without them it aborts the process.
_READING = 16  # for each of tokenizer.json (12 with 49,000 tokens)
_ENCODING = 256  # for each character of a text (233 at 4 MB)
_SPARE = 16 << 20


class PromptError(InputError):
    """A prompt that cannot be used."""


class Tokenizer:
    def __init__(self, data: bytes) -> None:
        """`data`: the content of tokenizer.json."""
        try:
            self._text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"tokenizer.json cannot be read: {error}") from error
        self._raw = _parse(self._text)
        added = self._raw.get_added_tokens_decoder()
        self._specials = {token.content: token_id for token_id, token in added.items() if token.special}
        by_length = sorted(self._specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        self._bytes: TokenBytes | None = None
        self._twin: tuple[RawTokenizer, dict[str, str]] | None = (
            None  # and the secret names, by special token
        )

    @property
    def specials(self) -> frozenset[str]:
        return frozenset(self._specials)

    def token(self, token_id: int) -> str | None:
        return self._raw.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What one token stands for, exactly; None for an id that is no token."""
        if self._bytes is None:
            self._bytes = TokenBytes(self._data, self.token)
        return self._bytes(token_id)

    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters needs at least n / longest tokens."""
        return max(map(len, self._raw.get_vocab()), default=1)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text. `add_special`: with what the model wants around a text (e.g. its first token).

        `parse_special`: names of special tokens in the text become those tokens; only for text that you wrote.
        """
        if parse_special:
            return list(_encode(self._raw, text, add_special).ids)
        raw = self._make_twin()[0] if self._special_pattern.search(text) else self._raw
        encoding = _encode(raw, text, add_special)
        own = [i for i, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True) if not added]
        self._check_specials(own, [])
        return list(encoding.ids)

    def encode_marked(self, text: str, marks: dict[str, str]) -> list[int]:
        """Ids of a rendered chat in which `marks` (single characters) stand for parts of users' texts.

        Special tokens that are spelled out in `text` are the template's own; what a mark stands for is not.
        """
        twin, secret_names = self._make_twin()
        expected = [self._specials[name] for name in self._special_pattern.findall(text)]
        text = self._special_pattern.sub(lambda match: secret_names[match[0]], text)
        for mark, literal in marks.items():
            text = text.replace(mark, literal)
        ids = list(_encode(twin, text, add_special=False).ids)
        self._check_specials(ids, expected)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        require_address_space(_SPARE, "the tokenizer")
        return str(_guard(self._raw.decode, token_ids, skip_special))

    def _check_specials(self, ids: Sequence[int], expected: list[int]) -> None:
        """The last guard: no special token may appear that was not meant."""
        unknown = self._unknown_id()
        special_ids = set(self._specials.values()) - {unknown}
        found = [token_id for token_id in ids if token_id in special_ids]
        if found != [token_id for token_id in expected if token_id != unknown]:
            raise PromptError(
                "the text contains a special token's name that this tokenizer cannot take as text"
            )

    def _unknown_id(self) -> int | None:
        """The id for what the vocabulary lacks: special, but any text may contain it."""
        model = self._raw.model
        name = getattr(model, "unk_token", None)
        return self._raw.token_to_id(name) if isinstance(name, str) else getattr(model, "unk_id", None)

    def _make_twin(self) -> tuple[RawTokenizer, dict[str, str]]:
        if self._twin is None:
            names = {name: f"\U0010fffc{secrets.token_hex(8)}\U0010fffd" for name in self._specials}
            content = json.loads(self._text)
            _rename(content, names)
            twin = _parse(json.dumps(content))
            if any(twin.token_to_id(names[name]) != token_id for name, token_id in self._specials.items()):
                raise PromptError("this tokenizer cannot take a special token's name as text; remove it")
            self._twin = twin, names
        return self._twin


def _rename(content: dict[str, Any], names: dict[str, str]) -> None:
    for token in content["added_tokens"]:
        if token["content"] in names:
            token["content"], token["normalized"] = names[token["content"]], False
    model = content["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(name, name): token_id for name, token_id in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: [piece, score]
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _parse(text: str) -> RawTokenizer:
    require_address_space(_READING * len(text) + _SPARE, "reading the tokenizer")
    try:
        raw = RawTokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise BundleError(f"tokenizer.json cannot be read: {' '.join(str(error).split())[:200]}") from error
    raw.no_truncation()  # a prompt is used whole or refused
    raw.no_padding()
    return raw


def _encode(raw: RawTokenizer, text: str, add_special: bool) -> Any:
    require_address_space(_ENCODING * len(text) + _SPARE, "encoding the text")
    return _guard(raw.encode, text, None, False, add_special)  # no pair, not split into words


def _guard(work: Callable[..., Any], *arguments: object) -> Any:
    try:
        return work(*arguments)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers' PanicException is no Exception
        raise PromptError(f"the tokenizer failed: {' '.join(str(error).split())[:200]}") from error
