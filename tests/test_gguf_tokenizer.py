"""Tokenizers rebuilt from GGUF metadata: the same ids as the tokenizer that the model was trained with."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise

import pytest
import real_models
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.tokenization_utils_base import generate_merges

from tfmx.tfm_model.checkpoint import CheckpointError
from tfmx.tfm_model.config import ConfigError
from tfmx.tfm_model.gguf_header import read_header
from tfmx.tfm_model.gguf_split import SPLITS
from tfmx.tfm_model.gguf_tokenizer import Vocabulary, merges_of, read_vocabulary, token_ids, tokenizer_json

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two spaces, then\ttab\n\n\nand lines \r\n  ",
    "I'm sure they'll say it's DON'T, WE'VE and you'd",
    "3.14159 and 1234567 or 12 34 ٣٤ ½ ²",
    "naïve café, cafe\u0301, Ångström, ﬁne",
    "日本語のテキスト、한국어 텍스트 и русский",
    "emoji 👩‍👩‍👧 🇫🇷 \U0001f600",
    "def f(x):\n    return x**2  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "$100 + 5% = <b>bold</b> ~ ^ | `code`",
    "a" * 50 + "!" * 20,
    "<s> and </s> in the text <0x0A>",
    "...\n...   .",
]


def made(**values: object) -> dict[str, object]:
    """Metadata as a GGUF file has it."""
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def trained(normalizer, *splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A byte-level tokenizer built with the library's own classes, and trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splits))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text * 3 for text in TEXTS],
        trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", normalized=False), AddedToken("<|im_end|>", normalized=False)]
    )
    tokenizer.add_tokens([AddedToken("<b>", normalized=False)])
    return tokenizer


def as_metadata(tokenizer: Tokenizer, pre: str, **more: object) -> dict[str, object]:
    """What llama.cpp's converter stores of a tokenizer."""
    content = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    special = {added["content"]: 3 if added["special"] else 4 for added in content["added_tokens"]}
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    types = [special.get(token, 1) for token in tokens]
    return made(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=merges, **more)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


LETTERS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# As the tokenizer.json of SmolLM2, Llama 3, Qwen2 and GPT-2 have it.
ORIGINALS = {
    "smollm": (None, pre_tokenizers.Digits(individual_digits=True), GPT2),
    "gpt-2": (None, GPT2),
    "llama-bpe": (
        None,
        split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        LETTERS,
    ),
    "qwen2": (
        normalizers.NFC(),
        split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        LETTERS,
    ),
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_a_byte_level_tokenizer_is_rebuilt(pre):
    original = trained(*ORIGINALS[pre])
    rebuilt = Tokenizer.from_str(tokenizer_json(as_metadata(original, pre, add_bos_token=False), "here"))
    assert rebuilt.get_vocab(with_added_tokens=True) == original.get_vocab(with_added_tokens=True)
    for text in TEXTS:
        expected = original.encode(text)
        assert rebuilt.encode(text).tokens == expected.tokens, text
        assert rebuilt.encode(text).ids == expected.ids
        for skip in (True, False):
            assert rebuilt.decode(expected.ids, skip_special_tokens=skip) == original.decode(
                expected.ids, skip_special_tokens=skip
            )


def test_the_splits_differ_where_they_should():
    """Had the names been mixed up, these pieces would tell."""
    pieces = {}
    for pre in SPLITS:
        tokenizer = Tokenizer.from_str(
            tokenizer_json(made(model="gpt2", pre=pre, tokens=["a"], merges=[], add_bos_token=False), "here")
        )
        pieces[pre] = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It'S 12345x\n\ny")]
    assert pieces["gpt-2"] == ["It", "'", "S", "Ġ12345", "x", "Ċ", "Ċ", "y"]
    assert pieces["smollm"] == ["It", "'", "S", "Ġ", "1", "2", "3", "4", "5", "x", "Ċ", "Ċ", "y"]
    assert pieces["llama-bpe"] == ["It", "'S", "Ġ", "123", "45", "x", "ĊĊ", "y"]
    assert pieces["qwen2"] == ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "x", "ĊĊ", "y"]
    assert pieces["tekken"] == ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "x", "ĊĊ", "y"]
    assert pieces["deepseek-coder"] == ["It", "'", "S", "Ġ", "1", "2", "3", "4", "5", "x", "Ċ", "Ċ", "y"]
    assert pieces["default"] == ["It", "'", "S", "Ġ", "123", "45", "x", "Ċ", "Ċ", "y"]


def test_llama_3_keeps_a_word_that_is_a_token_and_puts_its_begin_in_front():
    tokens = ["a", "b", "c", "ab", "abc", "<|begin_of_text|>"]
    metadata = made(
        model="gpt2",
        pre="llama-bpe",
        tokens=tokens,
        token_type=[1, 1, 1, 1, 1, 3],
        merges=["a b"],
        bos_token_id=5,
    )
    assert Tokenizer.from_str(tokenizer_json(metadata, "here")).encode("abc").ids == [5, 4]
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert Tokenizer.from_str(tokenizer_json(metadata, "here")).encode("abc").ids == [4]


@pytest.mark.parametrize(
    ("flags", "one", "two"),
    [
        ({"add_bos_token": True, "add_eos_token": True}, [1, 5, 2], [1, 5, 2, 1, 7, 2]),
        ({"add_bos_token": True, "add_eos_token": False}, [1, 5], [1, 5, 1, 7]),
        ({"add_bos_token": False, "add_eos_token": True}, [5, 2], [5, 2, 7, 2]),
        ({"add_bos_token": False}, [5], [5, 7]),
        ({}, [1, 5], [1, 5, 1, 7]),  # SentencePiece models have a begin unless they say otherwise
    ],
)
def test_begin_and_end_are_added_as_the_file_says(flags, one, two):
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "b", "▁b"]
    metadata = made(model="llama", tokens=tokens, token_type=[2, 3, 3, 1, 1, 1, 1, 1], **flags)
    tokenizer = Tokenizer.from_str(tokenizer_json(metadata, "here"))
    assert tokenizer.encode("a").ids == one
    assert tokenizer.encode("a", "b").ids == two
    assert tokenizer.encode("a", add_special_tokens=False).ids == [5]


def test_smollm2_is_tokenised_as_its_makers_do():
    """The ids that transformers 5.22 finds with this file; its tokenizer is rebuilt there by other code."""
    tokenizer = Tokenizer.from_str(tokenizer_json(read_header(real_models.smollm2()).metadata, "here"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("Hello world").ids == [19556, 905]
    assert tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>").ids == [
        1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2,
    ]  # fmt: skip
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_ids_that_end_a_text_are_collected():
    metadata = read_header(real_models.smollm2()).metadata
    assert token_ids(metadata) == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    named = made(eos_token_id=4, eot_token_id=5, tokens=["<|im_end|>", "</s>"], token_type=[3, 1])
    assert token_ids(named) == {"eos_token_id": [4, 5, 0]}
    assert token_ids({}) == {}


def llama2_vocabulary() -> Vocabulary:
    """The 32,000 tokens of Llama 2 with their scores, as a Llama GGUF holds them."""
    tokens, scores, types = real_models.llama2c_vocabulary(real_models.llama2c_files()[1], 32000)
    return Vocabulary(tokens, types, scores)


def sentencepiece_ids(text: str, vocabulary: Vocabulary) -> list[int]:
    """SentencePiece's own way: again and again the best-scored pair of neighbours, the leftmost of equals."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens) if vocabulary.types[i] == 1}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (vocabulary.scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return found


def test_a_sentencepiece_tokenizer_finds_the_tokens_that_sentencepiece_finds():
    vocabulary = llama2_vocabulary()
    metadata = made(
        model="llama",
        tokens=vocabulary.tokens,
        token_type=vocabulary.types,
        scores=vocabulary.scores,
        add_bos_token=False,
    )
    tokenizer = Tokenizer.from_str(tokenizer_json(metadata, "here"))
    generator = random.Random(0)
    words = [token.replace("▁", " ") for token in vocabulary.tokens[259:]]
    mixed = ["".join(generator.choices(words, k=12)) for _ in range(300)]
    for text in [text for text in TEXTS if not re.search("<s>|</s>", text)] + mixed:
        assert tokenizer.encode(text).ids == sentencepiece_ids(text, vocabulary), text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("Hello world").ids == [15043, 3186]  # known from Llama 2
    assert tokenizer.encode("</s>hi").ids == [
        2,
        7251,
    ]  # with a space after the special token, as llama.cpp does


def test_merges_are_those_of_transformers():
    vocabulary = llama2_vocabulary()
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    skip = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind != 1]
    scores = {token: vocabulary.scores[i] for token, i in ids.items()}
    assert merges_of(vocabulary) == generate_merges(ids, scores, skip_tokens=skip)


def test_without_scores_the_vocabulary_is_the_order_of_merges():
    tokens = ["a", "b", "c", "bc", "ab", "abc"]
    for scores in ([], [-1000.0] * 6):
        assert merges_of(Vocabulary(tokens, [1] * 6, scores)) == [
            ("b", "c"),
            ("a", "b"),
            ("ab", "c"),
            ("a", "bc"),
        ]


def test_no_space_is_put_in_front_where_the_file_says_so():
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, 1, 1, 1, *[6] * 256]
    metadata = made(
        model="llama", tokens=tokens, token_type=types, scores=[0.0] * 5 + [-1.0] * 257, add_bos_token=False
    )
    with_prefix = Tokenizer.from_str(tokenizer_json(metadata, "here"))
    without = Tokenizer.from_str(tokenizer_json(metadata | made(add_space_prefix=False), "here"))
    assert with_prefix.encode("a a").tokens == ["▁a", "▁a"]
    assert without.encode("a a").tokens == ["a", "▁a"]
    assert with_prefix.decode(with_prefix.encode("a é").ids) == "a é"
    assert without.decode(without.encode(" a é").ids) == " a é"


def test_user_defined_tokens_are_whole_but_not_special():
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "<tool>"]
    metadata = made(model="llama", tokens=tokens, token_type=[2, 3, 3, 1, 1, 4], add_bos_token=False)
    tokenizer = Tokenizer.from_str(tokenizer_json(metadata, "here"))
    ids = tokenizer.encode("a<tool>").ids
    assert ids[-1] == 5
    assert tokenizer.decode(ids) == "a<tool>"


def test_a_whole_tokenizer_json_in_the_file_is_taken_as_it_is():
    text = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    assert tokenizer_json({"tokenizer.huggingface.json": text}, "here") == text
    with pytest.raises(CheckpointError, match=r"here: tokenizer\.huggingface\.json is not a tokenizer"):
        tokenizer_json({"tokenizer.huggingface.json": "{}"}, "here")


def test_a_file_without_tokenizer_has_none():
    assert tokenizer_json({}, "here") is None
    assert tokenizer_json(made(model="none"), "here") is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', supported are gpt2, llama"),
        ({"model": 3}, "tokenizer.ggml.model is 3"),
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre is 'kimi-k2', supported are gpt-2, smollm"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is not an array of str"),
        ({"tokens": []}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a", 3]}, "tokenizer.ggml.tokens is not an array of str"),
        ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries for 2 tokens"),
        ({"scores": [1.0]}, "tokenizer.ggml.scores has 1 entries for 2 tokens"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', wanted two tokens"),
        ({"add_bos_token": True}, "add_bos_token is set, but there is no bos_token_id"),
        ({"add_bos_token": True, "bos_token_id": 7}, "token 7 is not in the vocabulary of 2 tokens"),
        ({"bos_token_id": -1, "add_bos_token": True}, "bos_token_id is -1"),
        ({"model": "llama", "tokens": ["a", "b" * 600]}, "a token of more than 512 characters"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(values, words):
    metadata = made(model="gpt2", pre="gpt-2", tokens=["a", "b"], merges=[]) | made(**values)
    with pytest.raises(ConfigError) as caught:
        tokenizer_json(metadata, "here")
    assert words in str(caught.value)


def test_a_merge_of_unknown_tokens_is_refused():
    with pytest.raises(CheckpointError, match="here: the tokenizer is not a tokenizer that can be loaded"):
        tokenizer_json(made(model="gpt2", pre="gpt-2", tokens=["a", "b"], merges=["a c"]), "here")


def test_a_merge_may_begin_with_a_space():
    metadata = made(model="llama", tokens=["<unk>", " ", "b", " b"], merges=["  b"], add_bos_token=False)
    assert json.loads(tokenizer_json(metadata, "here"))["model"]["merges"] == [[" ", "b"]]


def test_empty_tokens_get_a_name():
    assert read_vocabulary(made(tokens=["a", "", ""])).tokens == ["a", "[EMPTY_1]", "[EMPTY_2]"]
