"""What a model's makers say about generating with it, checked."""

from __future__ import annotations

from collections.abc import Callable

from .checkpoint import GenerationDefaults
from .checks import ConfigError
from .config import ModelConfig
from .values import Values, shown

# What each option may be. Nothing else in a generation_config.json concerns sampling.
_SAMPLING: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: value > 0,
    "top_k": lambda value: value >= 0 and value == int(value),
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: value > 0,
}
_ALWAYS = {"repetition_penalty"}  # transformers applies it to greedy decoding too


def generation_defaults(values: Values, config: ModelConfig) -> GenerationDefaults:
    """Token ids, and the sampling options that transformers would use.

    Without `do_sample` it decodes greedily whatever temperature stands there, so those options are left out.
    """
    sampled = values.get("do_sample") is True
    return GenerationDefaults(
        bos_token_id=_token_id(values, "bos_token_id", config.vocab_size),
        eos_token_ids=_token_ids(values, "eos_token_id", config.vocab_size),
        pad_token_id=_padding_id(values, config.vocab_size),
        sampling={
            key: _option(values, key)
            for key in _SAMPLING
            if values.get(key) is not None and (sampled or key in _ALWAYS)
        },
    )


def _option(values: Values, key: str) -> float:
    value = values[key]
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -1e9 < value < 1e9
        and _SAMPLING[key](value)
    ):
        return value
    raise ConfigError(f"{key} is {shown(value)}, which no sampler can use")


def _token_ids(values: Values, key: str, vocab_size: int) -> tuple[int, ...]:
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(_checked(key, token_id, vocab_size) for token_id in ids))


def _token_id(values: Values, key: str, vocab_size: int) -> int | None:
    value = values.get(key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return None if value is None else _checked(key, value, vocab_size)


def _padding_id(values: Values, vocab_size: int) -> int | None:
    """Padding is masked, so an id that is not in the vocabulary (the first Llamas have -1) means there is none."""
    value = values.get("pad_token_id")
    return (
        value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size else None
    )


def _checked(key: str, value: object, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ConfigError(f"{key} is {shown(value)}, wanted a token id from 0 to {vocab_size - 1}")
    return value
