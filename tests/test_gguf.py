"""The GGUF reader: what llama.cpp's converter writes comes back as the Hugging Face model that it was."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tiny_checkpoints import TINY, gguf_name, save_tiny, tiny_model, write_gguf
from transformers import AutoConfig

from tfmx.tfm_model.checkpoint import CheckpointError, read_finite
from tfmx.tfm_model.gguf_file import read_gguf
from tfmx.tfm_model.huggingface import read_huggingface
from tfmx.tfm_model.huggingface_config import parse_config
from tfmx.tfm_model.source import open_checkpoint

MODELS = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "qwen3, biases": {"attention_bias": True},
}


QUANTISABLE = [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]


SUPER_BLOCKS = [Type.Q4_K, Type.Q5_K, Type.Q6_K]  # gguf can read them, but not write them


@pytest.mark.parametrize("variant", MODELS)
def test_a_gguf_file_and_the_folder_that_it_was_made_of_are_one_model(tmp_path, variant):
    model = save_tiny(tmp_path / "folder", variant.partition(",")[0], **MODELS[variant])
    write_gguf(tmp_path / "model.gguf", model)
    ours, theirs = read_gguf(tmp_path / "model.gguf"), read_huggingface(tmp_path / "folder")
    assert ours.config == theirs.config
    assert list(ours.tensors) == list(theirs.tensors)
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor.read(), theirs.tensors[name].read()), name
        assert tensor.shape == theirs.tensors[name].shape


@pytest.mark.parametrize("variant", MODELS)
def test_the_config_json_of_a_gguf_file_means_the_same_to_us_and_to_transformers(tmp_path, variant):
    family = variant.partition(",")[0]
    model = tiny_model(family, **MODELS[variant])
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = read_gguf(tmp_path / "model.gguf")
    assert parse_config(checkpoint.huggingface_config) == checkpoint.config
    theirs = AutoConfig.for_model(**checkpoint.huggingface_config)
    # A file from mistral without a window is a llama, which computes the same.
    assert theirs.model_type == ("llama" if family == "mistral" else family)
    for key in TINY:
        assert getattr(theirs, key, None) == getattr(model.config, key, None) or key == "head_dim"
    assert theirs.rope_parameters == model.config.rope_parameters


def test_a_window_makes_a_mistral(tmp_path):
    model = save_tiny(tmp_path / "folder", "mistral", sliding_window=7)
    write_gguf(tmp_path / "model.gguf", model, metadata={"llama.attention.sliding_window": 7})
    assert read_gguf(tmp_path / "model.gguf").config == read_huggingface(tmp_path / "folder").config
    assert read_gguf(tmp_path / "model.gguf").huggingface_config["model_type"] == "mistral"


@pytest.mark.parametrize("type_", QUANTISABLE, ids=lambda type_: type_.name)
def test_quantised_rows_are_dequantised_and_put_back_in_order(tmp_path, type_):
    model = tiny_model("llama")
    write_gguf(tmp_path / "model.gguf", model, matrices=type_)
    tensors, state = read_gguf(tmp_path / "model.gguf").tensors, model.state_dict()
    # Rows are quantised one by one, so their order does not matter to their values.
    q = rounded(state["model.layers.1.self_attn.q_proj.weight"], type_)
    k = rounded(state["model.layers.1.self_attn.k_proj.weight"], type_)
    v = rounded(state["model.layers.1.self_attn.v_proj.weight"], type_)
    assert torch.equal(
        read_finite(tensors["blocks.1.attention.qkv.weight"], torch.float32), torch.cat((q, k, v))
    )
    down = rounded(state["model.layers.2.mlp.down_proj.weight"], type_)
    assert torch.equal(read_finite(tensors["blocks.2.mlp.down.weight"], torch.float32), down)
    assert torch.equal(tensors["norm.weight"].read(), state["model.norm.weight"])


def rounded(matrix: torch.Tensor, type_: Type) -> torch.Tensor:
    """What is left of a matrix after the round trip through a type, by the `gguf` package alone."""
    array = np.ascontiguousarray(matrix.numpy())
    if type_ == Type.F16:
        return torch.from_numpy(array.astype(np.float16).astype(np.float32))
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, type_), type_).copy())


@pytest.mark.parametrize("type_", [*SUPER_BLOCKS, Type.Q4_1], ids=lambda type_: type_.name)
@pytest.mark.parametrize("shape", [(96, 256), (3, 2048), (600, 512)])
def test_blocks_of_all_kinds_are_read_whatever_the_shape(tmp_path, type_, shape):
    """Random blocks: larger than what is dequantised at a time, or smaller, in one row or in many."""
    per_block, size = gguf.GGML_QUANT_SIZES[type_]
    blocks = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // per_block, size), np.uint8)
    halves = blocks.reshape(-1, size).view(np.uint8)
    for at in {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.Q4_1: (0, 2)}[type_]:
        halves[:, at + 1] &= 0x3B  # the exponents of the float16 scales: finite ones
    data = blocks.reshape(shape[0], -1)
    model = tiny_model("llama", vocab_size=shape[0], hidden_size=shape[1], num_hidden_layers=1)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, skip=("token_embd.weight",), extra={"token_embd.weight": Raw(data, type_)})
    found = read_gguf(path).tensors["embed.weight"].read()
    assert found.shape == shape
    assert torch.equal(found, torch.from_numpy(gguf.quants.dequantize(data, type_)))


class Raw(np.ndarray):
    """Bytes of a quantised tensor, which remember their type."""

    def __new__(cls, data: np.ndarray, type_: Type):
        raw = np.ascontiguousarray(data).view(cls)
        raw.type_ = type_
        return raw


def test_a_type_that_is_not_supported_is_named_with_its_tensor(tmp_path):
    data = np.zeros((96, 256 // 256 * 84), np.uint8)
    model = tiny_model("llama", hidden_size=256)
    write_gguf(
        tmp_path / "m.gguf",
        model,
        skip=("token_embd.weight",),
        extra={"token_embd.weight": Raw(data, Type.Q2_K)},
    )
    with pytest.raises(
        CheckpointError, match=r"tensor 'token_embd\.weight' has type Q2_K, supported are F32, F16"
    ):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_divisors_of_llama_3_become_its_scaling(tmp_path, factor):
    values = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = save_tiny(
        tmp_path / "folder", "llama", head_dim=64, max_position_embeddings=131072, rope_parameters=values
    )
    divisors = llama3_divisors(64, values)
    assert len(set(divisors.tolist())) > 2  # some are between 1 and the factor
    write_gguf(tmp_path / "model.gguf", model, extra={"rope_freqs.weight": divisors})
    checkpoint = read_gguf(tmp_path / "model.gguf")
    assert checkpoint.config == read_huggingface(tmp_path / "folder").config
    divisors[10] *= 1.5
    write_gguf(tmp_path / "other.gguf", model, extra={"rope_freqs.weight": divisors})
    with pytest.raises(
        CheckpointError, match=r"rope_freqs\.weight divides frequencies in a way that is not Llama 3's"
    ):
        read_gguf(tmp_path / "other.gguf")


def llama3_divisors(head_dim: int, values: dict) -> np.ndarray:
    """The tensor that llama.cpp's converter writes for these parameters."""
    original, factor = values["original_max_position_embeddings"], values["factor"]
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        length = 2 * math.pi * values["rope_theta"] ** (i / head_dim)
        if length < original / high:
            divisors.append(1.0)
        elif length > original / low:
            divisors.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("scaling", "metadata"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"scaling.type": "linear", "scaling.factor": 4.0}),
        ({"rope_type": "linear", "factor": 2.0}, {"scale_linear": 2.0}),
        ({"rope_type": "default"}, {"scaling.type": "none", "scaling.factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.75,
             "beta_fast": 16.0},
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32,
             "scaling.yarn_attn_factor": 0.75, "scaling.yarn_beta_fast": 16.0},
        ),
    ],
)  # fmt: skip
def test_rotary_scaling_comes_from_the_metadata(tmp_path, scaling, metadata):
    model = save_tiny(tmp_path / "folder", "qwen2", rope_parameters={"rope_theta": 20000.0, **scaling})
    write_gguf(
        tmp_path / "m.gguf", model, metadata={f"qwen2.rope.{key}": value for key, value in metadata.items()}
    )
    assert read_gguf(tmp_path / "m.gguf").config == read_huggingface(tmp_path / "folder").config


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "gpt2"}, "architecture is 'gpt2', supported are llama, qwen2, qwen3"),
        ({"llama.block_count": None}, "block_count is None, wanted a whole number"),
        ({"llama.block_count": 4}, "tensor blk.3.attn_norm.weight is missing"),
        ({"llama.block_count": 2}, "'blk.2.attn_q.weight' (and 8 more) has no place"),
        ({"llama.block_count": 10**9}, "num_hidden_layers is 1000000000"),
        ({"llama.attention.head_count": 0}, "attention.head_count is 0"),
        ({"llama.attention.head_count": 3}, "must be a multiple of n_kv_heads"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, "head_count_kv is [2, 2, 1], wanted the same in all layers"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon is nan"),
        ({"llama.attention.value_length": 8}, "key_length and attention.value_length differ"),
        ({"llama.rope.freq_base": 0.0}, "rope.freq_base is 0.0"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, wanted 16"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor is 1.2"),
        ({"llama.expert_count": 8}, "expert_count is 8, which is not supported"),
        ({"llama.vocab_size": 95}, "token_embd.weight has 96 rows"),
        ({"llama.context_length": "long"}, "context_length is 'long'"),
        ({"split.count": 2}, "is one part of several"),
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template is 3"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_right_or_is_not_supported_is_refused(tmp_path, metadata, words):
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"), metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(tmp_path / "model.gguf")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_head_counts_may_be_given_for_each_layer(tmp_path):
    model = tiny_model("llama")
    write_gguf(tmp_path / "model.gguf", model, metadata={"llama.attention.head_count_kv": [2, 2, 2]})
    assert read_gguf(tmp_path / "model.gguf").config.attention.n_kv_heads == 2


def test_a_gguf_file_may_be_a_link_as_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    write_gguf(tmp_path / "blob", tiny_model("llama"))
    (tmp_path / "model.gguf").symlink_to("blob")
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("model.gguf")
    assert checkpoint.files == (tmp_path / "model.gguf",)
    monkeypatch.chdir("/")
    assert checkpoint.tensors["norm.weight"].read().shape == (64,)


def test_a_missing_tensor_is_named_as_the_file_would_call_it(tmp_path):
    model = tiny_model("qwen2")
    missing = gguf_name("model.layers.1.self_attn.v_proj.bias")
    write_gguf(tmp_path / "model.gguf", model, skip=(missing,))
    with pytest.raises(
        CheckpointError, match=r"tensor blk\.1\.attn_v\.bias is missing, wanted one of shape \[32\]"
    ):
        read_gguf(tmp_path / "model.gguf")


def test_a_scale_that_is_not_finite_is_found_when_the_weights_are_read(tmp_path):
    data = np.zeros((96, 64 // 32 * 34), np.uint8)
    data[5, :2] = np.array([np.nan], np.float16).view(np.uint8)
    model = tiny_model("llama")
    write_gguf(
        tmp_path / "m.gguf",
        model,
        skip=("token_embd.weight",),
        extra={"token_embd.weight": Raw(data, Type.Q8_0)},
    )
    tensor = read_gguf(tmp_path / "m.gguf").tensors["embed.weight"]
    with pytest.raises(CheckpointError, match=r"tensor token_embd\.weight holds a value that is not finite"):
        read_finite(tensor, torch.float32)


def test_floats_are_the_decimals_that_were_meant(tmp_path):
    write_gguf(tmp_path / "model.gguf", tiny_model("llama", rms_norm_eps=1e-5))
    assert read_gguf(tmp_path / "model.gguf").config.norm.eps == 1e-5
