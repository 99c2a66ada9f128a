"""Token ids and sampling options: those that transformers would use, or refused."""

from __future__ import annotations

import json

import pytest
from tiny_checkpoints import change_config, save_tiny

from tfmx.tfm_model.checkpoint import CheckpointError
from tfmx.tfm_model.huggingface import read_huggingface


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
