from __future__ import annotations

import pytest

from cache_svc.blocks.geometry import blocks_for
from cache_svc.blocks.table import BlockTable


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(num_tokens: int, expected: int) -> None:
    assert blocks_for(num_tokens, 16) == expected


def test_a_table_knows_what_it_misses_and_gives_its_blocks_up_once() -> None:
    table = BlockTable(4)
    assert table.num_missing(0) == 0
    assert table.num_missing(9) == 3
    table.extend([5, 1])
    assert (table.num_slots, table.num_missing(8), table.num_missing(9)) == (8, 0, 1)
    assert table.clear() == [5, 1]
    assert table.clear() == []
    assert table.num_slots == 0
