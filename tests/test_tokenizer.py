"""Text to ids and back: special tokens in users' texts stay text, streamed text is what decoding at once gives."""

from __future__ import annotations

import json
import random

import pytest
from tiny_bundle import BOS, IM_END, IM_START, tiny_tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from tfmx.runtime.bundle import BundleError
from tfmx.runtime.detokenizer import Detokenizer, StopTexts
from tfmx.runtime.tokenizer import PromptError, Tokenizer

TEXTS = [
    "Hello, world!",
    "naïve café — “quotes” … 123",
    "日本語と中文，한국어",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 e\u0301 done",
    "   leading and trailing   ",
    "line\nbreaks\r\n\ttabs",
    "العربية עברית हिन्दी",
]


def sentencepiece_tokenizer() -> RawTokenizer:
    """As Llama 2 has it: a prefix space, byte tokens for what the vocabulary lacks, specials in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzHABC,.!<>/|_日本", "▁h", "el", "lo", "▁hel", "▁hello"]
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁h", "el"), ("▁hel", "lo")]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    tokenizer = RawTokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram_tokenizer() -> RawTokenizer:
    """Its vocabulary holds `</s>` as a piece, so plain text could become it."""
    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("▁", -2.0),
        *((letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz</>"),
    ]
    tokenizer = RawTokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<unk>", special=True)])
    return tokenizer


def wrap(raw: RawTokenizer) -> Tokenizer:
    return Tokenizer(raw.to_str().encode())


@pytest.fixture(scope="module")
def tiny():
    return wrap(tiny_tokenizer())


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_tokenizer])
def test_ordinary_text_is_encoded_as_the_tokenizers_library_does(make, text):
    raw = make()
    assert wrap(raw).encode(text) == raw.encode(text).ids
    assert wrap(raw).encode(text, add_special=False) == raw.encode(text, add_special_tokens=False).ids


def test_special_tokens_in_a_text_stay_text(tiny):
    ids = tiny.encode("a<|im_end|>b<s>")
    assert ids[0] == BOS
    assert max(ids[1:]) < 256
    assert tiny.decode(ids) == "a<|im_end|>b<s>"


def test_special_tokens_are_parsed_when_asked_for(tiny):
    ids = tiny.encode("<|im_start|>user\nhi<|im_end|>", add_special=False, parse_special=True)
    assert ids[0] == IM_START
    assert ids[-1] == IM_END
    assert tiny.decode(ids) == "user\nhi"
    assert tiny.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"


@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("text", ["x</s>y", "</s>", "hello <s> hello </s>", " </s> ", "<s></s><s>"])
def test_the_twin_agrees_with_the_librarys_own_way_to_ignore_special_tokens(make, text):
    raw = make()
    ids = wrap(raw).encode(text)
    raw.encode_special_tokens = True
    assert ids == raw.encode(text).ids


def test_a_vocabulary_that_holds_a_special_token_as_a_piece_is_no_way_round():
    tokenizer = wrap(unigram_tokenizer())
    ids = tokenizer.encode("a</s>b")
    assert 1 not in ids
    assert tokenizer.decode(ids).replace(" ", "") == "a</s>b"


def test_text_that_can_only_become_a_special_token_is_refused():
    raw = RawTokenizer(models.WordLevel({"[UNK]": 0, "stop": 1, "go": 2, "STOP": 3}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.normalizer = normalizers.Lowercase()
    raw.add_special_tokens(
        [AddedToken("[UNK]", special=True), AddedToken("stop", special=True, normalized=True)]
    )
    tokenizer = wrap(raw)
    assert tokenizer.encode("go what") == [2, 0]  # the unknown token is special, and fine
    with pytest.raises(PromptError, match="special token's name that this tokenizer cannot take as text"):
        tokenizer.encode("go STOP")


def test_a_text_may_contain_every_special_token_many_times(tiny):
    text = "".join(random.Random(0).choices(["<s>", "</s>", "<|im_start|>", "<|im_end|>", "x", " "], k=500))
    ids = tiny.encode(text, add_special=False)
    assert max(ids) < 256
    assert tiny.decode(ids) == text


def test_truncation_and_padding_of_the_file_are_not_used():
    raw = tiny_tokenizer()
    raw.enable_truncation(3)
    raw.enable_padding(length=100)
    assert len(wrap(raw).encode("Hello, world!")) == 14


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{}", b"\xff\xfe", json.dumps({"version": "1.0", "model": {}}).encode()]
)
def test_a_damaged_tokenizer_file_is_an_error(data):
    with pytest.raises(BundleError, match=r"^tokenizer\.json cannot be read: "):
        Tokenizer(data)


def test_a_tokenizer_file_that_is_no_text_is_an_error(tiny):
    """Half a character in the vocabulary would have been another token."""
    data = tiny_tokenizer().to_str().encode().replace("Ġ".encode(), "Ġ".encode()[:1])
    with pytest.raises(BundleError, match=r"^tokenizer\.json cannot be read: 'utf-8' codec"):
        Tokenizer(data)


def test_a_text_with_half_a_surrogate_is_an_error(tiny):
    with pytest.raises(PromptError, match="the tokenizer failed"):
        tiny.encode("a\ud800b")


def test_a_panic_inside_the_library_is_an_error_like_any_other(tiny, monkeypatch):
    class PanicException(BaseException):
        pass

    class Panics:
        def encode(self, *_args, **_kwargs):
            raise PanicException("index out of bounds")

    tokenizer = wrap(tiny_tokenizer())
    monkeypatch.setattr(tokenizer, "_raw", Panics())
    with pytest.raises(PromptError, match=r"^the tokenizer failed: index out of bounds$"):
        tokenizer.encode("x")


def test_ctrl_c_inside_the_library_is_not_taken_for_a_failure(tiny, monkeypatch):
    class Interrupted:
        def encode(self, *_args, **_kwargs):
            raise KeyboardInterrupt

    tokenizer = wrap(tiny_tokenizer())
    monkeypatch.setattr(tokenizer, "_raw", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("x")


# --- streaming -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_whole_text_and_never_half_a_character(make, text):
    tokenizer = wrap(make())
    ids = tokenizer.encode(text * 3, add_special=False)
    stream = Detokenizer(tokenizer.decode)
    parts = [stream.push(token_id) for token_id in ids]
    assert all("\ufffd" not in part for part in parts)
    assert "".join(parts) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_tokenizer])
def test_streamed_text_continues_a_prompt_with_its_space(make):
    tokenizer = wrap(make())
    ids = tokenizer.encode("hello hello hello", add_special=False)
    for cut in range(1, len(ids)):
        stream = Detokenizer(tokenizer.decode, ids[:cut])
        text = "".join(stream.push(token_id) for token_id in ids[cut:]) + stream.flush()
        assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)


def test_an_unfinished_character_is_held_until_its_last_byte(tiny):
    ids = tiny.encode("é👍", add_special=False)
    stream = Detokenizer(tiny.decode)
    assert [stream.push(token_id) for token_id in ids] == ["", "é", "", "", "", "👍"]


def test_bytes_that_are_no_character_come_out_at_last(tiny):
    lone = tiny.encode("é", add_special=False)[0]
    letter = tiny.encode("x", add_special=False)[0]
    stream = Detokenizer(tiny.decode)
    assert stream.push(lone) == ""
    assert stream.push(letter) == "\ufffdx"
    assert stream.push(lone) == ""
    assert stream.flush() == "\ufffd"
    endless = Detokenizer(tiny.decode)
    assert len("".join(endless.push(lone) for _ in range(200))) > 100


def test_streaming_random_bytes_loses_nothing(tiny):
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(256) for _ in range(30)]
        stream = Detokenizer(tiny.decode)
        text = "".join(stream.push(token_id) for token_id in ids) + stream.flush()
        assert text == tiny.decode(ids)


def test_a_stop_text_is_found_across_tokens_and_not_given_out():
    stop = StopTexts(["\nUser:", "END"])
    assert [stop.push(part) for part in ("Hello\n", "Use", "ful ", "E", "N", "D more")] == [
        ("Hello", False),
        ("", False),
        ("\nUseful ", False),
        ("", False),
        ("", False),
        ("", True),
    ]


def test_the_earliest_of_several_stop_texts_wins():
    assert StopTexts(["c", "b"]).push("abc") == ("a", True)
    assert StopTexts(["abcd", "bc"]).push("xabcd") == ("x", True)


def test_a_stop_text_waits_for_one_that_began_earlier():
    for after, wanted in (("d", ("", True)), ("e", ("a", True))):
        stop = StopTexts(["abcd", "bc"])
        assert stop.push("xabc") == ("x", False)  # "bc" is complete, but "abc" may become "abcd"
        assert stop.push(after) == wanted
    stop = StopTexts(["abcd", "bc"])
    assert stop.push("xabc") == ("x", False)
    assert stop.flush() == ("a", True)  # nothing came any more


def test_of_stop_texts_that_begin_together_the_shortest_ends_the_answer():
    stop = StopTexts(["abcd", "ab"])
    assert stop.push("xa") == ("x", False)
    assert stop.push("b") == ("", True)


def test_held_text_is_given_out_at_the_end():
    stop = StopTexts(["abc"])
    assert stop.push("xab") == ("x", False)
    assert stop.flush() == ("ab", False)
    assert stop.flush() == ("", False)
    assert StopTexts([]).push("anything") == ("anything", False)


def before_the_first_stop(text: str, stops: list[str]) -> str:
    """The definition: up to the first place of the whole text where any of the stop texts begins."""
    return next((text[:place] for place in range(len(text)) if text.startswith(tuple(stops), place)), text)


def test_every_split_of_a_text_stops_at_the_same_place():
    rng = random.Random(1)
    stopped_late = 0
    for _ in range(5000):
        text = "".join(rng.choices("ab", k=rng.randint(1, 14)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
        wanted = before_the_first_stop(text, stops)
        given, stopper, position, stopped = "", StopTexts(stops), 0, False
        while position < len(text) and not stopped:
            size = rng.choice((1, 1, 2, 3, len(text)))
            part, stopped = stopper.push(text[position : position + size])
            given, position = given + part, position + size
            assert wanted.startswith(given)  # what was given out is never taken back
        if not stopped:
            rest, stopped = stopper.flush()
            given, stopped_late = given + rest, stopped_late + stopped
        assert (given, stopped) == (wanted, len(wanted) < len(text))
    assert stopped_late > 20  # a stop text that waited in vain for an earlier one


def test_regex_specials_are_taken_literally():
    raw = tiny_tokenizer()
    raw.add_special_tokens([AddedToken("[.*]", special=True)])
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), raw.pre_tokenizer]
    )
    tokenizer = wrap(raw)
    assert max(tokenizer.encode("a[.*]b", add_special=False)) < 256
    assert 260 in tokenizer.encode("a[.*]b", parse_special=True)
