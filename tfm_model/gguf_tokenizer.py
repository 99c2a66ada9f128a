"""Rebuilds the `tokenizer.json` of a model from the metadata of its GGUF file.

GGUF stores the vocabulary, the merges (or scores) and the names of two things that it has no room for: the kind
of model (`tokenizer.ggml.model`) and how text is split before merging (`tokenizer.ggml.pre`). Kinds:

    gpt2   byte-level BPE: text is split by regular expressions, each byte is one of 256 letters
    llama  SentencePiece BPE: no splitting, spaces are "▁", characters that are no token fall back to bytes
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .checks import ConfigError
from .gguf_split import SPLITS, Split
from .tokenizer_json import check_tokenizer
from .values import Values, flag, shown, string, whole

Json = dict[str, object]
Merge = tuple[str, str]
_T = TypeVar("_T")

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of token; 1 is normal, 5 unused
_LONGEST = 512  # characters of a mergeable token: trying every cut is quadratic; Llama's longest has 48
# Tokens that end a text or a turn. GGUF names one, the makers' generation_config.json often several.
_ENDS = {"</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where the file is silent, as in llama.cpp


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] = ()

    @property
    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def text(self, token_id: int) -> str:
        if token_id >= len(self.tokens):
            raise ConfigError(f"token {token_id} is not in the vocabulary of {len(self.tokens)} tokens")
        return self.tokens[token_id]

    def added_tokens(self) -> list[Json]:
        """What is found in the text before anything else: control tokens, and whole words of the makers."""
        return [
            {"id": token_id, "content": self.tokens[token_id], "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": kind != _USER_DEFINED}
            for token_id, kind in enumerate(self.types) if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}
        ]  # fmt: skip


def tokenizer_json(metadata: Values, where: str) -> str | None:
    """The text of a tokenizer.json, or None if the file has no tokenizer."""
    whole_text = metadata.get("tokenizer.huggingface.json")
    if isinstance(whole_text, str):
        check_tokenizer(whole_text, f"{where}: tokenizer.huggingface.json")
        return whole_text
    kind = string(metadata, "tokenizer.ggml.model", "none")
    if kind in {"none", "no_vocab"}:
        return None
    if kind not in {"gpt2", "llama"}:
        raise ConfigError(f"tokenizer.ggml.model is {shown(kind)}, supported are gpt2, llama")
    vocabulary = read_vocabulary(metadata)
    tokenizer = _byte_level(metadata, vocabulary) if kind == "gpt2" else _sentencepiece(metadata, vocabulary)
    text = json.dumps(tokenizer, ensure_ascii=False)
    check_tokenizer(text, f"{where}: the tokenizer")
    return text


def token_ids(metadata: Values) -> Json:
    """The ids of special tokens under the names of a config.json; all that end a text are `eos_token_id`."""
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    ends = [_special_id(metadata, name) for name in ("eos", "eot", "eom")]
    if isinstance(tokens, list) and isinstance(types, list):
        ends += [
            i
            for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _CONTROL and token in _ENDS
        ]
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    found = {
        "bos_token_id": _special_id(metadata, "bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": _special_id(metadata, "padding"),
    }
    return {key: value for key, value in found.items() if value is not None}


def read_vocabulary(metadata: Values) -> Vocabulary:
    tokens = _array(metadata, "tokens", str)
    if not tokens:
        raise ConfigError("tokenizer.ggml.tokens is missing")
    tokens = [
        token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)
    ]  # as llama.cpp calls them
    types, scores = _array(metadata, "token_type", int), _array(metadata, "scores", float)
    for name, values in (("token_type", types), ("scores", scores)):
        if values and len(values) != len(tokens):
            raise ConfigError(f"tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens")
    vocabulary = Vocabulary(tokens, types or [1] * len(tokens), scores)
    ids = vocabulary.ids
    if len(ids) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if ids[token] != token_id)
        raise ConfigError(f"tokenizer.ggml.tokens has {shown(twice)} twice")
    return vocabulary


def _byte_level(metadata: Values, vocabulary: Vocabulary) -> Json:
    name = string(metadata, "tokenizer.ggml.pre")
    if name not in SPLITS:
        raise ConfigError(f"tokenizer.ggml.pre is {shown(name)}, supported are {', '.join(SPLITS)}")
    split = SPLITS[name]
    return {
        "version": "1.0",
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": _splitter(split),
        "post_processor": _ends(metadata, vocabulary, bos=split.bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, _stored_merges(metadata), ignore_merges=split.ignore_merges),
    }


def _splitter(split: Split) -> Json:
    steps: list[Json] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    letters: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, letters]}


def _sentencepiece(metadata: Values, vocabulary: Vocabulary) -> Json:
    """Spaces become "▁", and one comes in front of the text and of what follows a special token."""
    prefix = flag(metadata, "tokenizer.ggml.add_space_prefix", missing=True)
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = [{"type": "Prepend", "prepend": "▁"}, spaces] if prefix else [spaces]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _special_id(metadata, "unknown")
    return {
        "version": "1.0",
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _ends(metadata, vocabulary, bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            _stored_merges(metadata) or merges_of(vocabulary),
            unk_token=None if unknown is None else vocabulary.text(unknown),
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def merges_of(vocabulary: Vocabulary) -> list[Merge]:
    """The merges that SentencePiece's scores stand for: any two tokens that make a third, best score first.

    Of equal scores the longer left part goes first, as in transformers' converter. Where all scores are equal
    (a file made without the SentencePiece model) the order of the vocabulary is that of the merges.
    """
    apart = {_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE}  # found in the text or put there, never merged
    ids = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] not in apart}
    if max(map(len, ids), default=0) > _LONGEST:
        raise ConfigError(f"tokenizer.ggml.tokens has a token of more than {_LONGEST} characters")
    scored = bool(vocabulary.scores) and len({vocabulary.scores[i] for i in ids.values()}) > 1
    ranked = sorted(
        ((vocabulary.scores[i] if scored else -i) * -1.0, -cut, cut - len(token), i, token[:cut], token[cut:])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    )
    return [(left, right) for *_, left, right in ranked]


def _stored_merges(metadata: Values) -> list[Merge]:
    merges = []
    for line in _array(metadata, "merges", str):
        cut = line.find(" ", 1)  # the first character may be a space itself
        if cut < 0:
            raise ConfigError(f"tokenizer.ggml.merges has {shown(line)}, wanted two tokens")
        merges.append((line[:cut], line[cut + 1 :]))
    return merges


def _bpe(vocabulary: Vocabulary, merges: Iterable[Merge], **options: object) -> Json:
    return {"type": "BPE", "vocab": vocabulary.ids, "merges": list(merges), **options}


def _ends(metadata: Values, vocabulary: Vocabulary, *, bos: bool) -> Json | None:
    """What is put around every text: the tokens of its begin and its end, if the makers want them."""
    wanted = {
        "bos": flag(metadata, "tokenizer.ggml.add_bos_token", missing=bos),
        "eos": flag(metadata, "tokenizer.ggml.add_eos_token", missing=False),
    }
    pieces: dict[str, list[Json]] = {"bos": [], "eos": []}
    special: Json = {}
    for name in [name for name, is_wanted in wanted.items() if is_wanted]:
        token_id = _special_id(metadata, name)
        if token_id is None:
            raise ConfigError(f"tokenizer.ggml.add_{name}_token is set, but there is no {name}_token_id")
        token = vocabulary.text(token_id)
        special[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        pieces[name] = [{"SpecialToken": {"id": token, "type_id": 0}}]
    if not special:
        return None
    texts: list[list[Json]] = [[{"Sequence": {"id": name, "type_id": 0}}] for name in ("A", "B")]
    single, second = ([*pieces["bos"], *text, *pieces["eos"]] for text in texts)
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": special,
    }


def _special_id(metadata: Values, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if metadata.get(key) is not None:
        return whole(metadata, key, least=0)
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    return _SENTENCEPIECE_IDS.get(name) if is_sentencepiece else None


def _array(metadata: Values, name: str, kind: type[_T]) -> list[_T]:
    values = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ConfigError(f"tokenizer.ggml.{name} is not an array of {kind.__name__}")
    return values
