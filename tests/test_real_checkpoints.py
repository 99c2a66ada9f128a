"""Real trained models through the readers: transformers runs what they read, and the text is the known one."""

from __future__ import annotations

import gguf
import pytest
import real_models
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, LlamaForCausalLM

from tfmx.tfm_model.checkpoint import read_finite
from tfmx.tfm_model.gguf_header import read_header
from tfmx.tfm_model.source import open_checkpoint


def test_our_reader_of_the_head_agrees_with_the_one_of_the_gguf_package():
    path = real_models.smollm2()
    header, theirs = read_header(path), gguf.GGUFReader(path)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(header.metadata) == keys
    for key in keys:
        expected = theirs.fields[key].contents()
        assert header.metadata[key] == (
            pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected
        )
    assert list(header.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = header.tensors[tensor.name]
        assert list(ours.shape) == tensor.shape.tolist()[::-1]
        assert (ours.type, ours.offset) == (tensor.tensor_type, tensor.data_offset)
        assert ours.n_rows * ours.row_bytes == tensor.n_bytes


@pytest.mark.slow
def test_smollm2_is_read_whole_and_knows_the_capital_of_france():
    """The reader's config and weights, run by transformers."""
    checkpoint = open_checkpoint(str(real_models.smollm2()))
    config = checkpoint.config
    assert (config.width, config.n_layers, config.context, config.head.tied) == (576, 30, 8192, True)
    assert (config.attention.n_heads, config.attention.n_kv_heads, config.attention.head_dim) == (9, 3, 64)
    assert config.attention.rotary.theta == 100000.0
    assert checkpoint.generation.eos_token_ids == (2, 0)
    model = as_transformers_model(checkpoint)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    answer = answer[0, ids.shape[1] :].tolist()
    assert answer.pop() == 2
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("fetch", "prompt", "text"),
    [
        (
            real_models.glassllm,
            "Alice was beginning",
            "Alice was beginning to the\nQueen to the Queen, and she found it was saying to herself",
        ),
        (
            real_models.stories15m,
            "Once upon a time",
            "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine.",
        ),
    ],
)
def test_models_of_other_formats_are_written_as_folders_that_tell_their_story(fetch, prompt, text):
    checkpoint = open_checkpoint(str(fetch()))
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    model = as_transformers_model(checkpoint)
    ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
    assert tokenizer.decode(ids[0].tolist()).startswith(text)


def as_transformers_model(checkpoint) -> LlamaForCausalLM:
    """transformers' Llama with the tensors of a checkpoint, taken apart again."""
    config, width = checkpoint.config, checkpoint.config.attention
    state = {}
    for name, lazy in checkpoint.tensors.items():
        tensor, (layer, _, part) = read_finite(lazy, torch.float32), split_name(name)
        at = f"model.layers.{layer}."
        if part == "attention.qkv.weight":
            q, k, v = tensor.split([width.q_size, width.kv_size, width.kv_size])
            state |= {f"{at}self_attn.{x}_proj.weight": y for x, y in (("q", q), ("k", k), ("v", v))}
        elif part == "mlp.up.weight":
            gate, up = tensor.split(config.mlp.hidden)
            state |= {f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up}
        else:
            others = {
                "embed.weight": "model.embed_tokens.weight",
                "norm.weight": "model.norm.weight",
                "attention_norm.weight": at + "input_layernorm.weight",
                "attention.out.weight": at + "self_attn.o_proj.weight",
                "mlp_norm.weight": at + "post_attention_layernorm.weight",
                "mlp.down.weight": at + "mlp.down_proj.weight",
            }
            state[others[part]] = tensor
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(AutoConfig.for_model(**checkpoint.huggingface_config))
    model.load_state_dict(state)
    return model.eval()


def split_name(name: str) -> tuple[str, str, str]:
    return (
        tuple(name.removeprefix("blocks.").partition(".")) if name.startswith("blocks.") else ("", "", name)
    )
