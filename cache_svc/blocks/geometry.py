"""How token positions map to blocks. Pure arithmetic, which an executor may use too."""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions; 0 for 0."""
    return -(-num_tokens // block_size)
