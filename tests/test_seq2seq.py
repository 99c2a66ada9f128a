"""Generation by an encoder-decoder: encode once, carry the cross keys and values, drop them with their rows."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_kinds import (
    CONTEXT,
    END,
    LENGTH,
    START,
    TARGETS,
    kind_weights,
    pair_greedy,
    pair_outputs,
    write_encoder_decoder,
)

import tfmx
from tfmx import InputError
from tfmx.runtime.bundle import Bundle
from tfmx.runtime.devices import Device
from tfmx.runtime.encoder import encode
from tfmx.runtime.engine import ContextFullError, Graphs, open_engine
from tfmx.runtime.sampling import SamplingOptions
from tfmx.runtime.session import Session

W = kind_weights()
SOURCES = [[5, 9, 17, 3, 22], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [40, 41]]
CPU = Device("cpu", "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seq2seq") / "bundle"
    write_encoder_decoder(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return tfmx.load(folder, threads=1)


@pytest.fixture(scope="module", params=["lean", "separate"])
def graphs(request, folder):
    return Graphs(Bundle.open(folder), CPU, threads=1, lean=request.param == "lean")


def start(graphs, sources):
    rows = [np.asarray(source) for source in sources]
    return open_engine(graphs, len(rows), 8, encode(graphs, rows, graphs.manifest.fixed_outputs))


def check(found, sources, targets):
    for row, source, target in zip(found.numpy(), sources, targets, strict=True):
        assert np.abs(row - pair_outputs(W, source, target)["logits"][-1]).max() < 5e-5


@pytest.mark.parametrize("source", SOURCES)
def test_greedy_tokens_are_the_reference(model, source):
    tokens = [step.token_id for step in model.generate(source, max_new_tokens=12)]
    assert tokens == pair_greedy(W, source, 12)


def test_a_ragged_batch_gives_each_source_its_own_answer(model):
    results = model.generate_batch(SOURCES, max_new_tokens=12)
    assert [list(result.token_ids) for result in results] == [pair_greedy(W, s, 12) for s in SOURCES]
    assert [list(result.prompt_ids) for result in results] == SOURCES
    assert results[0].statistics.prompt_tokens == sum(map(len, SOURCES)) + len(SOURCES)


def test_rows_that_end_early_are_dropped_with_their_cross_keys(model):
    """Answers of different lengths, so that `keep` cuts the fixed states while others go on."""
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, 260, n).tolist() for n in (3, 24, 6, 1, 12, 9, 2, 17)]
    results = model.generate_batch(sources, max_new_tokens=12)
    lengths = {len(result.token_ids) for result in results}
    assert len(lengths) > 2
    assert [list(result.token_ids) for result in results] == [pair_greedy(W, s, 12) for s in sources]


def test_the_engine_gives_the_reference_logits_at_every_step(graphs):
    engine, targets = start(graphs, SOURCES), [[] for _ in SOURCES]
    check(engine.prefill([[START]] * 4), SOURCES, targets)
    for step in range(4):
        tokens = [(7 * step + 3 * row) % TARGETS for row in range(4)]
        targets = [[*target, token] for target, token in zip(targets, tokens, strict=True)]
        check(engine.decode(tokens), SOURCES, targets)


def test_kept_rows_keep_their_sources(graphs):
    engine = start(graphs, SOURCES)
    engine.prefill([[START], [START, 4], [START, 5, 6], [START]])
    engine.keep([1, 3])  # the longest source goes, and its columns
    assert engine._source_mask.shape == (2, 2)
    assert [value.shape() for value, _ in engine._past[2:]] == [[2, 2, 2, 4]] * 2
    check(engine.decode([8, 9]), [SOURCES[1], SOURCES[3]], [[4, 8], [9]])
    engine.keep([0])
    check(engine.decode([10]), [SOURCES[1]], [[4, 8, 10]])


def test_trimming_forgets_the_answer_and_not_the_source(graphs):
    engine = start(graphs, SOURCES[:2])
    engine.prefill([[START, 4, 5], [START, 6, 7]])
    engine.trim(1)
    check(engine.decode([8, 9]), SOURCES[:2], [[8], [9]])


def test_a_failed_step_leaves_the_state_as_it_was(graphs):
    engine = start(graphs, SOURCES[:2])
    engine.prefill([[START], [START]])
    with pytest.raises(Exception, match="indices element out of data bounds"):
        engine.decode([TARGETS + 1, 3])
    check(engine.decode([8, 9]), SOURCES[:2], [[8], [9]])


def test_the_source_is_encoded_once(model, monkeypatch):
    runs, original = [], Session.run_values

    def count(self, *args, **options):
        runs.append(self.info.file)
        return original(self, *args, **options)

    monkeypatch.setattr(Session, "run_values", count)
    steps = list(model.generate(SOURCES[0], SamplingOptions(ignore_eos=True), max_new_tokens=6))
    assert len(steps) == 6
    assert runs.count("encode.onnx") == 1
    assert runs[1:] == ["prefill.onnx"] * 6  # one sequence decodes with the prefill graph


def test_one_session_decodes_single_sources_and_batches(folder):
    model = tfmx.load(folder, threads=1)
    list(model.generate(SOURCES[0], max_new_tokens=3))
    assert set(model._graphs._sessions) == {"encode", "prefill"}
    model.generate_batch(SOURCES, max_new_tokens=3)
    assert set(model._graphs._sessions) == {"encode", "prefill"}


def test_an_answer_ends_with_the_context(model):
    steps = list(model.generate(SOURCES[0], SamplingOptions(ignore_eos=True)))
    assert len(steps) == CONTEXT  # the start token has a position, the last token needs none
    assert steps[-1].finish_reason == "length"


def test_the_end_token_stops_an_answer(model):
    stopped, cut = model.generate_batch([[7], [5, 9, 17, 3, 22]], max_new_tokens=9)
    assert (stopped.token_ids[-1], stopped.finish_reason, cut.finish_reason) == (END, "stop", "length")


def test_the_decoder_refuses_more_than_its_context(graphs):
    engine = start(graphs, SOURCES[:1])
    with pytest.raises(ContextFullError, match="21 tokens do not fit the context of 20"):
        engine.prefill([[START] * (CONTEXT + 1)])


def test_a_source_text_is_encoded(model):
    ids = model.encode("Hi you")
    (result,) = model.generate_batch(["Hi you"], max_new_tokens=5)
    assert result.prompt_ids == tuple(ids)
    assert list(result.token_ids) == pair_greedy(W, ids, 5)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ([], "^the prompt is empty$"),
        ([260], "^token 260 at place 0 of the prompt is outside the vocabulary of 260$"),
        ([5] * (LENGTH + 1), "^the prompt has 25 tokens, the context holds 24; shorten it$"),
    ],
)
def test_a_source_that_cannot_be_used_is_one_clear_line(model, source, line):
    with pytest.raises(InputError, match=line):
        model.generate(source)


def test_a_source_may_be_longer_than_the_decoders_context(model):
    source = list(range(3, 3 + LENGTH))  # 24, the decoder holds 20
    tokens = [step.token_id for step in model.generate(source, max_new_tokens=3)]
    assert tokens == pair_greedy(W, source, 3)


def test_options_are_checked_against_the_tokens_it_gives(model):
    with pytest.raises(InputError, match="outside the vocabulary of 40"):
        model.generate([200], SamplingOptions(stop_token_ids=(TARGETS,)))


def test_logits_are_had_by_applying_it(model):
    with pytest.raises(
        InputError, match=r"^this bundle is an encoder-decoder; apply\(source, target=\.\.\.\) gives"
    ):
        model.logits([1, 2])


def test_sampling_gives_the_same_again_with_its_seed(model):
    options = SamplingOptions(temperature=1.0, seed=7, ignore_eos=True, max_new_tokens=8)
    alone = [list(model.generate_batch([source], options)[0].token_ids) for source in SOURCES]
    together = [list(result.token_ids) for result in model.generate_batch(SOURCES, options)]
    assert alone == together
