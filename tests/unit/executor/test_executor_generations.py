"""A lane's generation only rises, so that an admission of an earlier use of the lane is recognised."""

from __future__ import annotations

import pytest

from executor_svc.codec import decode_plan
from executor_svc.lanes import LaneMirror, LaneState
from executor_svc.plans import PlanLimits
from pagemill.engine.v1 import executor_pb2 as pb
from tests.unit.executor.executor_fakes import VOCAB, admit, column

LIMITS = PlanLimits(2, 8, 2, 64, 16, VOCAB)


def apply(mirror: LaneMirror, **fields: object) -> None:
    mirror.apply(decode_plan(pb.StepPlan(step_id=1, **fields), LIMITS))  # type: ignore[arg-type]


@pytest.mark.parametrize(("generation", "state"), [(2, "BROKEN"), (3, "BROKEN"), (4, "LIVE")])
def test_lane_is_given_out_again_under_a_higher_generation_only(generation: int, state: str) -> None:
    mirror = LaneMirror(num_lanes=2, block_size=4, num_blocks=8, max_model_len=16)
    apply(mirror, admit=[admit(1, [1, 2], [3], generation=3)])
    assert mirror.is_live(1)
    apply(mirror, release_lanes=column(1), admit=[admit(1, [1, 2], [3], generation=generation)])
    assert mirror.state[1] == LaneState[state]
    assert mirror.num_mapped_blocks == (state == "LIVE")


def test_generations_start_again_with_a_session() -> None:
    mirror = LaneMirror(num_lanes=2, block_size=4, num_blocks=8, max_model_len=16)
    apply(mirror, admit=[admit(1, [1, 2], [3], generation=9)])
    mirror.clear()
    apply(mirror, admit=[admit(1, [1, 2], [3], generation=1)])
    assert mirror.is_live(1)
