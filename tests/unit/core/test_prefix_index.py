"""What the prefix index finds, for whom, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_svc.blocks.pool import BlockPool
from scheduler_svc.core.params import SeqId, SequenceSpec
from scheduler_svc.core.prefix import MAX_NEW_KEYS, PrefixIndex
from scheduler_svc.core.sequence import Sequence
from tests.unit.core.kv_samples import allocate, started


def index(pool: BlockPool, host: BlockPool | None = None, *, is_on: bool = True) -> PrefixIndex:
    return PrefixIndex(pool, host, 4, ("model", "bfloat16"), is_on=is_on)


def test_only_full_blocks_match_and_the_last_token_never_does() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(8)), allocate(pool, 2))
    assert len(prefix.publish(first, 7)) == 1, "position 7 is not in"
    assert len(prefix.publish(first, 8)) == 1
    for length, num_blocks in ((4, 0), (5, 1), (8, 1), (9, 2), (30, 2)):
        other = Sequence(SequenceSpec(SeqId(2), list(range(length)), 5), priority=0)
        assert prefix.match(other).device_ids == [0, 1][:num_blocks], length


def test_a_match_stops_at_the_first_block_that_is_not_there() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(12)), allocate(pool, 3))
    prefix.publish(first, 12)
    pool.unpublish(1)
    other = Sequence(SequenceSpec(SeqId(2), list(range(13)), 5), priority=0)
    assert prefix.match(other).device_ids == [0]


@pytest.mark.parametrize("field", [{"cache_salt": b"b"}, {"adapter": "b"}, {"reads_prefix_cache": False}])
def test_another_tenant_or_adapter_finds_nothing_nor_does_who_does_not_read(field: dict[str, object]) -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    prefix.publish(started(1, list(range(8)), allocate(pool, 2)), 8)
    spec = SequenceSpec(SeqId(2), list(range(9)), 5)
    assert prefix.match(Sequence(spec, priority=0)).device_ids == [0, 1]
    assert prefix.match(Sequence(replace(spec, **field), priority=0)).device_ids == []  # type: ignore[arg-type]


def test_keys_made_for_one_model_do_not_serve_another() -> None:
    pool = BlockPool(8)
    seq = started(1, list(range(8)), allocate(pool, 2))
    index(pool).publish(seq, 8)
    keys = list(seq.prefix.keys)
    seq.prefix.num_published = 0
    other_pool = BlockPool(8)
    allocate(other_pool, 2)
    PrefixIndex(other_pool, None, 4, ("other model", "bfloat16"), is_on=True).publish(seq, 8)
    assert not set(keys) & set(seq.prefix.keys)


def test_keys_made_for_one_block_size_do_not_serve_another() -> None:
    seq = Sequence(SequenceSpec(SeqId(1), [1, 2, 3, 4, 5], 9), priority=0)
    PrefixIndex(BlockPool(8), None, 1, ("model", "bfloat16"), is_on=True).match(seq)
    pool = BlockPool(8)
    prefix = PrefixIndex(pool, None, 2, ("model", "bfloat16"), is_on=True)
    other = started(2, [1, 9, 9, 9], allocate(pool, 4))
    PrefixIndex(BlockPool(8), None, 1, ("model", "bfloat16"), is_on=True).match(other)
    prefix.publish(other, 2)
    assert prefix.match(seq).device_ids == [], "only its first token is the same"


def test_who_needs_what_another_is_computing_waits_until_it_is_there_or_the_other_leaves() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(12)), allocate(pool, 3))
    other = Sequence(SequenceSpec(SeqId(2), [*range(8), 99, 98], 5), priority=0)
    assert not prefix.match(other).should_wait
    prefix.expect(first, 8)
    assert not prefix.match(first).should_wait, "nobody waits for itself"
    assert prefix.match(other).should_wait
    assert prefix.must_wait(other)
    prefix.publish(first, 4)
    assert prefix.must_wait(other), "now for the second block"
    assert prefix.match(other).should_wait
    assert prefix.match(other).device_ids == [0]
    prefix.publish(first, 8)
    assert not prefix.must_wait(other)
    assert not prefix.match(other).should_wait
    assert prefix.match(other).device_ids == [0, 1]
    prefix.expect(first, 12)
    longer = Sequence(SequenceSpec(SeqId(3), list(range(14)), 5), priority=0)
    assert prefix.match(longer).should_wait
    prefix.leave(first)
    assert not prefix.match(longer).should_wait
    assert prefix.expected_by() == []


def test_a_very_long_match_is_looked_up_in_parts() -> None:
    num_blocks = 2 * MAX_NEW_KEYS + 10
    pool = BlockPool(num_blocks)
    prefix = index(pool)
    tokens = [number % 50_000 for number in range(4 * num_blocks)]
    prefix.publish(started(1, tokens, allocate(pool, num_blocks)), len(tokens))
    other = Sequence(SequenceSpec(SeqId(2), [*tokens, 1], 5), priority=0)
    lengths = []
    while True:
        match = prefix.match(other)
        lengths.append(len(match.device_ids))
        if not match.should_wait:
            break
    assert lengths == [MAX_NEW_KEYS, 2 * MAX_NEW_KEYS, num_blocks]


def test_who_leaves_is_expected_no_more_and_only_by_itself() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(12)), allocate(pool, 3))
    second = started(2, list(range(12)), allocate(pool, 3))
    prefix.expect(first, 8)
    prefix.expect(second, 8)
    assert {seq.seq_id for seq in prefix.expected_by()} == {1}, "the first keeps what it announced"
    prefix.leave(second)
    assert {seq.seq_id for seq in prefix.expected_by()} == {1}
    prefix.leave(first)
    assert prefix.expected_by() == []
    assert (first.prefix.num_published, first.prefix.num_expected) == (0, 0)


def test_what_is_announced_ends_where_it_was_said_to_and_is_never_taken_back_by_less() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(12)), allocate(pool, 3))
    prefix.expect(first, 7)
    assert (len(prefix.expected_by()), first.prefix.num_expected) == (1, 1), "the second block is not announced"
    prefix.expect(first, 11)
    prefix.expect(first, 4)
    assert (len(prefix.expected_by()), first.prefix.num_expected) == (2, 2)
    prefix.leave(first)
    assert prefix.expected_by() == []


def test_nobody_waits_for_what_comes_behind_a_prompt() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(6)), allocate(pool, 3))
    prefix.expect(first, 12)
    assert len(prefix.expected_by()) == 1


def test_what_is_published_is_published_once_and_stays_so() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(12)), allocate(pool, 3))
    assert [block_id for block_id, _ in prefix.publish(first, 8)] == [0, 1]
    assert first.prefix.num_published == 2
    assert prefix.publish(first, 5) == []
    assert first.prefix.num_published == 2
    pool.unpublish(0)
    assert [block_id for block_id, _ in prefix.publish(first, 12)] == [2], "what lost its key does not get it back"


def test_who_leaves_with_some_of_it_published_is_waited_for_no_more() -> None:
    pool = BlockPool(8)
    prefix = index(pool)
    first = started(1, list(range(12)), allocate(pool, 3))
    prefix.expect(first, 12)
    prefix.publish(first, 4)
    assert len(prefix.expected_by()) == 2
    prefix.leave(first)
    assert prefix.expected_by() == []
    assert (first.prefix.num_published, first.prefix.num_expected) == (0, 0)


def test_an_index_that_is_off_announces_and_publishes_nothing() -> None:
    pool = BlockPool(8)
    prefix = index(pool, is_on=False)
    first = started(1, list(range(12)), allocate(pool, 3))
    prefix.expect(first, 12)
    assert prefix.expected_by() == []
    assert prefix.publish(first, 12) == []
    assert pool.index() == {}
