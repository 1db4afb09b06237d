"""Blocks of floating point numbers: nothing but the values."""

from __future__ import annotations

import torch

from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.layout import Workspace, first_rows


class FloatBlocks:
    """`KvBlocks` of bfloat16 or float32.

    The pool is regular all the way down, so one index addresses it flat: `_rows` has one head's positions in one block
    per row, ``((block * num_layers + layer) * 2 + kv) * num_kv_heads + head``; `_slots` has each position as a row.
    """

    def __init__(self, memory: torch.Tensor, geometry: KvGeometry) -> None:
        g = self.geometry = geometry
        flat = memory.view(g.dtype)
        self.values = flat.view(-1, g.num_layers, 2, g.num_kv_heads, g.block_size, g.head_dim)
        self._rows = flat.view(-1, g.block_size * g.head_dim)
        self._slots = flat.view(-1, g.head_dim)
        self._workspace = Workspace()

    def store_index(self, slots: torch.Tensor) -> torch.Tensor:
        """As `KvBlocks.store_index`: rows of `_slots` in layer 0 for (token, K/V, head), flat and in that order."""
        size = self.geometry.block_size
        block, offset = slots // size, slots % size
        return (first_rows(block, self.geometry) * size + offset[:, None, None]).reshape(-1)

    def store(self, layer: int, index: torch.Tensor, kv: torch.Tensor) -> None:
        """As `KvBlocks.store`."""
        g = self.geometry
        rows = index + layer * 2 * g.num_kv_heads * g.block_size
        self._slots.index_copy_(0, rows, kv.reshape(-1, g.head_dim).to(g.dtype))

    def gather_index(self, tables: torch.Tensor) -> torch.Tensor:
        """As `KvBlocks.gather_index`: rows of `_rows` in layer 0, for (K/V, row, head, block), flat."""
        return first_rows(tables, self.geometry).permute(2, 0, 3, 1).reshape(-1)

    def gather(self, layer: int, index: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        """As `KvBlocks.gather`."""
        g = self.geometry
        rows = index + layer * 2 * g.num_kv_heads
        out = self._workspace.take((index.numel(), self._rows.shape[1]), self._rows)
        torch.index_select(self._rows, 0, rows, out=out)
        return out.view(2, num_rows * g.num_kv_heads, -1, g.head_dim).to(dtype)

    def gathered_bytes(self, num_positions: int) -> int:
        """As `KvBlocks.gathered_bytes`."""
        g = self.geometry
        return num_positions * 2 * g.num_kv_heads * g.head_dim * g.dtype.itemsize
