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
from tiny_checkpoints import save_tiny, tiny_model

from tfmx.tfm_model.checkpoint import CheckpointError, LazyTensor, read_finite
from tfmx.tfm_model.huggingface import read_huggingface
from tfmx.tfm_model.source import is_python_source, open_checkpoint

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
    assert checkpoint.config.head.tied is ("head.weight" not in read)
    if not checkpoint.config.head.tied:
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
