"""Columns of the wire: `bytes` of little-endian int32, to and from lists of ints. Standard library only.

Wire-identical to packed `repeated sfixed32`. Processes that have numpy may read them with ``frombuffer(data, "<i4")``.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

_SWAP = sys.byteorder == "big"
assert array("i").itemsize == 4, "columns need a 4-byte int"


def pack(values: Sequence[int]) -> bytes:
    """The column of `values`. OverflowError for one that is not an int32."""
    if not values:
        return b""
    column = array("i", values)
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def unpack(data: bytes, name: str = "column", max_len: int | None = None) -> list[int]:
    """The values of a column. ValueError naming it when it is no column or has more than `max_len` values."""
    if len(data) % 4:
        raise ValueError(f"Got {len(data)} bytes in {name} but expected a multiple of 4")
    if max_len is not None and len(data) > 4 * max_len:
        raise ValueError(f"Got {len(data) // 4} values in {name} but expected at most {max_len}")
    column = array("i")
    column.frombytes(data)
    if _SWAP:
        column.byteswap()
    return column.tolist()
