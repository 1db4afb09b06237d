"""The paged KV pool: bytes of all blocks of one tier, addressed by block id. What the bytes mean is in `layout`."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

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
    are zero and cost nothing until they are touched (`torch.zeros` would write all of them).
    """

    def __init__(self, geometry: KvGeometry, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block (got {num_blocks})")
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._memory = mmap.mmap(-1, num_blocks * geometry.bytes_per_block)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8).view(num_blocks, geometry.bytes_per_block)
        layout = Int8Blocks if geometry.scale_bytes else FloatBlocks
        self.blocks: KvBlocks = layout(self._bytes, geometry)
        """The same memory as keys and values."""

    def block_bytes(self) -> NDArray[np.uint8]:
        """All blocks as plain bytes, (num_blocks, bytes_per_block), without a copy: what moves between tiers.

        A block's bytes are the same content under any id of any pool of the same geometry. The view keeps the memory.
        """
        return np.frombuffer(self._memory, np.uint8).reshape(self.num_blocks, self.geometry.bytes_per_block)

    def copy_blocks(self, src: SequenceABC[int], dst: SequenceABC[int]) -> None:
        """Copy whole blocks, as if pair by pair in order. Raises ValueError for ids outside the pool."""
        if len(src) != len(dst):
            raise ValueError(f"{len(src)} sources for {len(dst)} destinations")
        for block in (*src, *dst):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is outside the pool of {self.num_blocks} blocks")
        for run in _runs(src, dst):
            self._bytes[run.dst : run.dst + run.length].copy_(self._bytes[run.src : run.src + run.length])


@dataclass(frozen=True, slots=True)
class _Run:
    src: int
    dst: int
    length: int


def _runs(src: SequenceABC[int], dst: SequenceABC[int]) -> Iterator[_Run]:
    """Pairs joined where both sides go on by one: a copy call costs microseconds however short it is.

    A run is cut before its regions would overlap, where one big copy would differ from pair after pair.
    """
    start = 0
    for i in range(1, len(src) + 1):
        goes_on = i < len(src) and src[i] == src[i - 1] + 1 and dst[i] == dst[i - 1] + 1
        if goes_on and i - start < abs(src[start] - dst[start]):
            continue
        if i > start:
            yield _Run(src[start], dst[start], i - start)
        start = i
