"""Finds stop strings in generated text as it comes, and lets no character of one out.

The rule, for any cut of the text into pieces: characters come one after another; the first character that completes
a stop string ends the output there, and of several completed by it the longest counts. A stop string completed by a
token below the floor (`min_tokens`) is ordinary text. Text is held back only while it is a proper prefix of some stop
string that may still be completed.

Each stop string is matched by its own Knuth-Morris-Pratt automaton: linear in the text, no matter what a client sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The output ends with `text` (what had not been released yet) because `stop` was completed."""

    text: str
    stop: str


class _Pattern:
    """One stop string and how much of it the text's end matches."""

    __slots__ = ("fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self.fallback = _failure_table(text)

    def feed(self, char: str) -> bool:
        """Take one character; whether it completes the string (the automaton then goes on from its longest border)."""
        k = self.matched
        while k and self.text[k] != char:
            k = self.fallback[k]
        if self.text[k] == char:
            k += 1
        complete = k == len(self.text)
        self.matched = self.fallback[k] if complete else k
        return complete


def _failure_table(text: str) -> list[int]:
    """For each length k, the length of the longest proper prefix of text that is a suffix of text[:k]."""
    table = [0] * (len(text) + 1)
    k = 0
    for i in range(1, len(text)):
        while k and text[k] != text[i]:
            k = table[k]
        if text[k] == text[i]:
            k += 1
        table[i + 1] = k
    return table


class Stopper:
    """The stop-string state of one output. After a `StopMatch` it is finished."""

    __slots__ = ("_held", "_include_stop", "_patterns")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`stops` are not empty strings. With `include_stop` the matched string stays in the text."""
        # Longest first, so that the first one found complete is the one that counts.
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> str | StopMatch:
        """Take text of one token; returns what may be released, or the match. `armed` is False below the floor."""
        if not self._patterns or not text:
            return text
        released = self._held + text
        position = len(self._held)
        for char in text:
            position += 1
            completed = [p for p in self._patterns if p.feed(char)]
            if completed and armed:
                return self._match(released[:position], completed[0].text)
        held = max(p.matched for p in self._patterns)
        cut = len(released) - held
        self._held = released[cut:]
        return released[:cut]

    def finish(self) -> str:
        """The output ended otherwise: what was held back."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str, stop: str) -> StopMatch:
        self._held = ""
        return StopMatch(text if self._include_stop else text[: len(text) - len(stop)], stop)
