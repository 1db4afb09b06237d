"""What an executor's lanes must hold once it has run every plan so far, as the digest that it works out as well."""

from __future__ import annotations

import sys
from array import array
from zlib import crc32

from scheduler_svc.core.running import RunningSet

_SWAP = sys.byteorder == "big"


def state_digest(running: RunningSet) -> int:
    """CRC-32 over lane, generation, positions and block table of each lane, in their order (docs/wire.md); O(blocks).

    Right after a plan was made: its releases, admissions, appended blocks and rows are in it.
    """
    crc = 0
    for seq in sorted(running, key=lambda seq: seq.lane):
        assert seq.table is not None, "it runs"
        block_ids = seq.table.block_ids
        column = array("I", (seq.lane, running.lanes.generation(seq.lane), seq.num_planned, len(block_ids), *block_ids))
        if _SWAP:
            column.byteswap()
        crc = crc32(column, crc)
    return crc
