"""How byte-level tokenizers split text before merging, by the name that GGUF has for it.

GGUF stores no pattern, only `tokenizer.ggml.pre`; what each name stands for is in the `tokenizer.json` of the
models that have it and in llama.cpp's source. Splitting wrongly gives wrong tokens without any error, so an
unknown name is refused. Patterns are applied one after the other to the pieces that are left.
"""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")  # each digit alone
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Split:
    patterns: tuple[str, ...]
    nfc: bool = False  # composes characters first
    ignore_merges: bool = False  # a piece that is a token stays one, whatever the merges would make of it
    bos: bool = False  # puts the begin token in front, unless add_bos_token says otherwise


_LLAMA3_SPLIT = Split((_LLAMA3,), ignore_merges=True, bos=True)
SPLITS = {
    "gpt-2": Split((_GPT2,)),
    "smollm": Split((r"\p{N}", _GPT2)),
    "starcoder": Split((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "smaug-bpe": Split((_LLAMA3,)),
    "qwen2": Split((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": Split((_QWEN2,)),
    "tekken": Split((_TEKKEN,), ignore_merges=True, bos=True),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    # llama.cpp's own, for files whose converter did not know better.
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
