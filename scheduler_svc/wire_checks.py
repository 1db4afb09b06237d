"""What both codecs check in the same way: columns, and the largest number there is."""

from __future__ import annotations

from pagemill.columns import unpack

MAX_COUNT = 2**31 - 1
"""Largest id, count or size of anything on the wire."""


class WireError(ValueError):
    """A message that parses but says what cannot be."""


def column(data: bytes, name: str, max_len: int | None = None) -> list[int]:
    """The ints of a column, at most `max_len`. Raises WireError."""
    try:
        return unpack(data, name, max_len)
    except ValueError as error:
        raise WireError(str(error)) from None
