"""The mirror equals a naive model of it under any sequence of plans, right or wrong."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.batch import build_batch
from executor_svc.codec import decode_plan
from executor_svc.lanes import Int64s, LaneMirror, LaneState
from executor_svc.plans import Int32s, PlanLimits
from pagemill.engine.v1 import executor_pb2 as pb
from tests.unit.executor.executor_fakes import VOCAB, admit, column

LANES, BLOCK, BLOCKS, MAX_LEN = 4, 4, 12, 22
MAX_BLOCKS = 6
Plan = dict[str, Any]
"""One draw of `plans`."""
LIMITS = PlanLimits(LANES, BLOCKS, 4, 64, MAX_LEN, VOCAB)


@dataclass
class NaiveLane:
    generation: int
    tokens: list[int]
    position: int
    blocks: list[int]
    broken: bool = False


@dataclass
class NaiveMirror:
    lanes: dict[int, NaiveLane] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)

    def apply(self, plan: Plan) -> None:
        for lane in plan["release"]:
            self.lanes.pop(lane, None)
        for lane, position, count in plan["rewind"]:
            if (it := self.lanes.get(lane)) is not None and not it.broken:
                if 0 <= position <= min(it.position, count * BLOCK) and 0 <= count <= len(it.blocks):
                    it.position, it.blocks = position, it.blocks[:count]
                else:
                    it.broken = True
        for lane, generation, tokens, cached, blocks in plan["admit"]:
            taken = lane in self.lanes
            good = (
                not taken
                and generation > self.generations.get(lane, 0)
                and 1 <= len(tokens) <= MAX_LEN
                and all(0 <= token < VOCAB for token in tokens)
                and all(0 <= block < BLOCKS for block in blocks)
                and len(blocks) <= MAX_BLOCKS
                and cached < len(tokens)
                and cached <= len(blocks) * BLOCK
            )
            self.generations[lane] = generation
            if taken:
                self.lanes[lane].broken = True
                self.lanes[lane].generation = generation
            elif good:
                self.lanes[lane] = NaiveLane(generation, list(tokens), cached, list(blocks))
            else:
                self.lanes[lane] = NaiveLane(generation, [], 0, [], broken=True)
        self._append(plan["append"])

    def _append(self, entries: Sequence[tuple[int, int]]) -> None:
        index: dict[int, int] = {}
        for lane, block in entries:  # one entry that does not fit breaks its lane before any of them is used
            it = self.lanes.get(lane)
            if it is not None:
                index[lane] = index.get(lane, len(it.blocks)) + 1
                if index[lane] > MAX_BLOCKS or not 0 <= block < BLOCKS:
                    it.broken = True
        for lane, block in entries:
            it = self.lanes.get(lane)
            if it is not None and not it.broken:
                it.blocks.append(block)

    def left(self, lane: int) -> int:
        it = self.lanes.get(lane)
        return len(it.tokens) - it.position if it else 1

    def fits(self, rows: Sequence[tuple[int, int]]) -> list[bool]:
        seen: set[int] = set()
        fits = []
        for lane, count in rows:
            it = self.lanes.get(lane)
            end = it.position + count if it else 0
            fits.append(
                lane not in seen
                and it is not None
                and not it.broken
                and count >= 1
                and end <= len(it.tokens)
                and end <= len(it.blocks) * BLOCK
                and end <= MAX_LEN
            )
            seen.add(lane)
        return fits


lanes = st.integers(0, LANES - 1)
block_ids = st.sampled_from([*range(BLOCKS), *range(BLOCKS), -1, BLOCKS])
tokens = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), max_size=9),
    st.integers(0, MAX_LEN + 1).map(lambda count: [count] * count),
)
good_admits = st.builds(
    lambda lane, length, more, first: (
        lane,
        0,  # the next generation
        [length] * length,
        0,
        [(first + i) % BLOCKS for i in range(min(MAX_BLOCKS, max(0, -(-length // BLOCK) + more)))],
    ),
    lanes,
    st.integers(1, MAX_LEN),
    st.sampled_from([-1, 0, 0, 1]),
    st.integers(0, BLOCKS - 1),
)
odd_admits = st.tuples(
    lanes,
    st.sampled_from([0, 0, 1, 7]),
    st.one_of(tokens, st.just([VOCAB]), st.just([1, -1])),
    st.sampled_from([0, 1, 4, 5]),
    st.one_of(st.lists(st.integers(0, BLOCKS - 1), max_size=5), st.lists(block_ids, max_size=7)),
)
plans = st.fixed_dictionaries(
    {
        "release": st.lists(lanes, max_size=2),
        "renew": st.sampled_from([True, True, True, False]),  # whether admitted lanes are released first
        "rewind": st.lists(st.tuples(lanes, st.integers(-1, 8), st.integers(-1, 4)), max_size=1),
        "admit": st.lists(st.one_of(good_admits, good_admits, good_admits, odd_admits), max_size=2),
        "append": st.lists(st.tuples(lanes, st.one_of(st.integers(0, BLOCKS - 1), block_ids)), max_size=4),
        # Tokens of a row are counted from what is left to compute, so that rows end at every kind of border.
        "rows": st.lists(st.tuples(lanes, st.sampled_from([-9, -1, 0, 0, 0, 1])), max_size=6),
        "sampled": st.integers(0, VOCAB - 1),
    }
)


def message(plan: Plan) -> pb.StepPlan:
    def columns(name: str, *fields: str) -> dict[str, Any]:
        transposed = list(zip(*plan[name], strict=True)) or [()] * len(fields)
        return {f: column(*values) for f, values in zip(fields, transposed, strict=True)}

    return pb.StepPlan(
        release_lanes=column(*plan["release"]),
        admit=[
            admit(lane, token_ids, blocks, generation=generation, num_cached_tokens=cached)
            for lane, generation, token_ids, cached, blocks in plan["admit"]
        ],
        **columns("rewind", "rewind_lanes", "rewind_num_tokens", "rewind_num_blocks"),
        **columns("append", "append_lanes", "append_block_ids"),
    )


def assert_equal(mirror: LaneMirror, naive: NaiveMirror) -> None:
    for lane in range(LANES):
        it = naive.lanes.get(lane)
        if it is None:
            assert mirror.state[lane] == LaneState.FREE
            assert not mirror.tables[lane].any()
            continue
        assert mirror.state[lane] == (LaneState.BROKEN if it.broken else LaneState.LIVE)
        assert mirror.generation[lane] == it.generation
        assert mirror.tables[lane].tolist() == it.blocks + [0] * (mirror.max_blocks - len(it.blocks))
        if not it.broken:
            assert mirror.tokens[lane, : mirror.num_tokens[lane]].tolist() == it.tokens
            assert mirror.position[lane] == it.position
    assert mirror.num_mapped_blocks == len({block for it in naive.lanes.values() for block in it.blocks})


@settings(max_examples=120, deadline=None)
@given(st.lists(plans, min_size=1, max_size=8))
def test_the_mirror_equals_a_naive_model(sequence: list[Plan]) -> None:
    mirror = LaneMirror(num_lanes=LANES, block_size=BLOCK, num_blocks=BLOCKS, max_model_len=MAX_LEN)
    naive = NaiveMirror()
    for step, plan in enumerate(sequence):
        plan["admit"] = [(lane, generation or step + 1, *rest) for lane, generation, *rest in plan["admit"]]
        if plan["renew"]:
            plan["release"] += [lane for lane, *_ in plan["admit"]]
        decoded = decode_plan(message(plan), LIMITS)
        mirror.apply(decoded)
        naive.apply(plan)
        assert_equal(mirror, naive)
        wanted = [(lane, naive.left(lane) + more) for lane, more in plan["rows"]]
        rows = np.array([lane for lane, _ in wanted], np.int32)
        counts = np.array([count for _, count in wanted], np.int64)
        fits = mirror.rows_that_fit(rows, counts)
        assert fits.tolist() == naive.fits(wanted)
        if fits.any():
            check_batch(mirror, naive, rows[fits], counts[fits], plan["sampled"])
            assert_equal(mirror, naive)
    mirror.clear()
    assert_equal(mirror, NaiveMirror())


def check_batch(mirror: LaneMirror, naive: NaiveMirror, rows: Int32s, counts: Int64s, sampled: int) -> None:
    batch = build_batch(mirror, rows, counts)
    expected_ids: list[int] = []
    expected_positions: list[int] = []
    expected_slots: list[int] = []
    sample_rows: list[int] = []
    for i, (lane, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
        it = naive.lanes[lane]
        for position in range(it.position, it.position + count):
            expected_ids.append(it.tokens[position])
            expected_positions.append(position)
            expected_slots.append(it.blocks[position // BLOCK] * BLOCK + position % BLOCK)
        it.position += count
        if it.position == len(it.tokens):
            sample_rows.append(i)
        width = batch.block_tables.shape[1]
        assert batch.block_tables[i].tolist() == (it.blocks + [0] * width)[:width]
    assert batch.token_ids.tolist() == expected_ids
    assert batch.positions.tolist() == expected_positions
    assert batch.slot_mapping.tolist() == expected_slots
    assert batch.query_lens == counts.tolist()
    assert batch.context_lens == [naive.lanes[lane].position for lane in rows.tolist()]
    assert batch.sample_rows == sample_rows
    for i in sample_rows:
        naive.lanes[int(rows[i])].tokens.append(sampled)
    sampled_lanes = rows[sample_rows]
    mirror.commit(rows, counts, sampled_lanes, np.full(sampled_lanes.size, sampled, np.int32))


def test_a_new_session_starts_generations_again() -> None:
    mirror = LaneMirror(num_lanes=LANES, block_size=BLOCK, num_blocks=BLOCKS, max_model_len=MAX_LEN)
    for _ in range(2):
        mirror.apply(decode_plan(pb.StepPlan(admit=[admit(0, [1, 2], [3], generation=1)]), LIMITS))
        assert mirror.is_live(0)
        mirror.clear()


def test_the_digest_sees_lanes_positions_and_tables() -> None:
    def mirror_of(*operations: pb.StepPlan) -> LaneMirror:
        mirror = LaneMirror(num_lanes=LANES, block_size=BLOCK, num_blocks=BLOCKS, max_model_len=MAX_LEN)
        for plan in operations:
            mirror.apply(decode_plan(plan, LIMITS))
        return mirror

    base = pb.StepPlan(admit=[admit(1, [1, 2, 3], [5], generation=4)])
    other_tokens = pb.StepPlan(admit=[admit(1, [9, 9, 9], [5], generation=4)])
    digest = mirror_of(base).digest()
    assert digest == mirror_of(other_tokens).digest()
    changed = [
        pb.StepPlan(admit=[admit(2, [1, 2, 3], [5], generation=4)]),
        pb.StepPlan(admit=[admit(1, [1, 2, 3], [5], generation=5)]),
        pb.StepPlan(admit=[admit(1, [1, 2, 3], [6], generation=4)]),
        pb.StepPlan(admit=[admit(1, [1, 2, 3], [5], generation=4, num_cached_tokens=1)]),
    ]
    digests = [mirror_of(plan).digest() for plan in changed]
    appended = pb.StepPlan(append_lanes=column(1), append_block_ids=column(0))
    digests.append(mirror_of(base, appended).digest())
    assert len({digest, *digests}) == 6
    appended.admit.add().CopyFrom(admit(0, [7, 8], [2, 9], generation=3))
    expected = struct.pack("<4I2i", 0, 3, 0, 2, 2, 9) + struct.pack("<4I2i", 1, 4, 0, 2, 5, 0)  # as in docs/wire.md
    assert mirror_of(base, appended).digest() == zlib.crc32(expected)
    assert mirror_of().digest() == 0
    broken = mirror_of(base)
    broken.break_lane(1, "for the test")
    assert broken.digest() is None


def test_a_row_needs_known_tokens_blocks_and_context_for_all_its_positions() -> None:
    mirror = LaneMirror(num_lanes=LANES, block_size=BLOCK, num_blocks=BLOCKS, max_model_len=MAX_LEN)
    full = list(range(MAX_LEN))
    plan = pb.StepPlan(
        admit=[admit(0, full[:9], [3, 4]), admit(1, full[:7], [5, 6]), admit(2, full, range(6), num_cached_tokens=20)]
    )
    mirror.apply(decode_plan(plan, LIMITS))

    def fits(lane: int, count: int) -> bool:
        return bool(mirror.rows_that_fit(np.array([lane], np.int32), np.array([count], np.int64))[0])

    assert [fits(0, count) for count in (8, 9)] == [True, False]  # two blocks hold eight positions
    assert [fits(1, count) for count in (0, 1, 7, 8)] == [False, True, True, False]  # seven tokens are known
    assert [fits(2, count) for count in (2, 3)] == [True, False]
    lane = np.array([2], np.int32)
    mirror.commit(lane, np.array([2], np.int64), lane, np.array([1], np.int32))
    assert not fits(2, 1)  # a 23rd token is known and a sixth block has room, but the context has 22 positions
