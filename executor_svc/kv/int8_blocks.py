"""Blocks of int8 with one scale per position and head, kept in the block behind the values: 0.516 of bfloat16's bytes.

A vector x of head_dim numbers is stored as round(x / scale), with scale = max |x| / 127 rounded to bfloat16. Rounding
makes the scale at most 2**-8 too small, and 127 * (1 + 2**-8) is still below 127.5: nothing is clipped, and each number
reads back within half a scale of itself, max |x| / 253.

Why a scale per position: blocks are written token by token, and a scale that many positions share would have to be
known before the last of them. However a batch looks and a prompt is cut, a token's bytes depend on its own keys and
values only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor_svc.kv.geometry import SCALE_DTYPE, KvGeometry
from executor_svc.kv.layout import Workspace, first_rows

_LARGEST = 127
_SMALLEST_SCALE = torch.finfo(SCALE_DTYPE).tiny
"""Vectors with no number above 127 times this, 1.5e-36, become zeros: below, scales would be subnormal and coarse."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Vectors as int8 and their scales: `values` (…, head_dim) int8, `scales` (…) bfloat16."""

    values: torch.Tensor
    scales: torch.Tensor


def quantise(x: torch.Tensor) -> Quantised:
    """Vectors (…, head_dim) of a floating point type as int8.

    A vector with a number that is not finite gets a scale of NaN or infinity, and zeros: times those, it reads back as
    NaN throughout.
    """
    x = x.float()
    scales = (x.abs().amax(-1) / _LARGEST).to(SCALE_DTYPE)
    exact = scales.float()
    inverse = torch.where(exact < _SMALLEST_SCALE, 0.0, exact.reciprocal())
    values = (x * inverse[..., None]).nan_to_num_(0.0).round_()  # a NaN has no int8; inf * (1 / inf) is one too
    return Quantised(values.to(torch.int8), scales)


class Int8Blocks:
    """`KvBlocks` of int8 with scales.

    Blocks are as many bytes apart as a whole number of rows of head_dim bytes (`KvGeometry.bytes_per_block`), so one
    index addresses the values of all blocks flat.
    """

    def __init__(self, memory: torch.Tensor, geometry: KvGeometry) -> None:
        g = self.geometry = geometry
        num_values = g.num_vectors * g.head_dim
        flat = memory.view(torch.int8)
        shape = (-1, g.num_layers, 2, g.num_kv_heads, g.block_size)
        self.values = flat[:, :num_values].view(*shape, g.head_dim)
        pairs = memory.view(SCALE_DTYPE)  # num_values is even: keys and values
        self._first_scale = num_values // SCALE_DTYPE.itemsize
        tail = pairs[:, self._first_scale : self._first_scale + g.num_vectors]
        self.scales = tail.view(shape)
        self._slots = flat.view(-1, g.head_dim)
        self._flat_scales = pairs.view(-1)
        self._gathered, self._read, self._read_scales = Workspace(), Workspace(), Workspace()

    def store_index(self, slots: torch.Tensor) -> torch.Tensor:
        """As `KvBlocks.store_index`: (2, n) rows of `_slots`, and places in `_flat_scales`, of layer 0."""
        g = self.geometry
        block, offset = slots // g.block_size, slots % g.block_size
        inside = first_rows(torch.zeros_like(block), g) * g.block_size + offset[:, None, None]
        values = inside + (block * (g.bytes_per_block // g.head_dim))[:, None, None]
        scales = inside + (block * (g.bytes_per_block // SCALE_DTYPE.itemsize) + self._first_scale)[:, None, None]
        return torch.stack((values.reshape(-1), scales.reshape(-1)))

    def store(self, layer: int, index: torch.Tensor, kv: torch.Tensor) -> None:
        """As `KvBlocks.store`."""
        g = self.geometry
        quantised = quantise(kv.reshape(-1, g.head_dim))
        rows, places = index + layer * 2 * g.num_kv_heads * g.block_size
        self._slots.index_copy_(0, rows, quantised.values)
        self._flat_scales.index_copy_(0, places, quantised.scales)

    def gather_index(self, tables: torch.Tensor) -> torch.Tensor:
        """As `KvBlocks.gather_index`: the blocks, flat."""
        return tables.reshape(-1)

    def gather(self, layer: int, index: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        """As `KvBlocks.gather`: one layer of each block is one piece, made into numbers head by head."""
        g = self.geometry
        inner = (num_rows, -1, 2, g.num_kv_heads, g.block_size)
        values, scales = self.values[:, layer].flatten(1), self.scales[:, layer].flatten(1)
        read = self._read.take((index.numel(), values.shape[1]), values)
        read_scales = self._read_scales.take((index.numel(), scales.shape[1]), scales)
        torch.index_select(values, 0, index, out=read)
        torch.index_select(scales, 0, index, out=read_scales)
        shape = (2, num_rows, g.num_kv_heads, index.numel() // num_rows, g.block_size, g.head_dim)
        out = self._gathered.take(shape, read, dtype)
        out.copy_(read.view(*inner, g.head_dim).permute(2, 0, 3, 1, 4, 5))  # whole numbers below 128: exact in any type
        out.mul_(read_scales.to(dtype).view(inner).permute(2, 0, 3, 1, 4)[..., None])
        return out.view(2, num_rows * g.num_kv_heads, -1, g.head_dim)

    def gathered_bytes(self, num_positions: int) -> int:
        """As `KvBlocks.gathered_bytes`: what is read, and what is made of it."""
        g = self.geometry
        return num_positions * 2 * g.num_kv_heads * (g.head_dim * (1 + 4) + SCALE_DTYPE.itemsize)
