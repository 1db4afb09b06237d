"""Columns of the wire: little-endian int32 in a `bytes` field."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

assert array("i").itemsize == 4
_SWAP = sys.byteorder == "big"


def column(values: Iterable[int]) -> bytes:
    """Values as a column. Raises OverflowError beyond int32."""
    items = array("i", values)
    if _SWAP:
        items.byteswap()
    return items.tobytes()


def values(data: bytes) -> list[int]:
    """A column's values. Raises ValueError when its length is no multiple of 4."""
    items = array("i")
    items.frombytes(data)
    if _SWAP:
        items.byteswap()
    return items.tolist()
