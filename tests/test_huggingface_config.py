"""config.json against transformers: the same defaults, windows and frequencies, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_checkpoints import FAMILIES
from transformers import AutoConfig

from tfmx.tfm_model.config import ConfigError
from tfmx.tfm_model.huggingface_config import parse_config
from tfmx.tfm_model.rotary import inverse_frequencies

ROPES = {
    "new default": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "old theta": {"rope_theta": 500000.0},
    "old linear": {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "new linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 20000.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "dynamic, original is not used": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    },
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama3, original beside": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        },
    },
    "both, the old one wins": {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0},
    },
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "yarn, factor from the contexts": {
        "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}
    },
    "yarn, attention factor": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.7,
            "beta_fast": 16, "beta_slow": 2, "truncate": False,
        }
    },
    "yarn, mscale": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64,
            "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 0,
        }
    },
    "yarn, half of mscale": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.8}
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_config_json_leaves_out_is_what_transformers_takes(family):
    ours, theirs = parse_config({"model_type": family}), FAMILIES[family][0]()
    assert ours.vocab_size == theirs.vocab_size
    assert ours.width == theirs.hidden_size
    assert ours.n_layers == theirs.num_hidden_layers
    assert ours.context == theirs.max_position_embeddings
    assert ours.norm.eps == theirs.rms_norm_eps
    assert ours.attention.n_heads == theirs.num_attention_heads
    assert ours.attention.n_kv_heads == theirs.num_key_value_heads
    assert ours.attention.head_dim == getattr(
        theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.mlp.hidden == theirs.intermediate_size
    assert ours.mlp.activation == theirs.hidden_act
    assert ours.head.tied == theirs.tie_word_embeddings
    assert ours.attention.rotary.theta == theirs.rope_parameters["rope_theta"]
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in layer_kinds(theirs)]
    assert [ours.window(layer) for layer in range(ours.n_layers)] == windows


def layer_kinds(config):
    """Each layer's kind of attention by transformers' own words; mistral has none, all its layers slide."""
    alike = "sliding_attention" if getattr(config, "sliding_window", None) is not None else "full_attention"
    return getattr(config, "layer_types", None) or [alike] * config.num_hidden_layers


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 7}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 99}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None}),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 3,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
    ],
)  # fmt: skip
def test_windows_are_those_of_transformers(family, values):
    theirs = FAMILIES[family][0](**values)
    ours = parse_config({"model_type": family, **values})
    expected = [
        theirs.sliding_window if kind == "sliding_attention" else None for kind in layer_kinds(theirs)
    ]
    assert [ours.window(layer) for layer in range(ours.n_layers)] == expected


@pytest.mark.parametrize("spelling", ROPES)
def test_rotary_frequencies_are_those_of_transformers(spelling):
    raw = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    raw |= ROPES[spelling]
    theirs = FAMILIES["llama"][1](
        AutoConfig.for_model(**json.loads(json.dumps(raw)), num_hidden_layers=1, vocab_size=8)
    )
    rotary = parse_config(raw).attention.rotary
    torch.testing.assert_close(
        inverse_frequencies(rotary).float(), theirs.model.rotary_emb.inv_freq, rtol=1e-6, atol=0
    )
    factor = rotary.scaling.attention_factor if rotary.scaling else 1.0
    assert factor == pytest.approx(theirs.model.rotary_emb.attention_scaling, rel=1e-12)


def test_dynamic_scaling_starts_at_the_context_that_transformers_takes():
    raw = {"model_type": "llama", "max_position_embeddings": 128, **ROPES["dynamic, original is not used"]}
    assert parse_config(raw).attention.rotary.scaling.original_context == 128


@pytest.mark.parametrize(
    ("name", "ours"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")],
)  # fmt: skip
def test_activations_have_our_names(name, ours):
    assert parse_config({"model_type": "llama", "hidden_act": name}).mlp.activation == ours


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2', supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 0.5}, "theta is 0.5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_attention_heads": 32, "num_key_value_heads": 5}, "must be a multiple of n_kv_heads (5)"),
        ({"hidden_size": 100, "num_attention_heads": 32}, "hidden_size (100) must be a multiple"),
        ({"head_dim": 15}, "rotary.dim is 15, wanted an even number"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu']"),
        ({"attention_bias": 1}, "attention_bias is 1, wanted true or false"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is {'quant_method': 'gptq'}"),
        ({"per_layer_config": {"0": {"num_attention_heads": 2}}}, "per_layer_config"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"sliding_window": 4096}, "sliding_window is 4096, but llama has none"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor is -2.0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "'mrope_section'"),
        ({"rope_scaling": "linear"}, "rope_parameters is 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'full_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e+308"),
        ({"layer_types": ["chunked_attention"] * 32}, "layer_types has 'chunked_attention'"),
        ({"layer_types": [["full_attention"]] * 32}, "layer_types has ['full_attention']"),
        ({"layer_types": ["full_attention"]}, "an entry for each of 32 layers"),
        ({"layer_types": ["sliding_attention"] * 32}, "there is no sliding window"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32}, "there is no sliding window"),
        (
            {"model_type": "mistral", "layer_types": ["sliding_attention"] * 31 + ["full_attention"]},
            "the layers of mistral are all alike",
        ),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_right_or_is_not_supported_is_refused(values, words):
    with pytest.raises(ConfigError) as caught:
        parse_config({"model_type": "llama", **values})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
