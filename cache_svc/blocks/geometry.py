"""How token positions map to blocks and slots. Pure arithmetic, which an executor may use too."""

from __future__ import annotations

from collections.abc import Sequence


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions; 0 for 0."""
    return -(-num_tokens // block_size)


def slot_of(block_ids: Sequence[int], position: int, block_size: int) -> int:
    """The physical slot of a position: `block_id * block_size + offset`. IndexError past the table."""
    return block_ids[position // block_size] * block_size + position % block_size


def slot_mapping(block_ids: Sequence[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    """Slots of positions `start` to `start + num_tokens - 1`, in order. IndexError past the table."""
    slots: list[int] = []
    position, end = start, start + num_tokens
    while position < end:
        index, offset = divmod(position, block_size)
        num_here = min(block_size - offset, end - position)
        first = block_ids[index] * block_size + offset
        slots.extend(range(first, first + num_here))
        position += num_here
    return slots
