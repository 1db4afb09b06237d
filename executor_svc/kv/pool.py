"""The paged KV pool: bytes of all blocks of one tier, addressed by block id.

Block-major, so that one block is one contiguous region and one copy::

    [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]

Head-major inside a block: attention reads one KV head's positions as one stream.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of one block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Of one block over all layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


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
        g = geometry
        self.data = torch.frombuffer(self._memory, dtype=g.dtype).view(
            num_blocks, g.num_layers, 2, g.num_kv_heads, g.block_size, g.head_dim
        )

    def rows(self) -> torch.Tensor:
        """The pool as (num_blocks * num_layers * 2 * num_kv_heads, block_size * head_dim), without a copy.

        Row ``((block * num_layers + layer) * 2 + kv) * num_kv_heads + head`` is one head's positions in one block.
        """
        return self.data.view(-1, self.geometry.block_size * self.geometry.head_dim)

    def slots(self) -> torch.Tensor:
        """The pool as (…, head_dim): `rows` with each position a row of its own, without a copy."""
        return self.data.view(-1, self.geometry.head_dim)

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
            self.data[run.dst : run.dst + run.length].copy_(self.data[run.src : run.src + run.length])


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
