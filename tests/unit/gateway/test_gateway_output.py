"""Ids, text and counts end at the same token, whichever rule ends the output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.gateway.output import Ending, EndKind, Output, StopRules
from scheduler_svc.gateway.tokenizer import TextTokenizer
from tests.unit.gateway.tiny_tokenizer import EOS, byte_level_tokenizer

TOKENIZER = TextTokenizer(byte_level_tokenizer())


def output(max_tokens: int = 100, eos: bool = True, own: frozenset[int] = frozenset(), **rules: object) -> Output:
    stop_ids = own | ({EOS} if eos else set())
    made = StopRules(max_tokens, stop_ids=stop_ids, own_stop_ids=own, **rules)  # type: ignore[arg-type]
    return Output(TOKENIZER.new_detokenizer(), made, TOKENIZER.literal)


def feed(out: Output, ids: list[int]) -> tuple[list[int], str]:
    taken: list[int] = []
    text = ""
    for token_id in ids:
        out.push(token_id)
        if (piece := out.take()) is not None:
            assert piece.first_index == len(taken)
            taken += piece.token_ids
            text += piece.text
    return taken, text


def test_b37_a_stop_inside_a_multi_token_step_trims_ids_and_text() -> None:
    out = output(stop=("STOP",))
    for token_id in b"abcSTOPdef":
        out.push(token_id)
    piece = out.take()
    assert piece is not None
    assert piece.token_ids == [*b"abcSTOP"]
    assert piece.text == "abc"
    assert out.ending == Ending(EndKind.STOP, stop_string="STOP")
    assert out.take() is None


def test_b42_the_end_of_turn_is_an_id_but_no_text() -> None:
    out = output()
    assert feed(out, [72, 105, EOS, 65]) == ([72, 105, EOS], "Hi")
    assert out.ending == Ending(EndKind.STOP)


def test_own_stop_ids_are_named_and_have_no_text() -> None:
    out = output(own=frozenset({33}))
    assert feed(out, [72, 33, 65]) == ([72, 33], "H")
    assert out.ending == Ending(EndKind.STOP, stop_token_id=33)


@pytest.mark.parametrize(("ids", "text"), [([72, 33], "H!"), ([72, EOS], "H<|im_end|>")])
def test_include_stop_shows_the_token(ids: list[int], text: str) -> None:
    out = output(own=frozenset({33}), include_stop=True)
    assert feed(out, ids) == (ids, text)


def test_ignored_end_of_sequence_ids_are_ordinary() -> None:
    out = output(eos=False)
    feed(out, [72, EOS, 105])
    assert out.ending is None
    assert out.token_ids == [72, EOS, 105]


@pytest.mark.parametrize("last", [[EOS], [*b"END"]])
def test_b45_stop_on_the_last_token_wins_over_length(last: list[int]) -> None:
    ids = [*b"ab", *last]
    out = output(max_tokens=len(ids), stop=("END",))
    assert feed(out, ids) == (ids, "ab")
    assert out.ending is not None
    assert out.ending.kind is EndKind.STOP


def test_length_releases_what_was_held_back() -> None:
    out = output(max_tokens=3, stop=("cd",))
    assert feed(out, [*b"abcd"]) == ([*b"abc"], "abc")
    assert out.ending == Ending(EndKind.LENGTH)


def test_length_in_the_middle_of_a_character_says_so() -> None:
    out = output(max_tokens=2)
    assert feed(out, [*"😀".encode()])[1] == "\ufffd"


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 2), (2, 3)])
def test_b43_stop_ids_count_only_behind_the_floor(min_tokens: int, expected: int) -> None:
    out = output(min_tokens=min_tokens)
    feed(out, [EOS] * 5)
    assert len(out.token_ids) == expected


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_b43_stop_strings_count_from_the_token_that_reaches_the_floor(min_tokens: int, expected: int) -> None:
    out = output(min_tokens=min_tokens, stop=("x",))
    feed(out, [*b"xxxxx"])
    assert len(out.token_ids) == expected


def test_an_end_from_outside_flushes_once() -> None:
    out = output(stop=("abc",))
    feed(out, [*b"ab"])
    out.end(Ending(EndKind.CANCELLED))
    out.end(Ending(EndKind.LENGTH))
    piece = out.take()
    assert piece is not None
    assert piece.text == "ab"
    assert out.ending == Ending(EndKind.CANCELLED)


@given(st.lists(st.integers(0, 258), max_size=50), st.integers(1, 9), st.integers(1, 60), st.integers(0, 5))
def test_taking_at_any_moments_gives_the_same_whole(ids: list[int], size: int, max_tokens: int, floor: int) -> None:
    rules: dict[str, object] = {"stop": ("ab", "\ufffd"), "min_tokens": floor, "max_tokens": max_tokens}
    one, many = output(**rules), output(**rules)  # type: ignore[arg-type]
    expected = feed(one, ids)
    got_ids: list[int] = []
    text = ""
    for start in range(0, len(ids), size):
        for token_id in ids[start : start + size]:
            many.push(token_id)
        if (piece := many.take()) is not None:
            got_ids += piece.token_ids
            text += piece.text
    assert (got_ids, text) == expected
    assert many.ending == one.ending
