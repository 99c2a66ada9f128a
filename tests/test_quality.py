"""Quality on text: figures against a naive computation, error bars against many repetitions, planted faults, refusals."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import checkpoint, copied, exported, reseal, tfmx, without
from tiny_bundle import BOS, VOCAB, tiny_tokenizer
from tiny_checkpoints import tiny_model

from tfmx import InputError
from tfmx.export import quality
from tfmx.export.pipeline import ExportOptions, export
from tfmx.export.quality import (
    MeasureError,
    Quality,
    Scores,
    batch_means,
    bootstrap,
    quality_against,
    record_quality,
)
from tfmx.export.quality_windows import LEAST_TOKENS, TEXT, Windows, read_text, text_windows
from tfmx.runtime import load
from tfmx.runtime.bundle import Bundle
from tfmx.runtime.capacity_engine import CapacityEngine
from tfmx.tfm_model.config import TokenInputs
from tfmx.tfm_model.presets import PRESETS
from tfmx.tfm_model.tfmx_folder import save_model
from tfmx.tfm_model.transformer import Transformer

SHORT = read_text(None)[:4000]  # 4,000 tokens of the tiny bundle, a byte each


def measured(folder: Path, text: str = SHORT) -> Quality:
    found = Bundle.open(folder)
    return quality_against(found, str(checkpoint()), text_windows(found, text))


@functools.cache
def own_quality() -> Quality:
    """Of a bundle against what it was exported from."""
    return measured(exported()[0])


def spoil(folder: Path) -> None:
    """One matrix of the second block a little off."""
    weights = np.fromfile(folder / "weights.bin", np.float32)
    weights[len(weights) // 2 : len(weights) // 2 + 500] += 0.05
    weights.tofile(folder / "weights.bin")
    reseal(folder)


# --- the text and its windows ----------------------------------------------------------------------------


def test_the_text_that_ships_is_plain_and_in_the_public_domain():
    content = TEXT.read_bytes()
    assert content.isascii()
    assert 110_000 < len(content) < 160_000  # 20,440 tokens of five characters each, and some
    text = content.decode().lower()
    assert [word for word in ("gutenberg", "copyright", "(c)", "edition") if word in text] == []
    assert "alice was beginning" in text
    assert "as i remember, adam" in text


def test_the_text_gives_twenty_thousand_tokens_all_over_it():
    found = Bundle.open(exported()[0])
    text = read_text(None)
    windows = text_windows(found, text)
    N, W = windows.token_ids.shape
    assert W == found.manifest.max_context == 128
    assert windows.scored == N * (W - 1) >= 20_000
    assert windows.text_sha256 == hashlib.sha256(TEXT.read_bytes()).hexdigest()
    assert (windows.token_ids[:, 0] == BOS).all()  # as the tokenizer begins every text
    ids = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    assert windows.text_tokens == len(ids)
    assert windows.token_ids[0, 1:].tolist() == ids[: W - 1]
    assert windows.token_ids[-1, 1:].tolist() == ids[-(W - 1) :]
    assert len({tuple(row) for row in windows.token_ids.tolist()}) == N


def test_a_short_text_still_has_enough_windows_for_error_bars():
    windows = text_windows(Bundle.open(exported()[0]), SHORT[:LEAST_TOKENS])
    assert len(windows.token_ids) == 16


def test_a_text_that_is_too_short_is_refused():
    text = SHORT[: LEAST_TOKENS - 1]
    with pytest.raises(InputError, match=r"has 2,047 tokens, wanted at least 2,048 .* give a longer one"):
        text_windows(Bundle.open(exported()[0]), text)


def test_a_bundle_without_a_tokenizer_is_refused():
    with copied(exported()[0]) as folder:
        without(folder, "tokenizer.json")
        with pytest.raises(InputError, match="has no tokenizer"):
            text_windows(Bundle.open(folder), SHORT)


@pytest.mark.parametrize("name", ["encoder", "encoder-decoder", "last-element"])
def test_what_does_not_predict_every_token_is_refused(name, tmp_path):
    export(f"preset:{name}", tmp_path / "bundle", ExportOptions(verify=False))
    done = tfmx("verify", tmp_path / "bundle", "--against", f"preset:{name}", "--quality")
    done.fails(2, "decoders that predict the next token at every position", "this bundle")


@pytest.mark.parametrize(
    ("content", "part"), [(b"caf\xe9 " * 1000, "is not UTF-8 text (byte 3)"), (b"", "has 0 tokens")]
)
def test_a_file_that_is_no_use_is_refused(content, part, tmp_path):
    (tmp_path / "text.txt").write_bytes(content)
    done = tfmx("verify", exported()[0], "--against", checkpoint(), "--quality", tmp_path / "text.txt")
    done.fails(2, part)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    done = tfmx("verify", exported()[0], "--against", checkpoint(), "--quality", tmp_path / "none.txt")
    done.fails(2, "none.txt cannot be read: No such file")


def test_quality_needs_a_source():
    tfmx("verify", exported()[0], "--quality").fails(2, "--quality compares with the source", "--against")


def test_a_bundle_that_was_taken_for_the_text_is_said():
    tfmx("verify", "--against", checkpoint(), "--quality", exported()[0]).fails(2, "put BUNDLE first")
    tfmx("verify").fails(2, "Missing argument 'BUNDLE'")


def test_a_bundle_that_cannot_be_written_is_said_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    done = tfmx("verify", exported()[0], "--against", checkpoint(), "--quality")
    done.fails(2, "cannot be written to")


def test_another_vocabulary_is_refused(tmp_path):
    other = tmp_path / "other"
    tiny_model("llama", vocab_size=VOCAB + 16).save_pretrained(other)
    found = Bundle.open(exported()[0])
    with pytest.raises(InputError, match=r"a decoder of 320 tokens, .* of 336; give the source"):
        quality_against(found, str(other), text_windows(found, SHORT))


# --- the figures -----------------------------------------------------------------------------------------


def naive_log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.slow
def test_the_figures_are_those_of_a_naive_computation():
    theirs = tiny_model("llama", vocab_size=VOCAB, bos_token_id=256, eos_token_id=257)  # as in checkpoint()
    with copied(exported()[0]) as folder:
        spoil(folder)
        found = measured(folder)
        kl, agrees, loss, own_loss = [], [], [], []
        with load(folder) as model:
            for row in found.windows.token_ids.tolist():
                with torch.no_grad():
                    wanted = theirs(torch.tensor([row])).logits[0].numpy()
                for place, (p, q) in enumerate(zip(wanted, model.logits(row), strict=True)):
                    if place + 1 < len(row):
                        log_p, log_q = naive_log_softmax(p), naive_log_softmax(q)
                        kl.append(float((np.exp(log_p) * (log_p - log_q)).sum()))
                        agrees.append(p.argmax() == q.argmax())
                        loss.append(-log_p[row[place + 1]])
                        own_loss.append(-log_q[row[place + 1]])
    assert found.windows.scored == len(kl)
    certificate = found.certificate()
    wanted = {
        "kl_mean": np.mean(kl),
        "kl_99": np.quantile(kl, 0.99),
        "top_1": np.mean(agrees),
        "perplexity_source": np.exp(np.mean(loss)),
        "perplexity_bundle": np.exp(np.mean(own_loss)),
        "perplexity_ratio": np.exp(np.mean(own_loss) - np.mean(loss)),
    }
    assert {name: certificate[name]["value"] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert certificate["kl_max"] == pytest.approx(max(kl), rel=1e-4)
    assert 0 < wanted["top_1"] < 1  # the fault is one that can be seen in every figure


def test_a_bundle_is_what_it_was_exported_from():
    figures = own_quality().estimates()
    assert 0 <= figures["kl_mean"].value < 1e-9
    assert figures["kl_decode"].value < 1e-9
    assert figures["top_1"].value == 1
    assert figures["perplexity_ratio"].value == pytest.approx(1, abs=1e-5)
    assert figures["perplexity_source"].value > 2


def test_a_wrong_weight_is_seen():
    with copied(exported()[0]) as folder:
        spoil(folder)
        wrong = measured(folder).estimates()
    good = own_quality().estimates()
    assert wrong["kl_mean"].value > 1e4 * good["kl_mean"].value
    assert wrong["kl_mean"].value > 10 * wrong["kl_mean"].error
    assert wrong["top_1"].value < 1


def test_a_fault_of_decode_steps_alone_is_seen(monkeypatch):
    decode = CapacityEngine.decode
    monkeypatch.setattr(CapacityEngine, "decode", lambda self, tokens: decode(self, [tokens[0] ^ 1]))
    found = measured(exported()[0]).estimates()
    assert found["kl_mean"].value < 1e-9
    assert found["kl_decode"].value > 1e-3
    gap = found["kl_decode_minus_prefill"]
    assert gap.value == pytest.approx(found["kl_decode"].value)
    assert gap.value > 4 * gap.error


def test_logits_that_are_not_finite_are_an_error():
    with copied(exported()[0]) as folder:
        weights = np.fromfile(folder / "weights.bin", np.float32)
        weights[len(weights) // 2] = np.inf
        weights.tofile(folder / "weights.bin")
        reseal(folder)
        with pytest.raises(MeasureError, match="the bundle's logits give no finite figure"):
            measured(folder)


@pytest.mark.slow
def test_a_model_that_is_run_whole_is_measured_too(tmp_path):
    torch.manual_seed(0)
    config = dataclasses.replace(PRESETS["lstm"], inputs=TokenInputs(vocab_size=VOCAB))
    save_model(Transformer(config), tmp_path / "source", tokenizer_json=tiny_tokenizer().to_str())
    export(str(tmp_path / "source"), tmp_path / "bundle", ExportOptions(verify=False))
    found = Bundle.open(tmp_path / "bundle")
    figures = quality_against(found, str(tmp_path / "source"), text_windows(found, SHORT)).estimates()
    assert 0 <= figures["kl_mean"].value < 1e-9
    assert figures["kl_decode"].value < 1e-9
    assert figures["perplexity_source"].value > 2


# --- error bars ------------------------------------------------------------------------------------------


def correlated_scores(draw: np.random.Generator, N: int = 32, T: int = 48) -> Scores:
    """Figures whose neighbours are alike within a window, as those of text are: an AR(1) process of memory 0.8."""
    walk = np.empty((3, N, T))
    walk[..., 0] = draw.standard_normal((3, N))
    for place in range(1, T):
        walk[..., place] = 0.8 * walk[..., place - 1] + 0.6 * draw.standard_normal((3, N))
    kl, agrees, loss = np.exp(walk[0]), (walk[1] > -1).astype(float), 3 + walk[2]
    return Scores(kl, agrees, loss, loss + 0.1 * walk[0])


def test_error_bars_are_how_much_figures_differ_from_text_to_text(monkeypatch):
    monkeypatch.setattr(quality, "RESAMPLES", 100)
    draw = np.random.default_rng(1)
    repeats = [correlated_scores(draw) for _ in range(120)]
    found = [bootstrap(scores, seed) for seed, scores in enumerate(repeats)]
    for name in found[0]:
        true = np.std([figures[name].value for figures in found], ddof=1)
        told = np.mean([figures[name].error for figures in found])
        assert told == pytest.approx(true, rel=0.25), name
    # tokens are not independent: who takes them for it is told less than half of the error
    naive = np.mean([scores.kl.std() / np.sqrt(scores.kl.size) for scores in repeats])
    assert naive < 0.5 * np.mean([figures["kl_mean"].error for figures in found])


def test_the_error_of_one_window_is_how_much_it_differs():
    draw = np.random.default_rng(2)
    windows = correlated_scores(draw, N=400, T=400).kl
    found = [batch_means(row) for row in windows]
    true = np.std([estimate.value for estimate in found])
    assert np.mean([estimate.error for estimate in found]) == pytest.approx(true, rel=0.25)


def test_error_bars_are_the_same_each_time():
    scores = correlated_scores(np.random.default_rng(3), N=16, T=8)
    assert bootstrap(scores) == bootstrap(scores)


# --- the certificate -------------------------------------------------------------------------------------


def test_the_figures_are_recorded_in_the_bundle():
    with copied(exported()[0]) as folder:
        found = Bundle.open(folder)
        record_quality(found, own_quality())
        again = Bundle.open(folder)
        assert again.manifest.quality == json.loads(json.dumps(own_quality().certificate()))
        assert dataclasses.replace(again.manifest, quality=None) == found.manifest
        assert [path.name for path in folder.parent.iterdir()] == ["bundle"]  # nothing is left beside it
        assert tfmx("verify", folder).code == 0
    certificate = own_quality().certificate()
    assert certificate["text_sha256"] == hashlib.sha256(SHORT.encode()).hexdigest()
    assert (certificate["tokens"], certificate["window"]) == (own_quality().windows.scored, 128)
    assert set(certificate["source"]) >= {"config.json", "model.safetensors"}


def test_figures_are_not_recorded_in_a_bundle_that_was_replaced_meanwhile():
    with copied(exported()[0]) as folder:
        found = Bundle.open(folder)
        record_quality(found, own_quality())
        before = (folder / "manifest.json").read_bytes()
        with pytest.raises(MeasureError, match="was replaced while it was measured; nothing was recorded"):
            record_quality(found, own_quality())
        assert (folder / "manifest.json").read_bytes() == before


@pytest.mark.slow
def test_verify_prints_a_table_and_says_where_it_recorded_it(tmp_path):
    (tmp_path / "text.txt").write_text(SHORT)
    with copied(exported()[0]) as folder:
        done = tfmx("verify", folder, "--against", checkpoint(), "--quality", tmp_path / "text.txt")
        assert done.code == 0, done
        assert done.notes == f"recorded in {folder / 'manifest.json'}\n"
        assert Bundle.open(folder).manifest.quality is not None
    table = done.out[done.out.index("verified:") :].splitlines()[1:]
    assert "onnxruntime" in table[0]
    assert "in 31 windows of 128" in table[0]
    assert any(line.split()[:4] == ["top-1", "agreement", "100.00%", "0.00%"] for line in table)
    assert [line.split("  ")[1] for line in table[2:5]] == [
        "KL divergence, mean",
        "KL divergence, 99 %",
        "top-1 agreement",
    ]


@pytest.mark.slow
def test_a_bundle_that_fails_the_gate_is_not_measured():
    with copied(exported()[0]) as folder:
        spoil(folder)
        before = (folder / "manifest.json").read_bytes()
        done = tfmx("verify", folder, "--against", checkpoint(), "--quality")
        assert done.code == 1
        assert "KL" not in done.out
        assert (folder / "manifest.json").read_bytes() == before


def test_windows_count_what_is_predicted():
    assert Windows(np.zeros((3, 10), np.int64), "", 30).scored == 27
