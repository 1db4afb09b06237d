from __future__ import annotations

import pytest

from cache_svc.blocks.geometry import blocks_for, slot_mapping, slot_of
from cache_svc.blocks.table import BlockTable


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(num_tokens: int, expected: int) -> None:
    assert blocks_for(num_tokens, 16) == expected


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_slot_mapping_is_slot_of_each_position(block_size: int) -> None:
    block_ids = [7, 2, 9, 0, 5, 30, 11, 4, 3, 8, 6, 1]
    for start in range(6):
        for count in range(len(block_ids) * block_size - start):
            expected = [slot_of(block_ids, position, block_size) for position in range(start, start + count)]
            assert slot_mapping(block_ids, start, count, block_size) == expected


def test_a_position_past_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        slot_of([3], 4, 4)
    with pytest.raises(IndexError):
        slot_mapping([3], 2, 3, 4)


def test_a_table_knows_what_it_misses_and_gives_its_blocks_up_once() -> None:
    table = BlockTable(4)
    assert table.num_missing(0) == 0
    assert table.num_missing(9) == 3
    table.extend([5, 1])
    assert (table.num_slots, table.num_missing(8), table.num_missing(9)) == (8, 0, 1)
    assert table.slot(5) == 1 * 4 + 1
    assert table.clear() == [5, 1]
    assert table.clear() == []
    assert table.num_slots == 0
