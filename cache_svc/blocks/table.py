"""`BlockTable`: which blocks hold the positions of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from cache_svc.blocks.geometry import blocks_for


class BlockTable:
    """Block `i` holds positions `i * block_size` to `(i + 1) * block_size - 1`. Holds one reference to each block."""

    __slots__ = ("block_ids", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_ids: list[int] = []

    @property
    def num_slots(self) -> int:
        """Positions that have a slot."""
        return len(self.block_ids) * self.block_size

    def num_blocks(self, num_positions: int) -> int:
        """Blocks that the first `num_positions` positions lie in."""
        return blocks_for(num_positions, self.block_size)

    def num_missing(self, num_positions: int) -> int:
        """Blocks to add so that the first `num_positions` positions have slots."""
        return max(0, blocks_for(num_positions, self.block_size) - len(self.block_ids))

    def extend(self, block_ids: Sequence[int]) -> None:
        """Appends blocks whose references now belong to this table."""
        self.block_ids.extend(block_ids)

    def clear(self) -> list[int]:
        """Empties the table and returns its blocks; the caller now owns the references."""
        block_ids, self.block_ids = self.block_ids, []
        return block_ids
