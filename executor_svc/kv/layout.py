"""What lies where inside a block, behind one protocol: how keys and values get in, and how they are read back.

Block-major, so that one block is one contiguous region and one copy; head-major inside, because attention reads one KV
head's positions as one stream::

    values  [num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]     of the KV type
    scales  [num_layers, 2 (K, V), num_kv_heads, block_size]               bfloat16, only beside int8

The scales lie in the block, after its values. Whoever moves blocks moves bytes and knows neither.
"""

from __future__ import annotations

from typing import Protocol

import torch

from executor_svc.kv.geometry import KvGeometry


class KvBlocks(Protocol):
    """All blocks of a pool. An index made once serves every layer of a step."""

    geometry: KvGeometry
    values: torch.Tensor
    """(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), as they are stored; a view."""

    def store_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Where `store` puts the tokens of these slots, (num_tokens,) int64."""
        ...

    def store(self, layer: int, index: torch.Tensor, kv: torch.Tensor) -> None:
        """Write (num_tokens, 2, num_kv_heads, head_dim) of any floating point type."""
        ...

    def gather_index(self, tables: torch.Tensor) -> torch.Tensor:
        """Where `gather` finds the blocks (num_rows, blocks_per_row), int64."""
        ...

    def gather(self, layer: int, index: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys and values of whole blocks: (2, num_rows * num_kv_heads, positions, head_dim) of `dtype`.

        The next gather reuses its memory. A position that was never written, or was written something not finite, may
        read back as anything, NaN included, but what is not finite never reads back as a finite number.
        """
        ...

    def gathered_bytes(self, num_positions: int) -> int:
        """Memory that a gather of so many positions fills; of int8 blocks, at float32."""
        ...


class Workspace:
    """Memory for one tensor after another; the same each time, since fresh memory costs page faults."""

    def __init__(self) -> None:
        self._held = torch.empty(0)

    def take(self, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor on the device of `like`, of its dtype or `dtype`; ends the life of the last one."""
        dtype = dtype or like.dtype
        need = 1
        for size in shape:
            need *= size
        held = self._held
        if held.numel() < need or held.dtype != dtype or held.device != like.device:
            with torch.inference_mode(False):
                self._held = torch.empty(need, dtype=dtype, device=like.device)
        return self._held[:need].view(shape)


def first_rows(blocks: torch.Tensor, g: KvGeometry) -> torch.Tensor:
    """(…) block ids to the rows of layer 0 in them, (…, 2, num_kv_heads), counted in heads of one layer's K or V."""
    pieces = torch.arange(2 * g.num_kv_heads, device=blocks.device).view(2, g.num_kv_heads)
    return (blocks * (g.num_layers * 2 * g.num_kv_heads))[..., None, None] + pieces
