"""Exports against transformers' own models: the other side of the parity, which shares no line with us.

The rule is the gate's: as close to transformers in float64 as transformers in float32 is, times 4.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import real_models
import torch
from tiny_checkpoints import save_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

import tfmx
from tfmx.export.options import ExportOptions
from tfmx.export.parity import FACTOR
from tfmx.export.pipeline import export
from tfmx.runtime import Model
from tfmx.runtime.engine import open_engine

TARGETS = ("ort", "portable")
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama, tied, biases, gelu": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "llama, linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama, llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama, yarn": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
}


def check_against(model: PreTrainedModel, bundle: Path, prompt: list[int], n_greedy: int = 64) -> None:
    """All logits of a text by the rule, then greedy tokens one by one."""
    assert model.dtype == torch.float32
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        greedy = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=n_greedy,
            min_new_tokens=n_greedy,
            do_sample=False,
            pad_token_id=0,
        )[0].tolist()
        ids = torch.tensor([greedy])
        plain = model(ids).logits[0].double()
        exact = model.double()(ids).logits[0]
    with tfmx.load(bundle) as ours:
        logits = torch.from_numpy(ours.logits(greedy)).double()
        budget = FACTOR * (plain - exact).abs().max()
        assert (logits - exact).abs().max() <= budget
        assert greedy_tokens(ours, prompt, n_greedy) == greedy[len(prompt) :]


def greedy_tokens(model: Model, prompt: list[int], count: int) -> list[int]:
    """Past the end token too, where `generate` would stop."""
    engine = open_engine(model._open_graphs(), 1, len(prompt) + count)
    tokens = [int(engine.prefill([prompt]).greedy()[0][0])]
    while len(tokens) < count:
        tokens.append(int(engine.decode(tokens[-1:]).greedy()[0][0]))
    return tokens


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_family_agrees_with_transformers(name: str, target: str, tmp_path: Path) -> None:
    family, overrides = FAMILIES[name]
    model = save_tiny(tmp_path / "model", family, **overrides)
    parity = export(str(tmp_path / "model"), tmp_path / "bundle", ExportOptions(target=target))
    assert parity is not None
    assert parity.passed
    check_against(model, tmp_path / "bundle", [5, 17, 3, 80, 41, 9, 2, 33, 60])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_agree_with_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny(tmp_path / "whole", "llama").to(dtype).save_pretrained(tmp_path / "model")
    export(str(tmp_path / "model"), tmp_path / "bundle", ExportOptions())
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )  # .to() rounds its rotary
    check_against(model, tmp_path / "bundle", [5, 17, 3, 80])


def test_dynamic_scaling_agrees_with_transformers_past_the_original_context(tmp_path: Path) -> None:
    overrides = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}
    model = save_tiny(tmp_path / "model", "llama", **overrides)
    options = ExportOptions(target="portable", max_context=96)
    parity = export(str(tmp_path / "model"), tmp_path / "bundle", options)
    assert parity is not None
    ids = np.random.default_rng(0).integers(0, 96, 80).tolist()
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0].double()
        exact = model.double()(torch.tensor([ids])).logits[0]
    with tfmx.load(tmp_path / "bundle") as ours:
        error = (torch.from_numpy(ours.logits(ids)).double() - exact).abs().max()
    # transformers keeps its frequencies in float32 even in its float64 model
    assert error <= FACTOR * max((plain - exact).abs().max(), torch.tensor(1e-5))


REAL: dict[str, tuple[Callable[[], Path], str]] = {
    "stories15M": (real_models.stories15m, "Once upon a time"),
    "glassllm": (real_models.glassllm, "Alice was beginning"),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", list(REAL))
def test_a_real_model_agrees_with_transformers(name: str, target: str, tmp_path: Path) -> None:
    fetch, prompt = REAL[name]
    folder = fetch()
    parity = export(str(folder), tmp_path / "bundle", ExportOptions(target=target))
    assert parity is not None
    with tfmx.load(tmp_path / "bundle") as model:
        ids = model.encode(prompt)
    check_against(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "bundle", ids)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_smollm2_agrees_with_transformers(target: str, tmp_path: Path) -> None:
    gguf = real_models.smollm2()
    options = ExportOptions(target=target, max_context=512)  # the whole context is checked by `make demo`
    export(str(gguf), tmp_path / "bundle", options)
    with tfmx.load(tmp_path / "bundle") as model:
        ids = model.chat_ids([{"role": "user", "content": "What is the capital of France?"}])
        answer = "".join(
            step.text for step in model.chat([{"role": "user", "content": "What is the capital of France?"}])
        )
    assert answer == "The capital of France is Paris."
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    check_against(theirs, tmp_path / "bundle", ids)
