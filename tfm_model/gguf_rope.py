"""The rotary embedding of a GGUF file, said in the words of a Hugging Face config.json."""

from __future__ import annotations

import math

from .checkpoint import LazyTensor
from .checks import ConfigError
from .huggingface_rope import DEFAULT_THETA
from .values import Values, number, shown, string, whole

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Keys that llama.cpp's own maths would change with, and the values with which it does not.
_ONLY = {
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),  # -1 is "not set"
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def rope_values(own: Values, head_dim: int, divisors: LazyTensor | None) -> dict[str, object]:
    """`rope_theta` and `rope_scaling` from the architecture's own metadata and the tensor rope_freqs.weight."""
    for key, accepted in _ONLY.items():
        if key in own and own[key] not in accepted:
            raise ConfigError(f"{key} is {shown(own[key])}, which is not supported")
    if whole(own, "rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(
            f"rope.dimension_count is {shown(own['rope.dimension_count'])}, wanted {head_dim}: whole heads"
        )
    theta = number(own, "rope.freq_base", DEFAULT_THETA)
    scaling = _scaling(own)
    if divisors is not None and scaling is not None:
        raise ConfigError("has both rope_freqs.weight and rope.scaling, which nobody defines together")
    if divisors is not None:
        scaling = _llama3_of(divisors, theta, head_dim)
    return {"rope_theta": theta} if scaling is None else {"rope_theta": theta, "rope_scaling": scaling}


def _scaling(own: Values) -> dict[str, object] | None:
    kind = string(own, "rope.scaling.type", "linear")  # llama.cpp's default, with a factor of 1
    key = "rope.scaling.factor" if "rope.scaling.factor" in own else "rope.scale_linear"  # the older name
    factor = number(own, key, 1.0) if own.get(key) else 1.0  # 0 is "not set"
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(f"rope.scaling.type is {shown(kind)}, supported are none, linear, yarn")
    original = whole(own, "rope.scaling.original_context_length", whole(own, "context_length"))
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    # The converter writes Hugging Face's attention_factor here; llama.cpp's own writer a 1 for "not set".
    attention_factor = number(own, "rope.scaling.yarn_attn_factor", 1.0)
    if attention_factor != 1:
        scaling["attention_factor"] = attention_factor
    for name in ("beta_fast", "beta_slow"):
        if own.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = number(own, f"rope.scaling.yarn_{name}")
    return dict(scaling)


def _llama3_of(divisors: LazyTensor, theta: float, head_dim: int) -> dict[str, object] | None:
    """Llama 3's scaling out of the divisors that the converter made of it, or an error if they are others.

    Every model that has the tensor was trained with Meta's 1, 4 and 8192; the factor is the largest divisor.
    """
    if divisors.shape != (head_dim // 2,):
        raise ConfigError(
            f"tensor {divisors.name} has shape {list(divisors.shape)}, wanted {[head_dim // 2]}"
        )
    found = divisors.read().double().tolist()
    factor = float(f"{max(found):.6g}")
    if all(divisor == 1 for divisor in found):
        return None
    expected = [_llama3_divisor(theta ** (-2 * i / head_dim), factor) for i in range(head_dim // 2)]
    if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(found, expected, strict=True)):
        raise ConfigError(f"tensor {divisors.name} divides frequencies in a way that is not Llama 3's")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_divisor(frequency: float, factor: float) -> float:
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    waves = _LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
    keep = min(max((waves - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - keep) / factor + keep)
