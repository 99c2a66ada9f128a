"""What a lone token stands for, by the ways in which tokenizers write their tokens."""

from __future__ import annotations

import json

import pytest
import tiny_bundle
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from tfmx.runtime.tokenizer import Tokenizer

EURO = "€ 3, naïve 日本\n\t\x7f\u00ad"


def ours(raw: RawTokenizer) -> Tokenizer:
    return Tokenizer(raw.to_str().encode())


def test_bytes_of_a_text_are_those_of_its_tokens():
    tokenizer = ours(tiny_bundle.tiny_tokenizer())
    ids = tokenizer.encode(EURO, add_special=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == EURO.encode()
    assert any(tokenizer.decode([token_id]) == "\ufffd" for token_id in ids)  # what a text alone would lose


def test_every_byte_has_its_token():
    """The alphabet is that of tokenizers itself."""
    alphabet = tiny_bundle.pre_tokenizers.ByteLevel.alphabet()
    raw = RawTokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(alphabet))}, merges=[]))
    raw.decoder = decoders.ByteLevel()
    tokenizer = ours(raw)
    found = [tokenizer.token_bytes(token_id) for token_id in range(256)]
    assert sorted(found) == [bytes([byte]) for byte in range(256)]
    for token_id, spelled in enumerate(found):
        assert tokenizer.decode([token_id]) == spelled.decode("utf-8", "replace")


def test_a_special_token_is_its_name():
    tokenizer = ours(tiny_bundle.tiny_tokenizer())
    name = tokenizer.token(256)
    assert tokenizer.token_bytes(256) == name.encode()
    assert tokenizer.token_bytes(10**6) is None


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
)
def test_a_sentencepiece_token_keeps_the_space_before_its_word(decoder):
    vocab = {"<unk>": 0, "<0xE2>": 1, "▁Paris": 2, "é": 3, "▁▁": 4}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoder
    raw.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer = ours(raw)
    found = [tokenizer.token_bytes(token_id) for token_id in range(5)]
    assert found == [b"<unk>", b"\xe2", b" Paris", "é".encode(), b"  "]


def test_a_tokenizer_without_a_decoder_spells_its_tokens():
    raw = RawTokenizer(models.WordLevel({"a": 0, "Ġb": 1}, unk_token="a"))
    assert json.loads(raw.to_str())["decoder"] is None
    assert [ours(raw).token_bytes(token_id) for token_id in (0, 1)] == [b"a", "Ġb".encode()]
