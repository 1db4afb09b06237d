"""The paged KV pool: bytes of all blocks of one tier, addressed by block id. What the bytes mean is in `layout`."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.kv.float_blocks import FloatBlocks
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.int8_blocks import Int8Blocks
from executor_svc.kv.layout import KvBlocks


class KvPool:
    """`num_blocks` zeroed blocks on the CPU.

    Memory is taken from the system when a block is first written, not before: the pages of a fresh anonymous mapping
    are zero and cost nothing until they are touched (`torch.zeros` would write all of them). Pages are large (2 MiB on
    x86) where the system gives such: one layer of a block is a few KiB, so a step touches thousands of places, and
    looking up their addresses took a sixth of the time of attention over 54 scattered rows (AMD EPYC of family 26).
    """

    def __init__(self, geometry: KvGeometry, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block (got {num_blocks})")
        self.geometry = geometry
        self.num_blocks = num_blocks
        # Private, for the system has large pages for private memory only, unless it was told otherwise.
        self._memory = mmap.mmap(-1, num_blocks * geometry.bytes_per_block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without large pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(self._memory, dtype=torch.uint8).view(num_blocks, geometry.bytes_per_block)
        layout = Int8Blocks if geometry.scale_bytes else FloatBlocks
        self.blocks: KvBlocks = layout(memory, geometry)
        """The same memory as keys and values."""

    def block_bytes(self) -> NDArray[np.uint8]:
        """All blocks as plain bytes, (num_blocks, bytes_per_block), without a copy: what moves between tiers.

        A block's bytes are the same content under any id of any pool of the same geometry. The view keeps the memory.
        """
        return np.frombuffer(self._memory, np.uint8).reshape(self.num_blocks, self.geometry.bytes_per_block)
