"""Where the context ends: the last token is chosen but never run, so an answer may have one more than there are positions left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import tiny_bundle
import torch
from family_bundles import FAMILY, random_model
from tiny_bundle import CONTEXT, reference_greedy, tiny_weights, write_bundle
from tiny_checkpoints import save_tiny

import tfmx
from tfmx.export.pipeline import ExportOptions, export, export_model
from tfmx.export.source import checkpoint_source
from tfmx.runtime.draft_length import DraftLength
from tfmx.runtime.sampling import SamplingOptions
from tfmx.runtime.speculation import Speculation
from tfmx.tfm_model.presets import preset_generation
from tfmx.tfm_model.tfmx_folder import model_checkpoint
from tfmx.tfm_model.transformer import Transformer

FREE = SamplingOptions(ignore_eos=True)
PROMPT = [5, 17, 3, 80, 2, 41]


@pytest.mark.parametrize("target", ["ort", "portable"])
def test_a_context_of_11_and_a_prompt_of_6_give_6_tokens_as_transformers_does(target, tmp_path: Path):
    theirs = save_tiny(tmp_path / "model", "llama", max_position_embeddings=11)
    theirs.generation_config.eos_token_id = None
    export(str(tmp_path / "model"), tmp_path / "bundle", ExportOptions(target=target, verify=False))
    with torch.no_grad():
        wanted = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    with tfmx.load(tmp_path / "bundle", threads=1) as ours:
        for asked in (6, 7, None):
            steps = list(ours.generate(PROMPT, FREE, max_new_tokens=asked))
            assert [step.token_id for step in steps] == wanted[0, 6:].tolist()
            assert steps[-1].finish_reason == "length"
        rows = ours.generate_batch([PROMPT, PROMPT[:2], [7] * 11], FREE, max_new_tokens=8)
        assert [len(row.token_ids) for row in rows] == [6, 8, 1]
        assert list(rows[0].token_ids) == wanted[0, 6:].tolist()


@pytest.mark.parametrize("preset", ["lstm", "random-features", "pre-norm"])
def test_recurrent_states_and_learned_positions_give_as_many(preset: str, tmp_path: Path):
    """No table has a row for the position after the context's last."""
    config = replace(FAMILY[preset], context=11)
    model = random_model(config, torch.float32)
    checkpoint = model_checkpoint(model, "preset", (), preset_generation(config), None)
    source = checkpoint_source(checkpoint, ir.DataType.FLOAT, None, ())
    export_model(source, tmp_path / "bundle", ExportOptions(target="portable", verify=False))
    with tfmx.load(tmp_path / "bundle", threads=1) as ours:
        steps = list(ours.generate(PROMPT, FREE))
    assert [step.token_id for step in steps] == greedy(model, PROMPT, 6)


def greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Without a state: the whole sequence at each step, as long as the context at the last."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model.apply_to(torch.tensor([ids])).main[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_a_chat_that_fills_its_context_ends_there_and_the_next_turn_is_refused(flavour, tmp_path: Path):
    write_bundle(tmp_path / "b", flavour)
    with tfmx.load(tmp_path / "b", threads=1) as model:
        messages = [{"role": "user", "content": "Hi"}]
        prompt = model.chat_ids(messages)
        steps = list(model.chat(messages, FREE))
        left = CONTEXT - len(prompt) + 1
        assert [step.token_id for step in steps] == reference_greedy(tiny_weights(), prompt, left)
        assert steps[-1].finish_reason == "length"
        messages += [{"role": "assistant", "content": "x" * left}, {"role": "user", "content": "Go on"}]
        with pytest.raises(
            tfmx.InputError, match=r"^the conversation has \d+ tokens, the context holds 96; shorten it$"
        ):
            model.chat(messages)
        again = list(model.chat(messages[:1], FREE))  # from the cache, full as it is
        assert [step.token_id for step in again] == [step.token_id for step in steps]
        assert again[0].statistics.cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_a_draft_model_guesses_to_the_very_end_of_its_context(flavour, tmp_path: Path, monkeypatch):
    """A draft model of a shorter context, otherwise the model itself: each guess that it can make is right."""
    write_bundle(tmp_path / "model", flavour)
    with monkeypatch.context() as patched:
        patched.setattr(tiny_bundle, "CONTEXT", 11)
        write_bundle(tmp_path / "draft", flavour)
    monkeypatch.setattr(DraftLength, "choose", lambda _self, trust, room: min(room, 5) if trust else 0)
    with tfmx.load(tmp_path / "model", threads=1) as model, tfmx.load(tmp_path / "draft", threads=1) as draft:
        plain = [step.token_id for step in model.generate(PROMPT, FREE, max_new_tokens=20)]
        model.speculate(Speculation(draft=draft))
        steps = list(model.generate(PROMPT, FREE, max_new_tokens=20))
        assert [step.token_id for step in steps] == plain
        found = steps[-1].statistics
        # the first new token is the model's; the draft's context holds it and four guesses, and after them comes a fifth
        assert (found.drafted_tokens, found.accepted_tokens) == (5, 5)
        whole = list(model.generate([5] * CONTEXT, FREE))
        assert len(whole) == 1
