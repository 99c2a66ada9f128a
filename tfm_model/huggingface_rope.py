"""The rotary embedding that a Hugging Face `config.json` asks for.

Three generations of spelling mean the same: `rope_theta` + `rope_scaling` with `type`, then with `rope_type`,
and since transformers 5 all of it inside `rope_parameters`. Which value wins where several are given, and
what is taken where none is, follows transformers 5.22 (`modeling_rope_utils.py`); a test compares frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .attention_config import RotaryConfig, RotaryScaling
from .checks import ConfigError
from .values import Values, flag, number, shown, whole

DEFAULT_THETA = 10000.0
_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
# What may stand in the rotary parameters. transformers only warns of others; they tend to change the maths.
_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "low_freq_factor", "high_freq_factor",
    "finetuned",  # a remark of the first YaRN checkpoints
}  # fmt: skip


def rotary_config(values: Values, head_dim: int, context: int) -> RotaryConfig:
    rope = _parameters(values)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ConfigError(f"rope_type is {shown(kind)}, supported are {', '.join(_TYPES)}")
    theta = number(rope, "rope_theta", number(values, "rope_theta", DEFAULT_THETA))
    part = number(rope, "partial_rotary_factor", number(values, "partial_rotary_factor", 1.0))
    if not head_dim <= head_dim * part < head_dim + 1:
        # transformers turns whole heads with rope_type default and fails with the others.
        raise ConfigError(f"partial_rotary_factor is {part}, but these families turn whole heads")
    scaling = _scaling(kind, rope, values, context)
    return RotaryConfig(dim=head_dim, theta=theta, scaling=scaling)


def _parameters(values: Values) -> Values:
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters is {shown(rope)}, wanted an object")
    for key, value in rope.items():
        if key not in _KEYS and value is not None:
            raise ConfigError(f"rope_parameters has {shown(key)}, which is not supported")
    return rope


def _scaling(kind: str, rope: Values, values: Values, context: int) -> RotaryScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RotaryScaling(kind="linear", factor=number(rope, "factor"), original_context=context)
    if kind == "dynamic":  # scales past max_position_embeddings, whatever the file says the original was
        return RotaryScaling(kind="dynamic", factor=number(rope, "factor"), original_context=context)
    key = "original_max_position_embeddings"
    original = whole(values, key, whole(rope, key, context))  # beside the parameters it wins over inside
    if kind == "llama3":
        return RotaryScaling(
            kind="llama3",
            factor=number(rope, "factor"),
            original_context=original,
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
        )
    return _yarn(rope, original, context)


def _yarn(rope: Values, original: int, context: int) -> RotaryScaling:
    factor = number(rope, "factor", context / original)
    return RotaryScaling(
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=number(rope, "beta_fast") if rope.get("beta_fast") else 32.0,  # 0 counts as not given
        beta_slow=number(rope, "beta_slow") if rope.get("beta_slow") else 1.0,
        attention_factor=_attention_factor(rope, factor),
        truncate=flag(rope, "truncate", missing=True),
    )


def _attention_factor(rope: Values, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _magnitude(factor, number(rope, "mscale")) / _magnitude(factor, number(rope, "mscale_all_dim"))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    """YaRN's temperature for attention over a context that is `factor` times longer (Peng et al. 2023, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
