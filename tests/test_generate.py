"""Generation through the public API: text, ids, batches and chat, on both kinds of cache."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tiny_bundle import (
    BOS,
    CONTEXT,
    EOS,
    IM_END,
    VOCAB,
    list_files,
    reference_greedy,
    reference_logits,
    tiny_tokenizer,
    tiny_weights,
    write_bundle,
    write_manifest,
)

import tfmx
from tfmx import InputError, TfmxError
from tfmx.runtime import model as model_module
from tfmx.runtime.bundle import Bundle
from tfmx.runtime.generate import NumericsError
from tfmx.runtime.sampling import SamplingError, SamplingOptions
from tfmx.runtime.tokenizer import PromptError

FREE = SamplingOptions(ignore_eos=True)
WEIGHTS = tiny_weights()


@pytest.fixture(scope="module", params=["append", "capacity"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate") / request.param
    write_bundle(folder, request.param)
    with tfmx.load(folder, threads=1) as loaded:
        yield loaded


def ids_of(steps):
    return [step.token_id for step in steps]


def text_of(steps):
    return "".join(step.text for step in steps)


def test_the_example_of_the_readme_works(model):
    prompt = "Once upon a time"
    steps = list(model.generate(prompt, FREE, max_new_tokens=20))
    prompt_ids = tiny_tokenizer().encode(prompt).ids
    assert prompt_ids[0] == BOS
    assert ids_of(steps) == reference_greedy(WEIGHTS, prompt_ids, 20)
    whole = tiny_tokenizer().decode(prompt_ids + ids_of(steps))
    assert prompt + text_of(steps) == whole
    assert [step.finish_reason for step in steps] == [None] * 19 + ["length"]


def test_ids_in_ids_out(model):
    for prompt in ([5, 9, 17], (5, 9, 17), np.asarray([5, 9, 17])):
        steps = list(model.generate(prompt, FREE, max_new_tokens=5))
        assert ids_of(steps) == reference_greedy(WEIGHTS, [5, 9, 17], 5)


def test_a_batch_of_ragged_prompts_gives_what_each_gives_alone(model):
    prompts = ["Hello", [1, 2, 3], "A much longer prompt than the others", [7]]
    results = model.generate_batch(prompts, FREE, max_new_tokens=12)
    for prompt, result in zip(prompts, results, strict=True):
        steps = list(model.generate(prompt, FREE, max_new_tokens=12))
        assert result.token_ids == tuple(ids_of(steps))
        assert result.text == text_of(steps)
        assert result.finish_reason == "length"
        assert list(result.token_ids) == reference_greedy(WEIGHTS, list(result.prompt_ids), 12)


def test_rows_end_each_in_its_own_time(model):
    """Stop tokens chosen so that the rows end at different steps; the others go on undisturbed."""
    prompts = [[1, 2, 3], [7], [9, 8, 7, 6, 5]]
    paths = [reference_greedy(WEIGHTS, prompt, 15) for prompt in prompts]
    stops = (paths[0][2], paths[2][6])
    results = model.generate_batch(
        prompts, SamplingOptions(ignore_eos=True, stop_token_ids=stops), max_new_tokens=15
    )
    for path, result in zip(paths, results, strict=True):
        end = next((i + 1 for i, token in enumerate(path) if token in stops), 15)
        assert list(result.token_ids) == path[:end]
        assert result.finish_reason == ("stop" if path[end - 1] in stops else "length")
    assert len({len(result.token_ids) for result in results}) > 1


def test_streaming_a_batch_says_whose_each_step_is(model):
    prompts = [[1, 2, 3], [7]]
    steps = list(model.stream_batch(prompts, FREE, max_new_tokens=6))
    for row, prompt in enumerate(prompts):
        assert ids_of(step for step in steps if step.row == row) == reference_greedy(WEIGHTS, prompt, 6)


@pytest.mark.parametrize(
    "more", [{}, {"top_k": 20, "top_p": 0.9}, {"repetition_penalty": 1.3, "min_p": 0.01}]
)
def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_streamed(model, more):
    options = SamplingOptions(temperature=1.5, seed=11, ignore_eos=True, **more)
    alone = ids_of(model.generate([5, 9, 17], options, max_new_tokens=20))
    again = ids_of(model.generate([5, 9, 17], options, max_new_tokens=20))
    batch = model.generate_batch([[1], [5, 9, 17], [3, 3, 3, 3, 3, 3]], options, max_new_tokens=20)
    assert alone == again == list(batch[1].token_ids)
    other = ids_of(
        model.generate(
            [5, 9, 17], SamplingOptions(temperature=1.5, seed=12, ignore_eos=True), max_new_tokens=20
        )
    )
    assert other != alone


def test_a_fresh_seed_is_reported_and_repeats_the_tokens(model):
    options = SamplingOptions(temperature=2.0, ignore_eos=True)
    steps = list(model.generate([5], options, max_new_tokens=12))
    again = SamplingOptions(temperature=2.0, ignore_eos=True, seed=steps[0].seed)
    assert ids_of(model.generate([5], again, max_new_tokens=12)) == ids_of(steps)
    assert len({next(iter(model.generate([5], options, max_new_tokens=1))).seed for _ in range(5)}) == 5


def test_end_tokens_stop_and_are_not_text(model):
    """A bias makes the end token certain."""
    for token in (EOS, IM_END):
        steps = list(model.generate("Hi", SamplingOptions(logit_bias={token: 1e4})))
        assert ids_of(steps) == [token]
        assert (steps[0].text, steps[0].finish_reason) == ("", "stop")
    free = SamplingOptions(logit_bias={EOS: 1e4}, ignore_eos=True)
    assert ids_of(model.generate("Hi", free, max_new_tokens=3)) == [EOS] * 3


def bytes_path(text):
    """The ids of a text and a bias that makes the model write nothing else than its first character."""
    return tiny_tokenizer().encode(text, add_special_tokens=False).ids


def test_a_stop_text_ends_the_answer_before_it(model):
    letter = bytes_path("x")[0]
    options = SamplingOptions(logit_bias={letter: 1e4}, stop=("xxx",))
    steps = list(model.generate("Hi", options, max_new_tokens=9))
    assert len(steps) == 3
    assert text_of(steps) == ""
    assert steps[-1].finish_reason == "stop"
    held = list(
        model.generate("Hi", SamplingOptions(logit_bias={letter: 1e4}, stop=("xxxxy",)), max_new_tokens=6)
    )
    assert [step.text for step in held] == ["", "", "", "", "x", "xxxxx"]  # what could begin it is held back
    assert held[-1].finish_reason == "length"


def test_stop_texts_that_overlap_end_an_answer_where_the_first_begins(model):
    """Random pieces of what the model says, against the first place in the whole text where one begins."""
    rng = np.random.default_rng(2)
    whole = text_of(model.generate("Hello", FREE, max_new_tokens=30))
    for _ in range(40):
        begins = rng.integers(0, len(whole), rng.integers(1, 4)).tolist()
        stops = [whole[begin : begin + int(rng.integers(1, 6))] for begin in begins]
        options = SamplingOptions(ignore_eos=True, stop=(*stops, stops[0] + "?"))
        steps = list(model.generate("Hello", options, max_new_tokens=30))
        first = min(whole.index(stop) for stop in stops)
        assert (text_of(steps), steps[-1].finish_reason) == (whole[:first], "stop")


def test_a_stop_text_that_waits_for_a_longer_one_ends_the_answer_at_its_limit(model):
    whole = text_of(model.generate("Hello", FREE, max_new_tokens=12))
    waits = whole[-3:-1]
    assert whole.index(waits) == len(whole) - 3
    options = SamplingOptions(ignore_eos=True, stop=(waits, whole[-5:] + "?"))
    steps = list(model.generate("Hello", options, max_new_tokens=12))
    assert len(steps) == 12  # "?" did not come
    assert (text_of(steps), steps[-1].finish_reason) == (whole[:-3], "stop")


def test_streamed_text_never_holds_half_a_character(model):
    first = bytes_path("é")[0]
    steps = list(model.generate("Hi", SamplingOptions(logit_bias={first: 1e4}), max_new_tokens=4))
    assert [step.text for step in steps[:-1]] == [""] * 3
    assert steps[-1].text == "\ufffd" * 4  # at the end what is unfinished is shown


def test_a_continued_text_keeps_its_space(tmp_path):
    """SentencePiece's first token loses its space when decoded alone; here it continues the prompt."""
    from test_tokenizer import sentencepiece_tokenizer

    raw = sentencepiece_tokenizer()
    write_bundle(tmp_path / "b", "append", extra_files={"tokenizer.json": raw.to_str().encode()})
    model = tfmx.load(tmp_path / "b", threads=1)
    bias = {raw.token_to_id("▁hello"): 1e4}
    steps = list(model.generate("hello", SamplingOptions(logit_bias=bias), max_new_tokens=2))
    assert [step.text for step in steps] == [" hello", " hello"]


def test_generation_ends_at_the_context(model):
    """The last token is never run, so it needs no position: one more token than there is room for the cache's."""
    for left in (0, 1, 3):
        prompt = [(5 * place) % VOCAB for place in range(CONTEXT - left)]
        for asked in (None, left + 1, 50):
            steps = list(model.generate(prompt, FREE, max_new_tokens=asked))
            assert ids_of(steps) == reference_greedy(WEIGHTS, prompt, left + 1)
            assert [step.finish_reason for step in steps] == [None] * left + ["length"]


def test_rows_of_a_batch_reach_the_context_each_for_itself(model):
    results = model.generate_batch([[5] * (CONTEXT - 2), [7]], FREE, max_new_tokens=40)
    assert [len(result.token_ids) for result in results] == [3, 40]
    assert [result.finish_reason for result in results] == ["length", "length"]
    assert list(results[1].token_ids) == reference_greedy(WEIGHTS, [7], 40)


def test_logprobs_come_with_each_step(model):
    steps = list(model.generate([5, 9], SamplingOptions(logprobs=3, ignore_eos=True), max_new_tokens=4))
    ids = [5, 9]
    for step in steps:
        logits = reference_logits(WEIGHTS, ids)[-1]
        logprobs = logits - np.log(np.exp(logits).sum())
        assert step.logprob.token_id == step.token_id
        assert step.logprob.logprob == pytest.approx(logprobs[step.token_id], abs=1e-4)
        assert [entry.token_id for entry in step.top_logprobs] == np.argsort(-logits)[:3].tolist()
        for entry in (step.logprob, *step.top_logprobs):
            assert entry.token_bytes == model.tokenizer.token_bytes(entry.token_id)
            is_token = entry.token_bytes is not None  # some ids are padding
            assert entry.text == (entry.token_bytes.decode("utf-8", "replace") if is_token else None)
        ids.append(step.token_id)
    plain = next(iter(model.generate([5, 9], max_new_tokens=1)))
    assert (plain.logprob, plain.top_logprobs) == (None, ())


def test_statistics_count_tokens_and_time(model):
    steps = list(model.generate("Hello", FREE, max_new_tokens=10))
    last = steps[-1].statistics
    assert (last.prompt_tokens, last.new_tokens, last.decode_tokens, last.cached_tokens) == (6, 10, 9, 0)
    assert last.time_to_first_token > 0
    assert last.decode_tokens_per_second == pytest.approx(9 / last.decode_seconds)
    assert last.prefill_tokens_per_second == pytest.approx(6 / last.time_to_first_token)
    assert steps[0].statistics.decode_tokens_per_second == 0
    batch = model.generate_batch([[1], [2, 3]], FREE, max_new_tokens=4)
    assert batch[0].statistics.new_tokens == 8


def test_time_between_steps_is_not_counted(model):
    import time

    steps = []
    for step in model.generate("Hello", FREE, max_new_tokens=5):
        steps.append(step)
        time.sleep(0.05)
    assert steps[-1].statistics.decode_seconds < 0.15


def test_all_logits_can_be_had(model):
    ids = [5, 9, 17, 3, 22]
    assert np.abs(model.logits(ids) - reference_logits(WEIGHTS, ids)).max() < 3e-5
    assert model.logits(np.asarray(ids)).dtype == np.float32


# --- chat ------------------------------------------------------------------------------------------------


def test_a_chat_turn_continues_the_rendered_prompt(model):
    messages = [{"role": "user", "content": "Hi"}]
    steps = list(model.chat(messages, FREE, max_new_tokens=8))
    prompt = model.chat_ids(messages)
    assert ids_of(steps) == reference_greedy(WEIGHTS, prompt, 8)
    assert text_of(steps) == model.tokenizer.decode(ids_of(steps))


def test_the_next_turn_reuses_the_cache_and_gives_the_same(model):
    messages = [{"role": "user", "content": "Hi"}]
    list(model.chat(messages, SamplingOptions(logit_bias={bytes_path("o")[0]: 1e4}), max_new_tokens=4))
    messages += [{"role": "assistant", "content": "oooo"}, {"role": "user", "content": "Go"}]
    steps = list(model.chat(messages, FREE, max_new_tokens=6))
    prompt = model.chat_ids(messages)
    assert ids_of(steps) == reference_greedy(WEIGHTS, prompt, 6)
    first = len(model.chat_ids(messages[:1]))
    assert steps[0].statistics.cached_tokens == first + 3  # the last token of an answer was never fed
    other = list(model.chat([{"role": "user", "content": "Ho"}], FREE, max_new_tokens=6))
    assert 0 < other[0].statistics.cached_tokens < first
    assert ids_of(other) == reference_greedy(WEIGHTS, model.chat_ids([{"role": "user", "content": "Ho"}]), 6)


def test_the_same_chat_again_gives_the_same(model):
    messages = [{"role": "user", "content": "Again"}]
    options = SamplingOptions(temperature=1.2, seed=5, ignore_eos=True)
    first = ids_of(model.chat(messages, options, max_new_tokens=10))
    again = list(model.chat(messages, options, max_new_tokens=10))
    assert ids_of(again) == first
    assert again[0].statistics.cached_tokens == len(model.chat_ids(messages)) - 1


def test_a_chat_left_early_and_two_chats_at_once_stay_right(model):
    hi, ho = ([{"role": "user", "content": text}] for text in ("Hi", "Ho"))
    list(model.chat(hi, FREE, max_new_tokens=3))
    left = model.chat(hi, FREE, max_new_tokens=12)  # continues the cache of the chat before
    begun = [next(left), next(left)]
    inner = ids_of(model.chat(ho, FREE, max_new_tokens=5))
    assert inner == reference_greedy(WEIGHTS, model.chat_ids(ho), 5)
    assert ids_of([*begun, *left]) == reference_greedy(WEIGHTS, model.chat_ids(hi), 12)
    left = model.chat(hi, FREE, max_new_tokens=30)
    next(left)
    left.close()
    assert ids_of(model.chat(hi, FREE, max_new_tokens=5)) == reference_greedy(WEIGHTS, model.chat_ids(hi), 5)


def test_special_tokens_in_a_plain_prompt_stay_text_unless_asked_for(model):
    assert EOS not in model.encode("a</s>b")
    assert EOS in model.encode("a</s>b", parse_special=True)
    plain = next(iter(model.generate("</s>", max_new_tokens=1)))
    parsed = next(iter(model.generate("</s>", max_new_tokens=1, parse_special=True)))
    assert (plain.statistics.prompt_tokens, parsed.statistics.prompt_tokens) == (5, 2)


# --- guards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ([], "the prompt is empty"),
        ([1, -1], "token -1 at place 1 of the prompt is outside the vocabulary of 320"),
        ([VOCAB], "token 320 at place 0 of the prompt is outside the vocabulary of 320"),
        ([2**70], f"token {2**70} at place 0 of the prompt is outside the vocabulary of 320"),
        ([1] * (CONTEXT + 1), "the prompt has 97 tokens, the context holds 96; shorten it"),
        ("x" * 96, "the prompt has 97 tokens, the context holds 96; shorten it"),
        ("x" * 1_000_000, r"the prompt has at least \d+ tokens, the context holds 96; shorten it"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_an_error_at_the_call(model, prompt, line):
    with pytest.raises(PromptError, match=f"^{line}$") as caught:
        model.generate(prompt)
    assert isinstance(caught.value, InputError)


def test_in_a_batch_the_prompt_is_named(model):
    with pytest.raises(
        PromptError, match=r"^token 999 at place 0 of prompt 1 is outside the vocabulary of 320$"
    ):
        model.generate_batch([[1], [999]])
    with pytest.raises(PromptError, match=r"^prompt 0 is empty$"):
        model.generate_batch([[], [1]])
    with pytest.raises(PromptError, match=r"^there are no prompts$"):
        model.generate_batch([])


def test_an_empty_text_has_the_first_token_at_least(model):
    assert next(iter(model.generate("", max_new_tokens=1))).statistics.prompt_tokens == 1


def test_options_are_checked_at_the_call(model):
    with pytest.raises(SamplingError, match="outside the vocabulary"):
        model.generate([1], SamplingOptions(stop_token_ids=(VOCAB,)))
    with pytest.raises(SamplingError, match="max_new_tokens is 0"):
        model.generate([1], max_new_tokens=0)
    with pytest.raises(InputError, match=r"^threads is 0; it must be 1 to 1024$"):
        tfmx.load(model.bundle.path, threads=0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}])
@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_logits_that_are_no_numbers_stop_with_the_step(flavour, value, options, tmp_path):
    """The token 5 has a broken embedding: the prompt is fine, the step after choosing it is not."""
    weights = tiny_weights()
    weights["embed"][5] = value
    write_bundle(tmp_path / "b", flavour, weights=weights)
    broken = tfmx.load(tmp_path / "b", threads=1)
    steps = broken.generate([1, 2], SamplingOptions(logit_bias={5: 1e4}, **options), max_new_tokens=5)
    assert next(steps).token_id == 5
    with pytest.raises(NumericsError, match=r"^the logits of step 1 \(row 0\) are not finite"):
        next(steps)
    with pytest.raises(NumericsError, match=r"^the logits of step 0 \(row 1\) are not finite"):
        broken.generate_batch([[1], [5]])


def test_a_bundle_without_tokenizer_or_template_works_with_ids(tmp_path):
    folder = tmp_path / "b"
    manifest = write_bundle(folder, "capacity")
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").unlink()
    from dataclasses import replace

    write_manifest(folder, replace(manifest, files=list_files(folder)))
    bare = tfmx.load(folder, threads=1)
    steps = list(bare.generate([5, 9, 17], FREE, max_new_tokens=4))
    assert ids_of(steps) == reference_greedy(WEIGHTS, [5, 9, 17], 4)
    assert text_of(steps) == ""
    with pytest.raises(PromptError, match=r"^this bundle has no tokenizer; give token ids \(`--ids`\)$"):
        bare.generate("text")
    with pytest.raises(PromptError, match=r"^this bundle has no chat template; give it a plain prompt$"):
        bare.chat([{"role": "user", "content": "x"}])
    with pytest.raises(PromptError, match="cannot look for stop texts"):
        bare.generate([1], SamplingOptions(stop=("x",)))


def test_a_closed_model_says_so(tmp_path):
    write_bundle(tmp_path / "tiny", "append")
    with tfmx.load(tmp_path / "tiny", threads=1) as closing:
        begun = closing.generate([1], FREE, max_new_tokens=6)
        chatting = closing.chat("Hi", FREE, max_new_tokens=6)
        late = closing.generate([1])
        whole = ids_of(closing.generate([1], FREE, max_new_tokens=6))
        first = [next(begun), next(chatting)]
    closing.close()  # a second time it does nothing
    calls = {
        "generate": lambda: closing.generate([1]),
        "stream_batch": lambda: closing.stream_batch([[1]]),
        "generate_batch": lambda: closing.generate_batch([[1]]),
        "chat": lambda: closing.chat("Hi"),
        "chat_ids": lambda: closing.chat_ids("Hi"),
        "encode": lambda: closing.encode("Hi"),
        "logits": lambda: closing.logits([1]),
        "apply": lambda: closing.apply([1]),
        "apply_batch": lambda: closing.apply_batch([[1]]),
        "speculate": lambda: closing.speculate(None),
        "__enter__": closing.__enter__,
        "a generation that had not begun": lambda: next(late),
    }
    for call in calls.values():
        with pytest.raises(TfmxError, match=r"^the model tiny was closed; load it again$") as caught:
            call()
        assert not isinstance(caught.value, InputError)
    public = {name for name in dir(closing) if not name.startswith("_") and callable(getattr(closing, name))}
    assert public - calls.keys() == {"close"}
    assert ids_of([first[0], *begun]) == whole  # what had begun may finish
    assert len([first[1], *chatting]) == 6
    assert closing._kept is None


def test_a_model_says_what_it_is(tmp_path, monkeypatch):
    write_bundle(tmp_path / "tiny", "capacity", dtype="fp16")
    with tfmx.load(tmp_path / "tiny", threads=1) as model:
        assert repr(model) == "<tfmx.Model tiny: decoder, ort, fp16, context 96, on cpu>"
    assert repr(model) == "<tfmx.Model tiny: decoder, ort, fp16, context 96, on cpu, closed>"
    monkeypatch.chdir(tmp_path / "tiny")
    with tfmx.load(".", threads=1) as model:
        assert repr(model).startswith("<tfmx.Model tiny: ")


def test_a_text_is_a_chat_of_one_message(model):
    assert model.chat_ids("Hi") == model.chat_ids([{"role": "user", "content": "Hi"}])
    steps = list(model.chat("Hi", FREE, max_new_tokens=5))
    assert ids_of(steps) == reference_greedy(WEIGHTS, model.chat_ids("Hi"), 5)


def test_many_threads_may_generate_at_once(model):
    prompts = [[5, 9, number] for number in range(6)]
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        found[number] = ids_of(model.generate(prompts[number], FREE, max_new_tokens=15))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, prompt in enumerate(prompts):
        assert found[number] == reference_greedy(WEIGHTS, prompt, 15)


def test_the_bundle_can_be_loaded_from_a_relative_path(tmp_path, monkeypatch):
    write_bundle(tmp_path / "b", "capacity")
    monkeypatch.chdir(tmp_path)
    assert ids_of(tfmx.load("b").generate([5], FREE, max_new_tokens=2)) == reference_greedy(WEIGHTS, [5], 2)
    assert Bundle.open("b").manifest.vocab_size == VOCAB


@pytest.mark.parametrize(("asked", "room"), [(None, 256), (7, 7), (100_000, 2048)])
def test_a_cache_is_first_made_for_a_moderate_answer(model, monkeypatch, asked, room):
    """A large one would be prefilled in small chunks, and it grows anyway."""
    expected, real = [], model_module.open_engine

    def noted(graphs, batch, length, *more):
        expected.append(length)
        return real(graphs, batch, length, *more)

    monkeypatch.setattr(model_module, "open_engine", noted)
    hi = [{"role": "user", "content": "Hi"}]
    model._kept = None
    next(model.generate([5, 9, 17], FREE, max_new_tokens=asked))
    next(model.chat(hi, FREE, max_new_tokens=asked))
    assert expected == [3 + room, len(model.chat_ids(hi)) + room]


def test_one_text_is_no_batch_and_a_dictionary_no_sampling(model):
    with pytest.raises(InputError, match="prompts is one text, wanted a list of prompts"):
        model.generate_batch("abc", max_new_tokens=1)
    with pytest.raises(InputError, match="sampling is a dict; it must be SamplingOptions"):
        list(model.generate("abc", {"temperature": 1}))
