"""The host tier: bytes of host blocks, addressed by block id, laid out like the device pool's blocks.

On a CPU this is ordinary memory; beside a GPU the same memory is registered with the driver (`kv.copy_cuda`), because
page-locked allocation through torch rounds up to powers of two. Nothing here knows what a block holds.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys

import numpy as np
from numpy.typing import NDArray


class HostPool:
    """`num_blocks` blocks of ordinary memory; 0 is a tier that is off.

    The system gives memory when a block is first written, not before. Raises OSError if there is no such address space.
    """

    def __init__(self, num_blocks: int, bytes_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block = bytes_per_block
        # Private, so that it is plain anonymous memory and no shared-memory file (huge pages, limits of /dev/shm).
        size = num_blocks * bytes_per_block
        if size > sys.maxsize:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if size else b""

    def block_bytes(self) -> NDArray[np.uint8]:
        """All blocks, (num_blocks, bytes_per_block) uint8, without a copy. The view keeps the memory."""
        return np.frombuffer(self._memory, np.uint8).reshape(self.num_blocks, self.bytes_per_block)
