"""What a model's config allows: how it is exported, the context and outputs that it can have. Known without PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .. import InputError
from ..tfm_model.config import AttentionConfig, HeadConfig, ModelConfig, TokenInputs
from .arithmetic import kv_error
from .shown_layers import Layers, with_attentions

if TYPE_CHECKING:
    from .layout import Target  # which imports PyTorch

MIN_CONTEXT = 2  # a prompt of one token, and one answer


class ContextLengthError(InputError):
    """The model is not made for so many positions."""


def fitted(config: ModelConfig, max_context: int | None, attentions: Layers) -> ModelConfig:
    """The config as it is exported, or an error that says which option it has no use for."""
    return with_attentions(_with_context(config, max_context), attentions)


def can_stamp(config: ModelConfig) -> bool:
    """Whether it is a decoder of tokens whose attention every target has fused ops for."""
    if config.kind != "decoder" or not isinstance(config.mixer, AttentionConfig):
        return False
    plain = config.mixer.similarity == "asymmetric" and config.mixer.combination == "concat"
    special = config.mixer.relative or config.mixer.random_features
    of_tokens = isinstance(config.inputs, TokenInputs) and config.head == replace(
        HeadConfig(), tied=config.head.tied, bias=config.head.bias, softcap=config.head.softcap
    )
    return of_tokens and plain and not special


def keeps_slots(config: ModelConfig, target: Target) -> bool:
    """Whether attention is the fused op with a cache by slots; it keeps its weights to itself."""
    return target == "ort" and not config.attention_outputs


def check_recipe(
    config: ModelConfig, target: Target, *, kv_int8: bool, calibrates: bool, requantises: bool
) -> None:
    """Of what `--kv`, `--calibrate` and `--requantise` ask for, what this model cannot have (it is no GGUF file)."""
    if kv_int8 and not (can_stamp(config) and keeps_slots(config, target)):
        raise kv_error(target)
    if calibrates and not can_stamp(config):
        raise calibrate_error()
    if requantises:
        raise requantise_error()


def calibrate_error() -> InputError:
    return InputError("--calibrate is for decoders of tokens with plain attention; leave it out")


def requantise_error() -> InputError:
    return InputError(
        "--requantise is for checkpoints with blocks (Q4_0, Q4_1 or Q8_0 in a GGUF); this one has none, leave it out"
    )


def _with_context(config: ModelConfig, max_context: int | None) -> ModelConfig:
    if config.kind != "encoder":
        check_context(config.context)
    if max_context is None or max_context == config.context:
        return config
    check_max_context(max_context)
    if not can_stamp(config) or config.positions is not None:
        raise ContextLengthError(
            f"--max-context is {max_context}, but this model is made for {config.context} positions; leave it out"
        )
    rotary = config.attention.rotary
    stretches = rotary is not None and rotary.scaling is not None and rotary.scaling.kind == "dynamic"
    if max_context > config.context and not stretches:
        raise ContextLengthError(
            f"--max-context is {max_context}, but the model was made for {config.context} positions; "
            f"ask for {config.context} or fewer"
        )
    return replace(config, context=max_context)


def check_max_context(max_context: int) -> None:
    if max_context < MIN_CONTEXT:
        raise InputError(f"--max-context is {max_context}, wanted at least {MIN_CONTEXT}")


def check_context(context: int) -> None:
    if context < MIN_CONTEXT:
        raise InputError(f"the model's context is {context}, wanted at least {MIN_CONTEXT}")
