"""The Hugging Face reader against transformers: the same config, the same tensors, the same defaults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from tfmx.tfm_model.checkpoint import CheckpointError, LazyTensor, read_finite
from tfmx.tfm_model.config import ConfigError
from tfmx.tfm_model.huggingface import read_huggingface
from tfmx.tfm_model.huggingface_config import parse_config
from tfmx.tfm_model.rotary import inverse_frequencies
from tfmx.tfm_model.source import is_python_source, open_checkpoint
from tiny_checkpoints import FAMILIES, change_config, save_tiny, tiny_model
from transformers import AutoConfig

VARIANTS = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, all heads": {"num_key_value_heads": 4},
    "mistral": {},
    "mistral, window": {"sliding_window": 5},
    "qwen2": {},
    "qwen2, tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3, biases": {"attention_bias": True, "head_dim": 24},
}
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_the_one_that_transformers_saved(tmp_path, variant):
    family = variant.partition(",")[0]
    state = save_tiny(tmp_path, family, **VARIANTS[variant]).state_dict()
    checkpoint = read_huggingface(tmp_path)
    read = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    for name, tensor in checkpoint.tensors.items():
        assert tensor.shape == tuple(read[name].shape)
    assert torch.equal(read.pop("embed.weight"), state["model.embed_tokens.weight"])
    assert torch.equal(read.pop("norm.weight"), state["model.norm.weight"])
    assert checkpoint.config.tied_head is ("head.weight" not in read)
    if not checkpoint.config.tied_head:
        assert torch.equal(read.pop("head.weight"), state["lm_head.weight"])
    for layer in range(3):
        assert_block_is(read, f"blocks.{layer}.", state, f"model.layers.{layer}.")
    assert not read


def assert_block_is(read, ours, state, theirs):
    """Take the tensors of a block out of `read`, each compared with the parts that it was made of."""
    parts = {
        "attention_norm": ["input_layernorm"],
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.q_norm": ["self_attn.q_norm"],
        "attention.k_norm": ["self_attn.k_norm"],
        "attention.out": ["self_attn.o_proj"],
        "mlp_norm": ["post_attention_layernorm"],
        "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
    }
    for name, sources in parts.items():
        for kind in ("weight", "bias"):
            expected = [
                state[f"{theirs}{source}.{kind}"] for source in sources if f"{theirs}{source}.{kind}" in state
            ]
            assert len(expected) in (0, len(sources))
            found = read.pop(f"{ours}{name}.{kind}", None)
            assert (found is None) is (not expected), f"{ours}{name}.{kind}"
            if found is None:
                continue
            start = 0
            for part in expected:
                assert torch.equal(found[start : start + len(part)], part), f"{ours}{name}.{kind}"
                start += len(part)
            assert start == len(found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_as_it_is_stored(tmp_path, dtype):
    model = tiny_model("llama").to(dtype)
    model.save_pretrained(tmp_path)
    embedding = read_huggingface(tmp_path).tensors["embed.weight"]
    assert torch.equal(embedding.read(), model.state_dict()["model.embed_tokens.weight"])
    assert read_finite(embedding, torch.float32).dtype == torch.float32


def test_shards_give_the_same_tensors_as_one_file(tmp_path):
    save_tiny(tmp_path / "one", "qwen3")
    save_tiny(tmp_path / "many", "qwen3", shard="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = read_huggingface(tmp_path / "one"), read_huggingface(tmp_path / "many")
    assert list(one.tensors) == list(many.tensors)
    assert all(torch.equal(one.tensors[name].read(), many.tensors[name].read()) for name in one.tensors)
    assert {"model.safetensors.index.json", "config.json"} < {path.name for path in many.files}
    assert sum(path.suffix == ".safetensors" for path in many.files) == len(
        list((tmp_path / "many").glob("*.safetensors"))
    )


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
    assert ours.tied_head == theirs.tie_word_embeddings
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "tensor model.layers.1.mlp.up_proj.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65)}),
            "tensor model.norm.weight has shape [65], wanted [64]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 64)}),
            "k_proj.weight has shape [64, 64], wanted [32, 64]",
        ),
        (
            lambda t: t.update({"model.layers.3.input_layernorm.weight": torch.ones(64)}),
            "tensor 'model.layers.3.input_layernorm.weight' has no place",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64), "a\nb": torch.ones(1)}),
            "(and 1 more) has no place",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.float64)}),
            "'model.norm.weight' has dtype F64, supported are F32, F16, BF16",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(96, 64).char()}), "'lm_head.weight' has dtype I8"),
    ],
)  # fmt: skip
def test_a_missing_extra_misshaped_or_foreign_tensor_is_named(tmp_path, change, words):
    save_tiny(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_huggingface(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_frequencies_that_old_releases_stored_are_ignored(tmp_path):
    save_tiny(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8, dtype=torch.float64)
    save_file(tensors, tmp_path / "model.safetensors")
    assert len(read_huggingface(tmp_path).tensors) == 3 * 6 + 3


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_may_be_stored_only_if_it_is_the_embedding(tmp_path, same):
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if not same:
        tensors["lm_head.weight"][95, 63] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors")
    if same:
        assert "head.weight" not in read_huggingface(tmp_path).tensors
    else:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
            read_huggingface(tmp_path)


def test_an_index_and_its_shards_must_agree(tmp_path):
    save_tiny(tmp_path, "llama", shard="50KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))

    moved = {**index["weight_map"], "model.norm.weight": first}
    path.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(
        CheckpointError, match=rf"says that {first} holds 'model\.norm\.weight', but it does not"
    ):
        read_huggingface(tmp_path)

    without = {name: shard for name, shard in index["weight_map"].items() if name != "model.norm.weight"}
    path.write_text(json.dumps({"weight_map": without}))
    with pytest.raises(CheckpointError, match=r"holds 'model\.norm\.weight', which .* does not say"):
        read_huggingface(tmp_path)

    path.write_text(json.dumps(index))
    (tmp_path / last).unlink()
    with pytest.raises(CheckpointError, match=f"refers to '{last}', which is not in the folder"):
        read_huggingface(tmp_path)


def test_token_ids_come_from_generation_config_then_config(tmp_path):
    save_tiny(tmp_path, "llama", bos_token_id=5, eos_token_id=[6, 7], pad_token_id=8)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    defaults = read_huggingface(tmp_path).generation
    assert (defaults.bos_token_id, defaults.eos_token_ids, defaults.pad_token_id) == (5, (6, 7), 8)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "pad_token_id": None}))
    defaults = read_huggingface(tmp_path).generation
    assert (defaults.bos_token_id, defaults.eos_token_ids, defaults.pad_token_id) == (5, (9,), 8)


def test_silent_configs_have_the_token_ids_of_their_family(tmp_path):
    save_tiny(tmp_path, "llama")
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    defaults = read_huggingface(tmp_path).generation
    assert (defaults.bos_token_id, defaults.eos_token_ids, defaults.pad_token_id) == (1, (2,), None)


@pytest.mark.parametrize(
    ("values", "sampling"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}, {"temperature": 0.6, "top_p": 0.9, "top_k": 20}),
        ({"do_sample": True, "min_p": 0.1, "max_length": 20, "temperature": None}, {"min_p": 0.1}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_sampling_defaults_are_those_that_transformers_would_use(tmp_path, values, sampling):
    save_tiny(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert read_huggingface(tmp_path).generation.sampling == sampling


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"do_sample": True, "temperature": 0}, "temperature is 0, which no sampler can use"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": True, "top_k": 1.5}, "top_k is 1.5"),
        ({"do_sample": True, "temperature": float("nan")}, "temperature is nan"),
        ({"repetition_penalty": "high"}, "repetition_penalty is 'high'"),
        ({"eos_token_id": 96}, "eos_token_id is 96, wanted a token id from 0 to 95"),
        ({"eos_token_id": [2, -1]}, "eos_token_id is -1"),
        ({"bos_token_id": "1"}, "bos_token_id is '1'"),
    ],
)  # fmt: skip
def test_impossible_generation_defaults_are_refused(tmp_path, values, words):
    save_tiny(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        read_huggingface(tmp_path)
    assert words in str(caught.value)
    assert "generation_config.json" in str(caught.value)


def test_a_padding_id_outside_the_vocabulary_means_none(tmp_path):
    save_tiny(tmp_path, "llama")
    change_config(tmp_path, pad_token_id=-1)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert read_huggingface(tmp_path).generation.pad_token_id is None


def test_the_chat_template_is_the_file_then_the_default_then_the_text(tmp_path):
    save_tiny(tmp_path, "llama")
    assert read_huggingface(tmp_path).chat_template is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert read_huggingface(tmp_path).chat_template == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert read_huggingface(tmp_path).chat_template == "three"
    config.write_text(json.dumps({"chat_template": 4}))
    with pytest.raises(CheckpointError, match="chat_template is 4, wanted a text"):
        read_huggingface(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("five")
    assert read_huggingface(tmp_path).chat_template == "five"


def test_a_tokenizer_is_taken_as_it_is_and_must_load(tmp_path):
    save_tiny(tmp_path, "llama")
    assert read_huggingface(tmp_path).tokenizer_json is None
    text = json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, indent=1)
    (tmp_path / "tokenizer.json").write_text(text)
    assert read_huggingface(tmp_path).tokenizer_json == text
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'
    )
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer that can be loaded"):
        read_huggingface(tmp_path)


def test_values_that_are_not_finite_are_named_wherever_they_are():
    values = torch.zeros(1000, 37)
    assert read_finite(LazyTensor("t", (1000, 37), lambda: values), torch.float32) is values
    generator = torch.Generator().manual_seed(0)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for index in torch.randint(values.numel(), (5,), generator=generator).tolist():
                broken = values.to(dtype, copy=True)
                broken.view(-1)[index] = bad
                with pytest.raises(CheckpointError, match="tensor t holds a value that is not finite"):
                    read_finite(LazyTensor("t", (1000, 37), lambda broken=broken: broken), torch.float32)


def test_values_too_large_for_float16_are_told_apart_from_broken_ones():
    values = torch.tensor([1.0, -70000.0])
    with pytest.raises(
        CheckpointError, match=r"tensor t reaches 70000, more than torch\.float16 can hold \(65504\)"
    ):
        read_finite(LazyTensor("t", (2,), lambda: values), torch.float16)


@pytest.mark.timeout(120)
def test_reading_a_model_never_holds_more_than_a_tensor(tmp_path):
    """800 MB of zeros in a sparse file: opening reads none of it, and reading all of it one after the other."""
    script = textwrap.dedent("""
        import json, resource, sys
        from pathlib import Path
        import torch
        from tfmx.tfm_model.checkpoint import LazyTensor, read_finite
        from tfmx.tfm_model.huggingface import read_huggingface
        rows, width, layers = 4096, 1024, 12
        shapes = {"model.embed_tokens.weight": [rows, width], "model.norm.weight": [width]}
        for i in range(layers):
            at = f"model.layers.{i}."
            for name in ("q", "k", "v", "o"):
                shapes[f"{at}self_attn.{name}_proj.weight"] = [width, width]
            for name, shape in (("gate", [rows, width]), ("up", [rows, width]), ("down", [width, rows])):
                shapes[f"{at}mlp.{name}_proj.weight"] = shape
            shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = [width]
        header, end = {}, 0
        for name, shape in shapes.items():
            start, end = end, end + 4 * torch.Size(shape).numel()
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        folder = Path(sys.argv[1])
        with open(folder / "model.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        (folder / "config.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": rows, "hidden_size": width, "intermediate_size": rows,
            "num_hidden_layers": layers, "num_attention_heads": 16, "tie_word_embeddings": True}))
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        read_finite(LazyTensor("warm", (2**20,), lambda: torch.ones(2**20)), torch.float32)
        before = peak()
        checkpoint = read_huggingface(folder)
        opened = peak()
        for tensor in checkpoint.tensors.values():
            read_finite(tensor, torch.float32)
        print(end / 2**20, opened - before, peak() - before)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    size, opening, reading = map(float, done.stdout.split())
    assert size > 700
    assert opening < 20
    assert reading < 150  # two parts of 16 MB and their 32 MB concatenation, and what the allocator keeps


def test_python_sources_are_told_from_paths(tmp_path):
    assert is_python_source("model.py:build")
    assert is_python_source("../some dir/model.py:Build_2")
    for other in ("model.py", "model.py:", "model.py:2x", "folder", "C:\\models\\x.gguf", "model.pyc:build"):
        assert not is_python_source(other)


def test_a_source_is_opened_by_what_it_is(tmp_path):
    save_tiny(tmp_path / "model", "llama")
    assert open_checkpoint(str(tmp_path / "model")).kind == "huggingface"
    (tmp_path / "link").symlink_to(tmp_path / "model")  # the user's own link is the user's choice
    assert open_checkpoint(str(tmp_path / "link")).kind == "huggingface"
    shutil.rmtree(tmp_path / "model")
    for source, words in {
        "missing": "there is no file or folder 'missing'",
        "HuggingFaceTB/SmolLM2-135M": "there is no file or folder 'HuggingFaceTB/SmolLM2-135M'",
        "a\0b": "there is no file or folder",
        str(tmp_path): "has no config.json",
        str(tmp_path / "link"): "there is no file or folder",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(source)
        assert words in str(caught.value)
