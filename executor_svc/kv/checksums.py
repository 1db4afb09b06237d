"""A debugging aid (`--verify-copies`): what leaves a block must be what comes back to one.

CRC-32 is taken of both sides of each copied block and kept with the host block. A block whose bytes are not what they
were is *bad*, and so is every copy of it; rows that would read it fail. Runs on the copy stream, right after the copy.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]

_UNKNOWN, _BAD = -1, -2


class BlockChecksums:
    """CRC-32 per host block, and which device blocks are bad."""

    def __init__(self, device: Bytes, host: Bytes) -> None:
        self._device = device
        self._host = host
        self._crcs = np.full(len(host), _UNKNOWN, np.int64)
        self._bad = np.zeros(len(device), np.bool_)
        self._num_mismatches = 0
        self._num_taken = 0

    def reset(self) -> None:
        """No host block has content, no device block is bad."""
        self._crcs[:] = _UNKNOWN
        self._bad[:] = False

    def take_mismatches(self) -> int:
        """Blocks found bad since the last call; a copy of a bad block is not counted again."""
        new = self._num_mismatches - self._num_taken
        self._num_taken += new
        return new

    @property
    def any_bad(self) -> bool:
        """Whether a device block is bad."""
        return bool(self._bad.any())

    def are_bad(self, blocks: Int32s) -> NDArray[np.bool_]:
        """Which of these device blocks are bad, in the shape of `blocks`."""
        bad: NDArray[np.bool_] = self._bad[blocks]
        return bad

    def overwritten(self, blocks: Int32s) -> None:
        """A batch writes these device blocks from their first position on: what they held does not matter any more."""
        self._bad[blocks] = False

    def after_swap_out(self, src: Int32s, dst: Int32s) -> None:
        """Device blocks `src` were copied to host blocks `dst`."""
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            crc = zlib.crc32(self._device[a])
            same = self._same(crc, zlib.crc32(self._host[b]))
            self._crcs[b] = crc if same and not self._bad[a] else _BAD

    def after_copy(self, src: Int32s, dst: Int32s) -> None:
        """Device blocks `src` were copied to device blocks `dst`."""
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            same = self._same(zlib.crc32(self._device[a]), zlib.crc32(self._device[b]))
            self._bad[b] = bool(self._bad[a]) or not same

    def after_swap_in(self, src: Int32s, dst: Int32s) -> None:
        """Host blocks `src` were copied to device blocks `dst`."""
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            crc = int(self._crcs[a])
            self._bad[b] = crc < 0 or not self._same(crc, zlib.crc32(self._device[b]))

    def _same(self, a: int, b: int) -> bool:
        self._num_mismatches += a != b
        return a == b
