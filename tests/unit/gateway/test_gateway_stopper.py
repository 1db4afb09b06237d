"""Stop strings against a naive search over the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_svc.gateway.stopper import StopMatch, Stopper, _failure_table

SMALL = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], floor: int = 0) -> tuple[str, str] | None:
    """(text before the stop, the stop): first completed behind `floor` characters, longest of several."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found and end > floor:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return None


def run(chunks: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    stopper = Stopper(stops)
    released: list[str] = []
    for chunk in chunks:
        got = stopper.push(chunk)
        if isinstance(got, StopMatch):
            return "".join([*released, got.text]), got.stop, [*released, got.text]
        released.append(got)
    return "".join([*released, stopper.finish()]), None, released


@given(SMALL, STOPS, st.integers(1, 7))
@example("aab", ["ab"], 1)
@example("aaab", ["aab", "ab", "b"], 2)
def test_equals_the_naive_search_for_any_chunks(text: str, stops: list[str], size: int) -> None:
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    kept, stop, _ = run(chunks, stops)
    expected = naive(text, stops)
    assert (kept, stop) == (expected if expected else (text, None))


@given(SMALL, STOPS)
def test_b34_no_character_of_a_stop_string_leaves(text: str, stops: list[str]) -> None:
    """At every moment what has left is the beginning of the text without the stop."""
    final = (naive(text, stops) or (text, ""))[0]
    stopper, out = Stopper(stops), ""
    for char in text:
        got = stopper.push(char)
        if isinstance(got, StopMatch):
            break
        out += got
        assert final.startswith(out)


@given(SMALL, STOPS)
def test_b35_only_a_real_prefix_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    stopper, out = Stopper(stops), ""
    for i, char in enumerate(text):
        got = stopper.push(char)
        if isinstance(got, StopMatch):
            break
        out += got
        held = text[len(out) : i + 1]
        assert not held or any(s.startswith(held) and s != held for s in stops)


@given(SMALL, STOPS, st.integers(0, 12))
@example("aaa", ["aa"], 2)
@example("ababab", ["abab"], 5)
def test_b43_stops_below_the_floor_are_text(text: str, stops: list[str], floor: int) -> None:
    stopper, out, stop = Stopper(stops), "", None
    for i, char in enumerate(text):
        got = stopper.push(char, armed=i + 1 > floor)
        if isinstance(got, StopMatch):
            out, stop = out + got.text, got.stop
            break
        out += got
    else:
        out += stopper.finish()
    expected = naive(text, stops, floor)
    assert stop == (expected[1] if expected else None)
    assert out == (expected[0] if expected else text)


@given(SMALL, STOPS)
def test_include_stop_keeps_the_string(text: str, stops: list[str]) -> None:
    stopper, out = Stopper(stops, include_stop=True), ""
    for char in text:
        got = stopper.push(char)
        if isinstance(got, StopMatch):
            out += got.text
            break
        out += got
    else:
        out += stopper.finish()
    expected = naive(text, stops)
    assert out == ("".join(expected) if expected else text)


@given(st.text(alphabet="ab", min_size=1, max_size=12))
@example("aabaaa")
def test_borders_are_the_longest(text: str) -> None:
    """The longest proper prefix of the string that ends each beginning of it."""
    expected = [max((n for n in range(k) if text[:k].endswith(text[:n])), default=0) for k in range(len(text) + 1)]
    assert _failure_table(text) == expected


def test_a_stop_below_the_floor_may_be_the_beginning_of_one_behind_it() -> None:
    stopper = Stopper(["aa"])
    assert stopper.push("a", armed=False) == ""
    assert stopper.push("a", armed=False) == "a"  # ordinary text, of which the last character may begin another
    assert stopper.push("a") == StopMatch("", "aa")


def test_b46_matching_is_linear_in_the_text() -> None:
    stopper = Stopper(["a" * 63 + "b"] * 4)
    assert stopper.push("a" * 100_000) == "a" * (100_000 - 63)
