"""Pieces of text joined equal the text of the whole, and no piece holds half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from scheduler_svc.gateway.detokenizer import WindowDetokenizer, decode_all
from scheduler_svc.gateway.tokenizer import TextTokenizer
from tests.unit.gateway.tiny_tokenizer import byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer(words=("<tool>", "日本"))
BYTES = TextTokenizer(BYTE_LEVEL)


def _fallback_tokenizer() -> Tokenizer:
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    for word in ("▁", "▁Hello", "▁world", "a", "é", "▁▁▁", "日"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


FALLBACK = _fallback_tokenizer()
FALLBACK_TEXT = TextTokenizer(FALLBACK)


def pieces(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.new_detokenizer()
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(st.text(max_size=40))
def test_any_text_comes_back_whole_and_without_a_replacement_character(text: str) -> None:
    got = pieces(BYTES, list(text.encode()))
    assert "".join(got) == text
    assert all("\ufffd" not in piece for piece in got) or "\ufffd" in text


@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=60))
def test_joined_pieces_equal_the_decoder_of_the_library_for_any_ids(ids: list[int]) -> None:
    assert "".join(pieces(BYTES, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=60), st.integers(1, 7))
def test_the_cut_into_chunks_does_not_matter(ids: list[int], size: int) -> None:
    """B30: one token per chunk and seven per chunk."""
    detokenizer = BYTES.new_detokenizer()
    chunks = ["".join(map(detokenizer.push, ids[i : i + size])) for i in range(0, len(ids), size)]
    assert "".join([*chunks, detokenizer.finish()]) == decode_all(BYTES.new_detokenizer(), ids)


@pytest.mark.parametrize("text", ["😀", "한국어", "日本", "é", "👩‍👩‍👧‍👦", "🇩🇪"])
def test_b30_characters_appear_whole_at_their_last_byte(text: str) -> None:
    detokenizer = BYTES.new_detokenizer()
    for char in text:
        raw = char.encode()
        assert [detokenizer.push(b) for b in raw] == [""] * (len(raw) - 1) + [char]


def test_truly_invalid_bytes_become_replacement_characters() -> None:
    assert "".join(pieces(BYTES, [0xFF, 0x41, 0xE2, 0x82])) == "\ufffdA\ufffd"


def test_special_tokens_have_no_text() -> None:
    assert "".join(pieces(BYTES, [72, 256, 257, 105, 258])) == "Hi"


def test_byte_fallback_text_equals_the_library_where_bytes_are_valid() -> None:
    vocab = FALLBACK.get_vocab()
    ids = [vocab["▁Hello"], vocab["▁world"], *(vocab[f"<0x{b:02X}>"] for b in "😀é".encode()), vocab["a"], vocab["▁▁▁"]]
    assert "".join(pieces(FALLBACK_TEXT, ids)) == FALLBACK.decode(ids) == "Hello world😀éa   "


@given(st.lists(st.sampled_from([0, *range(257, 266)]), max_size=30))
def test_byte_fallback_without_byte_tokens_equals_the_library(ids: list[int]) -> None:
    ids = [i for i in ids if i < FALLBACK_TEXT.vocab_size]
    assert "".join(pieces(FALLBACK_TEXT, ids)) == FALLBACK.decode(ids)


@given(st.text(max_size=30))
def test_the_window_method_gives_the_same_as_bytes(text: str) -> None:
    window = WindowDetokenizer(lambda ids: BYTE_LEVEL.decode(ids, skip_special_tokens=True))
    assert decode_all(window, list(text.encode())) == text


@given(st.lists(st.integers(0, 258), max_size=40))
def test_the_window_method_never_loses_a_valid_character(ids: list[int]) -> None:
    window = WindowDetokenizer(lambda i: BYTE_LEVEL.decode(i, skip_special_tokens=True))
    got = decode_all(window, ids)
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    assert got.replace("\ufffd", "") == whole.replace("\ufffd", "")
