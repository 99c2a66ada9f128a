"""Speculation: the tokens of plain decoding, whatever is guessed; drafts only where they pay; clear refusals."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_bundle
import tiny_kinds
from command_line import bundle as cli_bundle
from command_line import tfmx as run_tfmx
from tiny_bundle import CONTEXT, EOS, VOCAB, tiny_tokenizer, tiny_weights, write_bundle
from tiny_kinds import START, TARGETS, write_encoder_decoder, write_token_classifier

import tfmx
from tfmx import InputError
from tfmx.runtime import generate, speculation
from tfmx.runtime import model as model_module
from tfmx.runtime.device_choice import open_chooser
from tfmx.runtime.devices import Device
from tfmx.runtime.draft_length import DraftLength
from tfmx.runtime.drafters import DraftModel, PromptLookup
from tfmx.runtime.sampling import Choice, SamplingOptions
from tfmx.runtime.speculation import Speculation, SpeculationError, SpeculativeEngine

FREE = SamplingOptions(ignore_eos=True)
REPEATED = [5, 9, 17, 3, 22, 8, 5, 9, 17, 3, 22, 8, 5, 9]


@pytest.fixture(scope="module", params=["append", "capacity"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculation") / request.param
    write_bundle(folder, request.param)
    with tfmx.load(folder, threads=1) as loaded:
        yield loaded


@pytest.fixture
def always(monkeypatch):
    """Draft wherever there is a guess, as many tokens as the returned list says, one after the other."""
    lengths = [4]
    turns = itertools.count()

    def choose(_self, trust, room):
        return max(0, min(room, lengths[next(turns) % len(lengths)])) if trust else 0

    monkeypatch.setattr(DraftLength, "choose", choose)
    return lengths


class Oracle:
    """Guesses a text that is known beforehand, wrong at every so manieth place."""

    is_free = False

    def __init__(self, text, wrong_each=0):
        self.text, self.place, self.wrong_each = list(text), 0, wrong_each

    def read(self, tokens):
        self.place += len(tokens)

    def trust(self):
        return 8 if self.place < len(self.text) else 0

    def draft(self, count):
        places = range(self.place, min(self.place + count, len(self.text)))
        wrong = self.wrong_each
        return [abs(self.text[i] - 1) if wrong and i % wrong == 0 else self.text[i] for i in places]


def guess_with(monkeypatch, drafter):
    monkeypatch.setattr(model_module, "open_drafter", lambda *_: drafter)


def both(model, prompt, options, **more):
    """The steps without and with speculation."""
    plain = list(model.generate(prompt, options, **more))
    model.speculate(Speculation())
    try:
        return plain, list(model.generate(prompt, options, **more))
    finally:
        model.speculate(None)


def ids_of(steps):
    return [step.token_id for step in steps]


def assert_same(plain, found):
    """All that a step says, but for its statistics."""
    assert ids_of(found) == ids_of(plain)
    for one, other in zip(plain, found, strict=True):
        assert (other.text, other.finish_reason) == (one.text, one.finish_reason)
        if one.logprob is None:
            assert other.logprob is None
        else:
            assert other.logprob.logprob == pytest.approx(one.logprob.logprob, abs=1e-5)
            assert [entry.token_id for entry in other.top_logprobs] == [
                entry.token_id for entry in one.top_logprobs
            ]


# --- greedy ----------------------------------------------------------------------------------------------


def prompts(count=24):
    rng = np.random.default_rng(3)
    for number in range(count):
        part = rng.integers(0, 250, rng.integers(1, 9)).tolist()
        yield part * (1 + number % 4)


@pytest.mark.parametrize("length", [1, 3, 16])
def test_greedy_gives_the_tokens_of_plain_decoding(model, always, length):
    always[:] = [length]
    drafted = accepted = 0
    for prompt in prompts():
        plain, found = both(model, prompt, FREE, max_new_tokens=40)
        assert_same(plain, found)
        statistics = found[-1].statistics
        drafted, accepted = drafted + statistics.drafted_tokens, accepted + statistics.accepted_tokens
        assert statistics.new_tokens == 40
    assert 0 < accepted < drafted  # right and wrong guesses were met
    assert plain[-1].statistics.drafted_tokens == 0


def test_greedy_is_the_same_where_drafts_are_chosen_by_their_speed(model):
    for prompt in prompts(12):
        plain, found = both(model, prompt, FREE, max_new_tokens=60)
        assert_same(plain, found)


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.8, "frequency_penalty": 0.3},
        {"logit_bias": {7: 5.0, 9: -np.inf}},
        {"logprobs": 3},
        {"logprobs": 0, "frequency_penalty": -0.5},
    ],
)
def test_options_of_greedy_are_heeded(model, always, more):
    always[:] = [5, 1, 2]
    for prompt in ([5, 9, 17], REPEATED):
        assert_same(*both(model, prompt, SamplingOptions(ignore_eos=True, **more), max_new_tokens=30))


@pytest.mark.parametrize("wrong_each", [0, 2, 3, 7])
def test_drafts_that_are_wrong_somewhere_are_taken_up_to_there(model, always, monkeypatch, wrong_each):
    always[:] = [6, 2]
    plain = list(model.generate([5, 9, 17], FREE, max_new_tokens=30))
    guess_with(monkeypatch, Oracle(ids_of(plain), wrong_each))
    _, found = both(model, [5, 9, 17], FREE, max_new_tokens=30)
    assert_same(plain, found)
    statistics = found[-1].statistics
    assert (statistics.accepted_tokens == statistics.drafted_tokens) == (wrong_each == 0)


def test_right_drafts_save_runs_of_the_graph(model, always, monkeypatch):
    always[:] = [4]
    plain = list(model.generate([5, 9, 17], FREE, max_new_tokens=31))
    guess_with(monkeypatch, Oracle(ids_of(plain)))
    runs = []
    run_ahead = SpeculativeEngine._run_ahead

    def counted(self, token):
        runs.append(token)
        return run_ahead(self, token)

    monkeypatch.setattr(SpeculativeEngine, "_run_ahead", counted)
    both(model, [5, 9, 17], FREE, max_new_tokens=31)
    assert len(runs) == 6  # five tokens each: four guesses and the one after them


# --- ends inside a draft ---------------------------------------------------------------------------------


@pytest.mark.parametrize("end", range(2, 9))
def test_a_stop_token_inside_a_draft_ends_it(model, always, monkeypatch, end):
    always[:] = [6]
    path = ids_of(model.generate(REPEATED, FREE, max_new_tokens=20))
    guess_with(monkeypatch, Oracle(path))
    stop = SamplingOptions(ignore_eos=True, stop_token_ids=(path[end],))
    plain, found = both(model, REPEATED, stop, max_new_tokens=20)
    assert_same(plain, found)
    assert found[-1].finish_reason == "stop"


def test_the_models_own_end_inside_a_draft_ends_it(model, always, monkeypatch):
    options = SamplingOptions(logit_bias={EOS: 1e4})
    guess_with(monkeypatch, Oracle([EOS] * 9))
    plain, found = both(model, "Hi", options)
    assert ids_of(found) == [EOS]
    assert_same(plain, found)


def test_a_stop_text_inside_a_draft_ends_the_answer_before_it(model, always, monkeypatch):
    letters = tiny_tokenizer().encode("abcabcabc", add_special_tokens=False).ids
    path = iter(letters * 2)
    monkeypatch.setattr(
        generate, "_choose_largest", lambda logits, *_: [Choice(next(path))] if logits.greedy() else []
    )
    guess_with(monkeypatch, Oracle(letters * 2))
    always[:] = [8]
    model.speculate(Speculation())
    found = list(model.generate("Hi", SamplingOptions(stop=("cab",)), max_new_tokens=18))
    model.speculate(None)
    assert "".join(step.text for step in found) == "ab"
    assert (len(found), found[-1].finish_reason) == (5, "stop")


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_limit_inside_a_draft_ends_it_and_nothing_is_run_in_vain(model, always, monkeypatch, limit):
    always[:] = [16]
    path = ids_of(model.generate(REPEATED, FREE, max_new_tokens=20))
    guess_with(monkeypatch, Oracle(path))
    plain, found = both(model, REPEATED, FREE, max_new_tokens=limit)
    assert_same(plain, found)
    assert found[-1].statistics.drafted_tokens == max(0, limit - 2)


@pytest.mark.parametrize("left", [0, 1, 2, 3, 5, 8])
def test_the_end_of_the_context_inside_a_draft_ends_it(model, always, monkeypatch, left):
    always[:] = [16]
    prompt = [5, 9, 17, 3] * CONTEXT
    prompt = prompt[: CONTEXT - left]
    plain = list(model.generate(prompt, FREE))
    guess_with(monkeypatch, Oracle([*ids_of(plain), *REPEATED]))
    plain, found = both(model, prompt, FREE)
    assert_same(plain, found)
    assert (len(found), found[-1].finish_reason) == (left + 1, "length")


# --- sampling --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1.0},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 2},
    ],
)
def test_a_seed_gives_the_tokens_of_plain_decoding(model, always, monkeypatch, more):
    always[:] = [4, 7]
    for seed in range(6):
        options = SamplingOptions(seed=seed, ignore_eos=True, **more)
        plain = list(model.generate(REPEATED, options, max_new_tokens=30))
        guess_with(monkeypatch, Oracle(ids_of(plain), wrong_each=5))
        assert_same(*both(model, REPEATED, options, max_new_tokens=30))


def test_what_a_device_would_draw_is_drawn_by_the_sampler(tmp_path, always, monkeypatch):
    """Checked logits are on the host, and a device orders tokens otherwise: one of the two must do all draws."""
    write_bundle(tmp_path / "b", "capacity", select=True)
    options = SamplingOptions(temperature=1.0, seed=4, ignore_eos=True)
    with tfmx.load(tmp_path / "b", threads=1) as model:
        plain = list(model.generate(REPEATED, options, max_new_tokens=30))
        model._open_graphs().chooser = open_chooser(model.bundle, Device("cpu", "test"))
        guess_with(monkeypatch, Oracle(ids_of(plain), wrong_each=4))
        model.speculate(Speculation())
        found = list(model.generate(REPEATED, options, max_new_tokens=30))
    assert_same(plain, found)
    assert found[-1].statistics.accepted_tokens > 0


# --- chats, encoder-decoders ----------------------------------------------------------------------------


def test_the_cache_of_a_chat_holds_no_guesses(model, always, monkeypatch):
    always[:] = [5]
    first = [{"role": "user", "content": "Hi"}]
    second = [{"role": "user", "content": "Hi there"}]
    expected = [list(model.chat(messages, FREE, max_new_tokens=9)) for messages in (first, second)]
    model._kept = None
    model.speculate(Speculation())
    guess_with(monkeypatch, Oracle([*ids_of(expected[0])[:6], *REPEATED]))
    found = [list(model.chat(first, FREE, max_new_tokens=9))]
    guess_with(monkeypatch, Oracle(REPEATED))
    found.append(list(model.chat(second, FREE, max_new_tokens=9)))
    model.speculate(None)
    for plain, steps in zip(expected, found, strict=True):
        assert_same(plain, steps)
        assert steps[0].statistics.cached_tokens == plain[0].statistics.cached_tokens
    engine, tokens = model._kept
    assert engine.lengths == [len(tokens)]


def test_a_chat_that_is_left_inside_a_draft_goes_on_right(model, always, monkeypatch):
    always[:] = [8]
    hi = [{"role": "user", "content": "Hi"}]
    plain = list(model.chat(hi, FREE, max_new_tokens=12))
    model._kept = None
    model.speculate(Speculation())
    guess_with(monkeypatch, Oracle(ids_of(plain)))
    steps = model.chat(hi, FREE, max_new_tokens=12)
    for _ in range(4):
        next(steps)
    steps.close()
    engine, tokens = model._kept
    assert engine.lengths == [len(tokens)] == [len(model.chat_ids(hi)) + 3]
    guess_with(monkeypatch, Oracle(ids_of(plain)))
    again = list(model.chat(hi, FREE, max_new_tokens=12))
    model.speculate(None)
    assert_same(plain, again)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_a_draft_model_that_cannot_read_the_prompt_loses_no_cache(model, monkeypatch, failure):
    hi = [{"role": "user", "content": "Hi"}]
    list(model.chat(hi, FREE, max_new_tokens=5))
    kept = model._kept

    def fail(*_):
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(model_module, "open_drafter", fail)
        model.speculate(Speculation())
        with pytest.raises(failure):
            list(model.chat(hi, FREE, max_new_tokens=5))
        model.speculate(None)
    assert model._kept is kept is not None
    assert next(model.chat(hi, FREE, max_new_tokens=5)).statistics.cached_tokens > 0


def test_an_encoder_decoder_gives_the_same_too(tmp_path, always, monkeypatch):
    write_encoder_decoder(tmp_path / "b")
    always[:] = [3]
    with tfmx.load(tmp_path / "b", threads=1) as model:
        for source in ([5, 9, 17, 3, 22], [7], [1, 2, 3] * 3):
            plain = list(model.generate(source, FREE, max_new_tokens=12))
            guess_with(monkeypatch, Oracle(ids_of(plain), wrong_each=5))
            _, found = both(model, source, FREE, max_new_tokens=12)
            assert_same(plain, found)
            assert 0 < found[-1].statistics.accepted_tokens < found[-1].statistics.drafted_tokens


def test_an_encoder_decoder_copies_from_its_source_if_that_has_the_same_tokens(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(PromptLookup, "read", lambda _self, tokens: read.extend(tokens))
    for size, expected in ((TARGETS, [5, 9, START]), (260, [START])):
        read.clear()
        with monkeypatch.context() as patched:
            patched.setattr(tiny_kinds, "VOCAB", size)
            write_encoder_decoder(tmp_path / str(size))
        with tfmx.load(tmp_path / str(size), threads=1) as model:
            model.speculate(Speculation())
            next(iter(model.generate([5, 9], max_new_tokens=1)))
        assert read == expected


# --- draft models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_a_draft_model_that_is_the_model_itself_is_always_right(model, flavour, always, tmp_path):
    write_bundle(tmp_path / "draft", flavour)
    always[:] = [4, 1, 7]
    with tfmx.load(tmp_path / "draft", threads=1) as draft:
        model.speculate(Speculation(draft=draft))
        found = list(model.generate(REPEATED, FREE, max_new_tokens=40))
        model.speculate(None)
    assert_same(list(model.generate(REPEATED, FREE, max_new_tokens=40)), found)
    statistics = found[-1].statistics
    assert statistics.accepted_tokens == statistics.drafted_tokens > 25


def test_a_draft_model_of_another_mind_changes_nothing(model, always, tmp_path):
    weights = tiny_weights()
    weights["head"] = weights["head"] + 0.5 * tiny_weights(7)["head"]  # agrees now and then
    write_bundle(tmp_path / "draft", "capacity", weights=weights)
    always[:] = [3, 5]
    with tfmx.load(tmp_path / "draft", threads=1) as draft:
        model.speculate(Speculation(draft=draft))
        found = [list(model.generate(prompt, FREE, max_new_tokens=40)) for prompt in prompts(8)]
        model.speculate(None)
    for prompt, steps in zip(prompts(8), found, strict=True):
        assert_same(list(model.generate(prompt, FREE, max_new_tokens=40)), steps)
    drafted, accepted = (
        sum(getattr(steps[-1].statistics, name) for steps in found)
        for name in ("drafted_tokens", "accepted_tokens")
    )
    assert 0 < accepted < drafted


def test_a_draft_model_stops_guessing_at_the_end_of_its_own_context(model, always, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(tiny_bundle, "CONTEXT", 24)
        write_bundle(tmp_path / "draft", "capacity")
    always[:] = [6]
    with tfmx.load(tmp_path / "draft", threads=1) as draft:
        model.speculate(Speculation(draft=draft))
        found = [list(model.generate([5] * count, FREE, max_new_tokens=30)) for count in (10, 40)]
        model.speculate(None)
    for count, steps in zip((10, 40), found, strict=True):
        assert_same(list(model.generate([5] * count, FREE, max_new_tokens=30)), steps)
    assert 0 < found[0][-1].statistics.drafted_tokens < 20
    assert found[1][-1].statistics.drafted_tokens == 0


@pytest.mark.parametrize(("asked", "room"), [(None, 256), (7, 7), (100_000, 2048)])
def test_a_draft_models_cache_is_first_made_for_a_moderate_answer(model, monkeypatch, asked, room):
    expected = []

    def noted(_draft, _prompt_ids, length, _source):
        expected.append(length)
        return PromptLookup()

    monkeypatch.setattr(model_module, "open_drafter", noted)
    model.speculate(Speculation())
    hi = [{"role": "user", "content": "Hi"}]
    next(model.generate([5, 9, 17], FREE, max_new_tokens=asked))
    next(model.chat(hi, FREE, max_new_tokens=asked))
    model.speculate(None)
    assert expected == [3 + room, len(model.chat_ids(hi)) + room]


def test_a_draft_model_forgets_its_wrong_guesses(model):
    drafter = DraftModel(model._open_graphs(), 64)
    drafter.read(REPEATED)
    right = drafter.draft(4)
    assert right == ids_of(model.generate(REPEATED, FREE, max_new_tokens=4))
    drafter.read([right[0], 200])  # the second guess was wrong
    assert drafter.draft(3) == ids_of(model.generate([*REPEATED, right[0], 200], FREE, max_new_tokens=3))


def test_what_is_learned_of_costs_stays_with_the_model(model, always):
    costs = model._costs
    both(model, REPEATED, FREE, max_new_tokens=20)
    assert costs.step is not None
    assert model._costs is costs


# --- refusals --------------------------------------------------------------------------------------------


def test_several_prompts_are_refused(model):
    model.speculate(Speculation())
    try:
        for call in (model.generate_batch, model.stream_batch):
            with pytest.raises(
                SpeculationError, match=r"^speculation is for one prompt at a time, here are 2"
            ):
                call([[1], [2]], FREE, max_new_tokens=2)
        assert len(model.generate_batch([[1, 2, 3]], FREE, max_new_tokens=5)[0].token_ids) == 5
    finally:
        model.speculate(None)
    assert len(model.generate_batch([[1], [2]], FREE, max_new_tokens=2)) == 2
    assert issubclass(SpeculationError, InputError)


def refused(model, line, **more):
    with pytest.raises(SpeculationError, match=line):
        model.speculate(Speculation(**more))


def test_bundles_that_cannot_forget_are_refused(model):
    recurrent = SimpleNamespace(
        manifest=SimpleNamespace(generates=True, kind="decoder", vocab_size=VOCAB, is_recurrent=True)
    )
    recurrent.manifest.inputs = model.manifest.inputs
    with pytest.raises(SpeculationError, match=r"^this bundle has a recurrent state, which cannot forget"):
        speculation.check_speculation(Speculation(), recurrent)
    refused(model, r"^the draft model has a recurrent state", draft=recurrent)


def test_bundles_over_anything_but_tokens_are_refused(model, tmp_path):
    inputs = SimpleNamespace(kind="vectors")
    over_vectors = SimpleNamespace(manifest=SimpleNamespace(generates=True, inputs=inputs))
    with pytest.raises(
        SpeculationError, match=r"^speculation is for bundles over tokens; this one takes vectors$"
    ):
        speculation.check_speculation(Speculation(), over_vectors)
    write_token_classifier(tmp_path / "classifier")
    with tfmx.load(tmp_path / "classifier", threads=1) as classifier:
        refused(classifier, "that generate tokens one by one; this one does not$")
        refused(model, "the draft model is an encoder, this bundle a decoder$", draft=classifier)


def test_a_draft_model_with_other_tokens_is_refused(model, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(tiny_bundle, "VOCAB", 330)
        write_bundle(tmp_path / "more", "capacity")
    swapped = json.loads(tiny_tokenizer().to_str())
    vocab = swapped["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    write_bundle(
        tmp_path / "swapped", "capacity", extra_files={"tokenizer.json": json.dumps(swapped).encode()}
    )
    with tfmx.load(tmp_path / "more", threads=1) as more, tfmx.load(tmp_path / "swapped") as other:
        refused(
            model,
            r"^the draft model's vocabulary has 330 tokens, this bundle's 320; both must have the same$",
            draft=more,
        )
        refused(
            model,
            r"^token \d+ is '[ab]' in this bundle and '[ab]' in the draft model; they must have the same tokenizer$",
            draft=other,
        )
    assert model._speculation is None


# --- the command -----------------------------------------------------------------------------------------


def test_the_command_speculates_and_says_how_often_it_was_right(always):
    arguments = ("run", cli_bundle(), "abcabcabcabc", "--max-tokens", 30)
    plain = run_tfmx(*arguments)
    for more in (("--speculate",), ("--draft", cli_bundle())):
        done = run_tfmx(*arguments, *more)
        assert (done.code, done.out) == (0, plain.out), done
        assert " guesses right)" in done.err
        found = json.loads(run_tfmx(*arguments, *more, "--json").out)
        assert found["drafted_tokens"] >= found["accepted_tokens"] >= 0
    assert "guesses" not in plain.err
    chat = run_tfmx("run", cli_bundle(), "--chat", "abcabcabcabc", "--max-tokens", 30, "--speculate")
    assert chat.out == run_tfmx("run", cli_bundle(), "--chat", "abcabcabcabc", "--max-tokens", 30).out


def test_the_command_says_so_when_nothing_was_guessed(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(tiny_bundle, "CONTEXT", 8)  # shorter than the prompt
        write_bundle(tmp_path / "draft", "capacity")
    arguments = ("run", cli_bundle(), "abcdefghijkl", "--max-tokens", 4, "--draft", tmp_path / "draft")
    assert ", 0 of 0 guesses right)" in run_tfmx(*arguments).err
    found = json.loads(run_tfmx(*arguments, "--json").out)
    assert (found["drafted_tokens"], found["accepted_tokens"]) == (0, 0)
    plain = json.loads(run_tfmx("run", cli_bundle(), "abc", "--max-tokens", 4, "--json").out)
    assert "drafted_tokens" not in plain


def test_the_command_refuses_what_cannot_be(tmp_path):
    write_token_classifier(tmp_path / "classifier")
    run_tfmx("run", tmp_path / "classifier", "--ids", "1", "--speculate").fails(
        2, "--speculate is for bundles that"
    )
    run_tfmx("run", cli_bundle(), "a", "--draft", tmp_path / "classifier").fails(
        2, "the draft model is an encoder"
    )
    run_tfmx("run", cli_bundle(), "a", "--draft", tmp_path / "none").fails(2, "none")


def test_speculation_is_what_it_was_when_the_answer_was_asked_for(model):
    steps = model.generate("ab ab ab", max_new_tokens=6)
    model.speculate(Speculation())
    assert list(steps)[-1].statistics.drafted_tokens == 0
    steps = [model.generate("ab ab ab", max_new_tokens=6) for _ in range(2)]
    model.speculate(None)
    assert len(model.generate_batch(["a", "b"], max_new_tokens=2)) == 2  # no longer one prompt at a time
    assert all(len(list(answer)) for answer in steps)
