"""The shape of one KV block, and how many bytes that makes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SCALE_DTYPE = torch.bfloat16
"""Of the scales of int8 blocks. The range of float32, so that no finite value is out of reach, in two bytes: one
position of a head of 64 takes 66 bytes, with float32 scales 68. The 8 bits of its significand make a step at most 0.4 %
wider and clip nothing (see `executor_svc.kv.int8_blocks`)."""

_CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of one block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Of keys and values as they lie in the block: a floating point type, or int8 with scales beside them."""

    @property
    def num_vectors(self) -> int:
        """Keys and values in a block, each a vector of head_dim numbers."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size

    @property
    def scale_bytes(self) -> int:
        """Of the scales in a block; 0 for floating point types."""
        return 0 if self.dtype.is_floating_point else self.num_vectors * SCALE_DTYPE.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Of one block over all layers, keys and values, and scales if it has any.

        With scales it is a multiple of head_dim, so that the pool is also rows of head_dim bytes, and of a cache line,
        so that every block begins on one. Nothing is added to blocks of 16 positions and heads of 64 or 128.
        """
        values = self.num_vectors * self.head_dim * self.dtype.itemsize
        if not self.scale_bytes:
            return values
        step = math.lcm(self.head_dim, _CACHE_LINE_BYTES)
        return -(-(values + self.scale_bytes) // step) * step

    @property
    def arithmetic(self) -> str:
        """`bytes_per_block` in words, for the log."""
        vector = f"{self.head_dim} x {self.dtype.itemsize} bytes"
        if self.scale_bytes:
            vector = f"({vector} + scale {SCALE_DTYPE.itemsize})"
        padding = self.bytes_per_block - self.num_vectors * self.head_dim * self.dtype.itemsize - self.scale_bytes
        return (
            f"2 x {self.num_layers} layers x {self.num_kv_heads} heads x {self.block_size} positions x {vector}"
            f"{f' + padding {padding}' if padding else ''} = {self.bytes_per_block} bytes"
        )
