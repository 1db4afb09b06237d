from __future__ import annotations

from itertools import product

import pytest

from cache_svc.blocks.table import BlockTable
from scheduler_svc.core.events import FinishReason
from scheduler_svc.core.params import SamplingSpec, SeqId, SequenceSpec
from scheduler_svc.core.sequence import MOVES, NO_LANE, IllegalMoveError, Sequence, SequenceState


def sequence(prompt: int = 5, max_tokens: int = 4, emitted: list[int] | None = None, **fields: object) -> Sequence:
    spec = SequenceSpec(SeqId(1), [9] * prompt, max_tokens, frozenset({7}), emitted_ids=emitted or [], **fields)  # type: ignore[arg-type]
    return Sequence(spec, priority=0)


def table() -> BlockTable:
    result = BlockTable(4)
    result.extend([3, 5])
    return result


def snapshot(seq: Sequence) -> list[object]:
    return [getattr(seq, name) for name in Sequence.__slots__]


@pytest.mark.parametrize(("before", "after"), list(product(SequenceState, SequenceState)))
def test_a_move_is_made_if_the_table_has_it_and_else_raises_and_changes_nothing(
    before: SequenceState, after: SequenceState
) -> None:
    seq = sequence()
    seq._state = before
    unchanged = snapshot(seq)
    if after in MOVES[before]:
        seq._move(after)
        assert seq.state is after
    else:
        with pytest.raises(IllegalMoveError, match=f"{before.name} -> {after.name}"):
            seq._move(after)
        assert snapshot(seq) == unchanged


def test_verbs_that_are_illegal_change_nothing() -> None:
    seq = sequence()
    for verb in (seq.requeue, lambda: seq.finish(FinishReason.STOP)):
        seq._state = SequenceState.FINISHED
        unchanged = snapshot(seq)
        with pytest.raises(IllegalMoveError):
            verb()
        with pytest.raises(IllegalMoveError):
            seq.start(0, table(), 0, 0, 0.0)
        assert snapshot(seq) == unchanged


def test_the_state_cannot_be_set_from_outside() -> None:
    with pytest.raises(AttributeError):
        sequence().state = SequenceState.RUNNING  # type: ignore[misc]


def test_a_sequence_that_is_requeued_or_ends_holds_nothing() -> None:
    for leave in (Sequence.requeue, lambda seq: seq.finish(FinishReason.STOP)):
        seq = sequence()
        seq.start(2, table(), 3, 0, 1.0)
        seq.num_planned = 5
        leave(seq)
        assert (seq.lane, seq.table, seq.num_reserved, seq.num_planned, seq.horizon) == (NO_LANE, None, 0, 0, 0)


def test_after_a_recompute_the_whole_known_sequence_is_to_be_computed() -> None:
    seq = sequence(prompt=5)
    seq.start(0, table(), 0, 0, 1.0)
    assert (seq.prefill_len, seq.first_run) == (5, 1.0)
    seq.token_ids += [1, 2]
    seq.requeue()
    assert (seq.service, seq.in_front) == (7, True)
    seq.start(1, table(), 0, 0, 2.0)
    assert (seq.prefill_len, seq.prompt_len, seq.num_output_tokens, seq.first_run) == (7, 5, 2, 1.0)


def test_the_horizon_is_the_nearer_of_slots_and_limit() -> None:
    seq = sequence(prompt=5, max_tokens=20)
    seq.start(0, table(), 0, 0, 0.0)
    assert seq.horizon == 8
    seq.grow([1, 2, 4, 6, 8, 9])
    assert seq.horizon == 24, "the row at position 24 would bring token 26 of 25"


@pytest.mark.parametrize(
    ("emitted", "min_tokens", "reason"),
    [
        ([], 0, None),
        ([7], 0, FinishReason.STOP),
        ([7], 1, None),
        ([1, 7], 1, FinishReason.STOP),
        ([7, 1], 0, None),
        ([1, 1, 1, 7], 0, FinishReason.STOP),
        ([1, 1, 1, 1], 0, FinishReason.LENGTH),
        ([1, 1, 1, 7], 4, FinishReason.LENGTH),
    ],
)
def test_why_no_token_may_follow(emitted: list[int], min_tokens: int, reason: FinishReason | None) -> None:
    assert sequence(emitted=emitted, sampling=SamplingSpec(min_tokens=min_tokens)).end_reason() is reason


def test_a_stop_id_at_the_end_of_the_prompt_is_not_a_stop() -> None:
    assert Sequence(SequenceSpec(SeqId(1), [1, 7], 3, frozenset({7})), priority=0).end_reason() is None
