"""A Hugging Face `config.json` as a ModelConfig, for the families llama, mistral, qwen2 and qwen3.

What transformers 5 would compute from the file is what the ModelConfig says; where the file is silent,
its defaults hold. Keys that have no meaning for the forward pass are ignored; a key that would change
it in a way that is not supported is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping

from .attention_config import AttentionConfig, NormConfig
from .checks import ConfigError
from .config import Activation, HeadConfig, MlpConfig, ModelConfig, TokenInputs
from .huggingface_rope import rotary_config
from .values import Values, flag, number, shown, whole

_COMMON: Values = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA: Values = {
    **_COMMON,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,  # num_attention_heads
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL: Values = {
    **_COMMON,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2: Values = {
    **_COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_QWEN3: Values = {**_QWEN2, "head_dim": 128, "attention_bias": False}
# What transformers 5.22 takes where config.json says nothing; a test compares them.
DEFAULTS: Mapping[str, Values] = {"llama": _LLAMA, "mistral": _MISTRAL, "qwen2": _QWEN2, "qwen3": _QWEN3}

_ACTIVATIONS: Mapping[object, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_FULL, _SLIDING = "full_attention", "sliding_attention"

# Keys that change the forward pass, and the values with which they do not.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "per_layer_config": (None, {}),
    "pretraining_tp": (None, 1),
    "rope_interleaved": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}


def parse_config(raw: Values) -> ModelConfig:
    """The ModelConfig of a config.json, or ConfigError with what it asks for that cannot be given."""
    family = family_of(raw)
    refuse_unsupported(raw, family)
    values = {**DEFAULTS[family], **raw}
    width, n_heads = whole(values, "hidden_size"), whole(values, "num_attention_heads")
    n_layers = whole(values, "num_hidden_layers", most=10_000)
    context = whole(values, "max_position_embeddings")
    head_dim = _head_dim(values, width, n_heads)
    norm = NormConfig(eps=number(values, "rms_norm_eps"))
    bias = family in {"llama", "qwen3"} and flag(values, "attention_bias")
    return ModelConfig(
        inputs=TokenInputs(vocab_size=whole(values, "vocab_size")),
        width=width,
        n_layers=n_layers,
        context=context,
        norm=norm,
        mixer=AttentionConfig(
            n_heads=n_heads,
            n_kv_heads=whole(values, "num_key_value_heads", n_heads),
            head_dim=head_dim,
            qkv_bias=bias or family == "qwen2",
            out_bias=bias,
            qk_norm=norm if family == "qwen3" else None,
            rotary=rotary_config(values, head_dim, context),
        ),
        mlp=MlpConfig(
            hidden=whole(values, "intermediate_size"),
            activation=_activation(values),
            bias=family == "llama" and flag(values, "mlp_bias"),
        ),
        windows=_windows(values, family, n_layers),
        head=HeadConfig(tied=flag(values, "tie_word_embeddings")),
    )


def family_of(raw: Values) -> str:
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in DEFAULTS:
        found = "has no model_type" if family is None else f"has model_type {shown(family)}"
        raise ConfigError(f"{found}, supported are {', '.join(DEFAULTS)}")
    return family


def refuse_unsupported(raw: Values, family: str) -> None:
    for key, accepted in _ONLY.items():
        if key in raw and raw[key] not in accepted:
            raise ConfigError(f"{key} is {shown(raw[key])}, which is not supported")
    if family == "llama" and raw.get("sliding_window") is not None:
        # transformers' llama ignores it, others do not: two readings of one file.
        raise ConfigError(
            f"sliding_window is {shown(raw['sliding_window'])}, but llama has none; set it to null"
        )


def _head_dim(values: Values, width: int, n_heads: int) -> int:
    if values["head_dim"] is not None:
        return whole(values, "head_dim")
    if width % n_heads:
        raise ConfigError(f"hidden_size ({width}) must be a multiple of num_attention_heads ({n_heads})")
    return width // n_heads


def _activation(values: Values) -> Activation:
    name = values["hidden_act"]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act is {shown(name)}, supported are {', '.join(map(str, _ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _windows(values: Values, family: str, n_layers: int) -> tuple[int | None, ...]:
    """How far back each layer sees, as transformers' mask has it: key j for query i where i - j < window."""
    mixed = family in {"qwen2", "qwen3"}  # the other families' layers are all alike
    windowed = values.get("sliding_window") is not None and (not mixed or flag(values, "use_sliding_window"))
    first = whole(values, "max_window_layers", least=0) if mixed else 0
    default = [_SLIDING if windowed and layer >= first else _FULL for layer in range(n_layers)]
    kinds = _layer_kinds(values, n_layers) or default
    if _SLIDING in kinds and not windowed:
        raise ConfigError(f"layer_types has {_SLIDING}, but there is no sliding window")
    if not mixed and kinds != default:
        raise ConfigError(f"layer_types is {shown(kinds)}, but the layers of {family} are all alike")
    if _SLIDING not in kinds:
        return ()
    window = whole(values, "sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _layer_kinds(values: Values, n_layers: int) -> list[str] | None:
    kinds = values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise ConfigError(
            f"layer_types is {shown(kinds)}, wanted a list with an entry for each of {n_layers} layers"
        )
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise ConfigError(f"layer_types has {shown(kind)}, supported are {_FULL}, {_SLIDING}")
    return kinds
