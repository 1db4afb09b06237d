"""The KV-checking oracle judged by plans written by hand: right ones pass, and each broken rule is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pagemill.columns import unpack
from pagemill.engine.v1 import executor_pb2 as pb
from scheduler_svc.core.params import SamplingSpec
from scheduler_svc.core.plan import Admit, StepPlan
from scheduler_svc.executor_codec import encode_plan
from tests.oracles.base import Geometry, Pace
from tests.oracles.direct import _NoLink
from tests.oracles.expected import expected_output
from tests.oracles.kv import KvExecutor

PROMPT = [5, 6, 7, 8, 9, 10, 11]
"""At four positions a block it fills one and three quarters of the next; its first output is position 7."""


class Hand:
    """Numbers plans, keeps the scheduler's idea of what is in, and remembers what each lane gave."""

    def __init__(self, late: int = 0, **kw: Any) -> None:
        self.oracle = KvExecutor(_NoLink(), Geometry(block_size=4, num_blocks=8, num_host_blocks=4), **kw)
        self.oracle.lateness = lambda step_id: late
        self.oracle.new_session()
        self.step_id = 0
        self.acked = 0
        self.ids: list[int] = []
        self.reports: list[int] = []

    def plan(self, *, takes_result: bool = True, **columns: Any) -> pb.StepResult:
        """One plan and its result; with `takes_result` the next plan knows of it."""
        self.step_id += 1
        envelope = pb.ExecutorEnvelope(plan=encode_plan(StepPlan(self.step_id, **columns)), ack=self.acked)
        result = self.oracle.step(envelope)
        self.oracle.on_result_sent(result, self.step_id)
        if takes_result:
            self.acked = self.step_id
        self.ids += [token for token in unpack(result.token_ids) if token >= 0]
        self.reports += result.finished_copy_steps
        return result

    def start(self, lane: int = 0, blocks: Sequence[int] = (0, 1), **kw: Any) -> None:
        """Runs PROMPT to its first output."""
        self.plan(admit=[admit(lane, PROMPT, blocks)], row_lanes=[lane], row_num_tokens=[len(PROMPT)], **kw)

    @property
    def wrong(self) -> str:
        return "\n".join(self.oracle.violations)


def admit(
    lane: int, tokens: Sequence[int], blocks: Sequence[int], cached: int = 0, generation: int = 1, seed: int = 0
) -> Admit:
    return Admit(
        lane, generation, list(tokens), len(PROMPT), cached, list(blocks), SamplingSpec(seed=seed), frozenset()
    )


def whole(count: int, seed: int = 0) -> list[int]:
    return expected_output(PROMPT, max_tokens=count, vocab_size=1000, seed=seed)


def swapped_out(late: int = 0, **kw: Any) -> Hand:
    """A lane that gave one token and was swapped out to host blocks 2 and 3."""
    hand = Hand(late, **kw)
    hand.start()
    hand.plan(release_lanes=[0], swap_out_src=[0, 1], swap_out_dst=[2, 3])
    return hand


@pytest.mark.parametrize("late", [0, 3])
def test_swapped_out_and_in_it_goes_on_where_it_was(late: int) -> None:
    hand = swapped_out(late)
    assert hand.reports == [2], "a plan without rows answers when all copies have finished"
    known = PROMPT + hand.ids
    back = admit(1, known, [4, 5, 6], cached=len(PROMPT))
    hand.plan(swap_in_src=[2, 3], swap_in_dst=[4, 5], admit=[back], row_lanes=[1])
    hand.plan(repeat_decode=True)
    assert hand.ids == whole(3)
    assert hand.wrong == ""
    assert hand.reports == [2, 3], "the row waited for what came in, however late"
    assert (hand.oracle.counts.num_swapped_out, hand.oracle.counts.num_swapped_in) == (2, 2)


def test_a_swap_in_without_a_row_goes_on_behind_the_batch() -> None:
    hand = swapped_out(late=2)
    other = admit(2, PROMPT, [6, 7], seed=1)
    back = admit(1, PROMPT + hand.ids, [4, 5], cached=len(PROMPT))
    hand.plan(swap_in_src=[2, 3], swap_in_dst=[4, 5], admit=[back, other], row_lanes=[2], row_num_tokens=[7])
    assert hand.reports == [2]
    assert len(hand.oracle.copies.pending) == 2
    hand.plan(row_lanes=[1])
    assert hand.reports == [2, 3]
    assert hand.ids == [*whole(1), *whole(1, seed=1), whole(2)[1]]
    assert hand.wrong == ""


def test_copies_finish_in_order_and_each_plan_is_reported_once() -> None:
    hand = Hand()
    lateness = iter([4, 0, 1])
    hand.oracle.lateness = lambda step_id: next(lateness)
    hand.start(blocks=[0, 1, 2])
    for host in (0, 1, 2):  # a full block, written through
        hand.plan(repeat_decode=False, row_lanes=[0], swap_out_src=[0], swap_out_dst=[host])
    assert hand.reports == []
    hand.plan(release_lanes=[0])
    assert hand.reports == [2, 3, 4]
    assert hand.wrong == ""
    assert hand.ids == whole(4)


def test_a_block_may_go_out_and_be_written_in_the_same_plan() -> None:
    hand = Hand(late=5)
    hand.start()
    hand.plan(release_lanes=[0])
    new = admit(1, PROMPT, [0, 1], seed=4)
    hand.plan(swap_out_src=[0, 1], swap_out_dst=[0, 1], admit=[new], row_lanes=[1], row_num_tokens=[7])
    hand.plan(release_lanes=[1])
    back = admit(2, PROMPT + whole(1), [2, 3], cached=len(PROMPT))
    hand.plan(swap_in_src=[0, 1], swap_in_dst=[2, 3], admit=[back], row_lanes=[2])
    assert hand.wrong == ""
    assert hand.ids == [*whole(1), *whole(1, seed=4), whole(2)[1]]


def test_a_block_may_go_out_and_be_swapped_into_in_the_same_plan() -> None:
    hand = swapped_out(late=1)
    hand.start(1, [4, 5])
    hand.plan(release_lanes=[1])
    back = admit(2, PROMPT + whole(1), [4, 5], cached=len(PROMPT))
    hand.plan(
        swap_out_src=[4, 5], swap_out_dst=[0, 1], swap_in_src=[2, 3], swap_in_dst=[4, 5], admit=[back], row_lanes=[2]
    )
    assert hand.wrong == ""
    assert hand.ids[-1] == whole(2)[1]


def test_shared_blocks_and_any_number_of_cached_tokens() -> None:
    hand = Hand()
    hand.start()
    for lane, cached, blocks in ((1, 4, [0, 2]), (2, 6, [0, 3])):
        copied: dict[str, Any] = {"copy_src": [1], "copy_dst": [3]} if cached == 6 else {}
        hand.plan(
            admit=[admit(lane, PROMPT, blocks, cached=cached, seed=lane)],
            row_lanes=[lane],
            row_num_tokens=[len(PROMPT) - cached],
            **copied,
        )
    assert hand.wrong == ""
    assert hand.ids == [whole(1, seed=seed)[0] for seed in range(3)]


def test_rewind_keeps_the_tokens_and_the_head() -> None:
    hand = Hand()
    hand.start()
    hand.plan(
        rewind_lanes=[0], rewind_num_tokens=[4], rewind_num_blocks=[1], append_lanes=[0], append_block_ids=[5],
        row_lanes=[0], row_num_tokens=[4],
    )  # fmt: skip
    assert hand.wrong == ""
    assert hand.ids == whole(2)


def stale_prefix(hand: Hand) -> None:
    hand.plan(admit=[admit(1, [9, *PROMPT[1:]], [0, 3], cached=4)], row_lanes=[1], row_num_tokens=[3])


def foreign_block(hand: Hand) -> None:
    hand.plan(release_lanes=[0], admit=[admit(1, PROMPT, [5, 3], cached=4)], row_lanes=[1], row_num_tokens=[3])


def one_cached_too_many(hand: Hand) -> None:
    hand.plan(release_lanes=[0])
    hand.plan(admit=[admit(1, PROMPT + hand.ids, [0, 1], cached=8)], row_lanes=[1])


def write_to_a_shared_block(hand: Hand) -> None:
    hand.plan(admit=[admit(1, PROMPT, [0, 1], cached=6)], row_lanes=[1], row_num_tokens=[1])


def in_use(hand: Hand) -> None:
    hand.plan(append_lanes=[0], append_block_ids=[1])


def swapped_in_over_a_lane(hand: Hand) -> None:
    hand.plan(swap_out_src=[0], swap_out_dst=[0], swap_in_src=[0], swap_in_dst=[1])


def never_written(hand: Hand) -> None:
    hand.plan(swap_in_src=[3], swap_in_dst=[6])


def before_the_result(hand: Hand) -> None:
    hand.plan(row_lanes=[0], takes_result=False)
    hand.plan(release_lanes=[0], admit=[admit(1, PROMPT, [0, 3])])


def before_the_result_of_a_release(hand: Hand) -> None:
    hand.plan(release_lanes=[0], takes_result=False)
    hand.plan(admit=[admit(0, PROMPT, [4, 5], generation=2)])


def device_block_before_the_report(hand: Hand) -> None:
    hand.oracle.lateness = lambda step_id: 9
    hand.start(1, [2, 3], release_lanes=[0], swap_out_src=[0, 1], swap_out_dst=[0, 1])
    hand.plan(append_lanes=[1], append_block_ids=[0])


def host_block_before_the_report(hand: Hand) -> None:
    hand.oracle.lateness = lambda step_id: 9
    hand.start(1, [2, 3], release_lanes=[0], swap_out_src=[0], swap_out_dst=[0])
    hand.plan(swap_out_src=[1], swap_out_dst=[0], row_lanes=[1])


def host_block_while_it_is_read(hand: Hand) -> None:
    hand.plan(swap_out_src=[0], swap_out_dst=[0])
    hand.oracle.lateness = lambda step_id: 9
    hand.start(1, [2, 3], swap_in_src=[0], swap_in_dst=[4])
    hand.plan(swap_out_src=[1], swap_out_dst=[0], row_lanes=[1])


def read_in_the_batch_that_writes_it(hand: Hand) -> None:
    hand.plan(release_lanes=[0])
    both = [admit(1, PROMPT, [2, 3]), admit(2, PROMPT, [2, 4], cached=4, seed=2)]
    hand.plan(admit=both, row_lanes=[1, 2], row_num_tokens=[7, 3])


def outside(hand: Hand) -> None:
    hand.plan(swap_out_src=[0], swap_out_dst=[4])


def rewound_too_far(hand: Hand) -> None:
    hand.plan(rewind_lanes=[0], rewind_num_tokens=[5], rewind_num_blocks=[1])


BROKEN: list[tuple[Callable[[Hand], None], str]] = [
    (stale_prefix, "finds position 0 of lane 0"),
    (foreign_block, "lane 1 reads block 5"),
    (one_cached_too_many, "position 7"),
    (write_to_a_shared_block, "lane 1 writes block 1, which lanes [0, 1] share"),
    (in_use, "block 1 of lane 0 goes to lane 0"),
    (swapped_in_over_a_lane, "block 1 of lane 0 goes to swap_in 0 → 1"),
    (never_written, "never written"),
    (before_the_result, "block 0 goes to lane 1 before the result of step 2"),
    (before_the_result_of_a_release, "lane 0 is given out before the result of step 2"),
    (device_block_before_the_report, "block 0 goes to lane 1 before the copies of step 2"),
    (host_block_before_the_report, "host block 0 goes to swap_out 1 → 0 before the copies of step 2"),
    (host_block_while_it_is_read, "host block 0 goes to swap_out 1 → 0 before the copies of step 3"),
    (read_in_the_batch_that_writes_it, "lane 2 reads block 2"),
    (outside, "outside a tier"),
    (rewound_too_far, "does not fit"),
]


@pytest.mark.parametrize(("breaks", "seen"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_rule_is_seen(breaks: Callable[[Hand], None], seen: str) -> None:
    hand = Hand()
    hand.start()
    breaks(hand)
    assert seen in hand.wrong


def test_an_executor_that_does_not_wait_for_copies_gives_wrong_ids() -> None:
    """The control of the oracle itself: with the fence gone, ids differ and checksums do too."""
    hand = swapped_out(late=3)
    hand.oracle.waits_for_copies = False
    back = admit(1, PROMPT + hand.ids, [4, 5], cached=len(PROMPT))
    hand.plan(swap_in_src=[2, 3], swap_in_dst=[4, 5], admit=[back], row_lanes=[1])
    assert hand.ids != whole(2)
    assert "lane 1 reads block 4" in hand.wrong
    hand = Hand(late=3)
    hand.oracle.waits_for_copies = False
    hand.start()
    new = admit(1, PROMPT[::-1], [0, 1])
    hand.plan(
        release_lanes=[0], swap_out_src=[0, 1], swap_out_dst=[0, 1], admit=[new], row_lanes=[1], row_num_tokens=[7]
    )
    hand.plan(row_lanes=[1])
    hand.oracle.copies.finish_all()
    assert hand.oracle.counts.num_mismatches == 2


def test_another_tenant_reading_a_block_is_seen_although_the_tokens_are_alike() -> None:
    hand = Hand(tenant_of=lambda lane: lane.seed)
    hand.start()
    hand.plan(admit=[admit(1, PROMPT, [0, 2], cached=4, seed=1)], row_lanes=[1], row_num_tokens=[3])
    assert hand.oracle.counts.num_foreign_reads == 1
    assert "another tenant" in hand.wrong


def test_a_new_session_finds_nothing_in_either_tier() -> None:
    hand = Hand(late=9)
    hand.start()
    hand.start(1, [2, 3], release_lanes=[0], swap_out_src=[0, 1], swap_out_dst=[0, 1])
    hand.oracle.new_session()
    assert hand.oracle.counts.num_killed_copies == 2
    hand.plan(admit=[admit(0, PROMPT, [0, 1], cached=4)], row_lanes=[0], row_num_tokens=[3])
    assert "nothing that a lane of now has computed" in hand.wrong
    hand.plan(swap_in_src=[0], swap_in_dst=[5])
    assert "never written" in hand.wrong


def test_a_pace_makes_steps_and_copies_take_time() -> None:
    oracle = KvExecutor(
        _NoLink(),
        Geometry(block_size=4, num_blocks=8, num_host_blocks=4),
        pace=Pace(token_s=0.1, row_s=0.5, copy_block_s=2.0),
        clock=lambda: 0.0,
    )
    oracle.new_session()
    first = StepPlan(1, admit=[admit(0, PROMPT, [0, 1])], row_lanes=[0], row_num_tokens=[7])
    second = StepPlan(2, release_lanes=[0], swap_out_src=[0, 1], swap_out_dst=[0, 1])
    begun = []
    for plan in (first, second):
        envelope = pb.ExecutorEnvelope(plan=encode_plan(plan))
        begun.append(oracle.begin(envelope, 10.0))
        assert oracle._step_time(envelope.plan) == pytest.approx(1.2 if plan is first else 0.0)
        assert oracle.step(envelope).execute_us == (1_200_000 if plan is first else 0)
    assert begun == [10.0, 14.0], "a plan without rows waits for its two blocks"
