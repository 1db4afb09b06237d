from __future__ import annotations

import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from executor_svc.codec import decode_plan, encode_result
from executor_svc.plans import PlanError
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.engine.v1.sampling_pb2 import Sampling
from tests.unit.executor.executor_fakes import (
    INF,
    NAN,
    POISON,
    VOCAB,
    Bench,
    DigestRunner,
    admit,
    column,
    digest_logits,
    greedy_continuation,
)

NUMERICAL = pb.ROW_ERROR_CODE_NUMERICAL
BAD_ROW = pb.ROW_ERROR_CODE_BAD_ROW
INTERNAL = pb.ROW_ERROR_CODE_INTERNAL

PROMPT = [5, 6, 7, 8, 9, 10]


def decode(bench: Bench, lanes: list[int], count: int) -> list[list[int]]:
    """Tokens of `count` decode steps, the first with rows and the others repeating them."""
    steps = [bench.run(row_lanes=column(*lanes))]
    steps += [bench.run(repeat_decode=True) for _ in range(count - 1)]
    assert not any(step.failed or step.row_errors for step in steps)
    tokens: list[list[int]] = np.array([step.token_ids for step in steps]).T.tolist()
    return tokens


def test_prefill_in_chunks_then_decode_gives_the_continuation() -> None:
    bench = Bench()
    first = bench.run(admit=[admit(3, PROMPT, [7, 2, 9, 4, 1])], row_lanes=column(3), row_num_tokens=column(4))
    assert first.token_ids.tolist() == [-1]
    second = bench.run(row_lanes=column(3), row_num_tokens=column(2))
    generated = [*second.token_ids.tolist(), *decode(bench, [3], 10)[0]]
    assert generated == greedy_continuation(PROMPT, 11)
    assert second.num_mapped_blocks == 5


def test_rows_of_all_kinds_share_a_step() -> None:
    bench = Bench()
    prompts = {0: [1, 2, 3], 1: [4, 5, 6, 7, 8, 9, 10], 2: [11]}
    blocks = {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8]}
    bench.run(admit=[admit(0, prompts[0], blocks[0])], row_lanes=column(0), row_num_tokens=column(3))
    mixed = bench.run(
        admit=[admit(1, prompts[1], blocks[1]), admit(2, prompts[2], blocks[2])],
        row_lanes=column(1, 0, 2),
        row_num_tokens=column(5, 1, 1),
    )
    assert mixed.token_ids.tolist() == [
        -1,
        greedy_continuation(prompts[0], 2)[1],
        greedy_continuation(prompts[2], 1)[0],
    ]


def test_blocks_appended_in_the_same_plan_serve_its_rows() -> None:
    bench = Bench()
    bench.run(admit=[admit(0, [1, 2, 3, 4], [9])], row_lanes=column(0), row_num_tokens=column(4))
    outcome = bench.run(append_lanes=column(0), append_block_ids=column(3), row_lanes=column(0))
    assert outcome.token_ids.tolist() == greedy_continuation([1, 2, 3, 4], 2)[1:]


def test_copies_come_before_the_batch() -> None:
    bench = Bench()
    bench.run(admit=[admit(0, PROMPT, [4, 5])], row_lanes=column(0), row_num_tokens=column(6))
    # A fork: its first block is a copy of the first lane's, so its cached positions must read the same.
    outcome = bench.run(
        copy_src=column(4),
        copy_dst=column(8),
        admit=[admit(1, PROMPT, [8, 9], num_cached_tokens=4)],
        row_lanes=column(1),
        row_num_tokens=column(2),
    )
    assert outcome.token_ids.tolist() == greedy_continuation(PROMPT, 1)


def test_rewound_positions_are_computed_again() -> None:
    bench = Bench()
    bench.run(admit=[admit(0, PROMPT, [4, 5])], row_lanes=column(0), row_num_tokens=column(6))
    outcome = bench.run(
        rewind_lanes=column(0),
        rewind_num_tokens=column(3),
        rewind_num_blocks=column(1),
        append_lanes=column(0),
        append_block_ids=column(6),
        row_lanes=column(0),
        row_num_tokens=column(4),
    )
    assert outcome.token_ids.tolist() == greedy_continuation(PROMPT, 2)[1:]


def test_a_released_lane_is_new_again() -> None:
    bench = Bench()
    bench.run(admit=[admit(0, PROMPT, [4, 5])], row_lanes=column(0), row_num_tokens=column(6))
    outcome = bench.run(
        release_lanes=column(0),
        admit=[admit(0, [1, 2], [4], generation=2)],
        row_lanes=column(0),
        row_num_tokens=column(2),
    )
    assert outcome.token_ids.tolist() == greedy_continuation([1, 2], 1)
    assert outcome.num_mapped_blocks == 1


@pytest.mark.parametrize("token", [NAN, INF])
def test_logits_that_are_not_finite_fail_their_row_only(token: int) -> None:
    bench = Bench()
    outcome = bench.run(
        admit=[admit(0, [1, 2], [0]), admit(1, [3, token], [1]), admit(2, [4, 5], [2])],
        row_lanes=column(0, 1, 2),
        row_num_tokens=column(2, 2, 2),
    )
    assert outcome.row_errors == {1: NUMERICAL}
    assert outcome.token_ids.tolist() == [*greedy_continuation([1, 2], 1), -1, *greedy_continuation([4, 5], 1)]
    later = bench.run(repeat_decode=True)  # planned before the result was in
    assert later.row_errors == {1: BAD_ROW}
    assert later.token_ids[[0, 2]].tolist() == [greedy_continuation(p, 2)[1] for p in ([1, 2], [4, 5])]


@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_row_that_raises_fails_alone(place: int) -> None:
    bench = Bench()
    prompts = [[10 + i, 20 + i] for i in range(6)]
    prompts[place][0] = POISON
    outcome = bench.run(
        admit=[admit(i, prompt, [i]) for i, prompt in enumerate(prompts)],
        row_lanes=column(*range(6)),
        row_num_tokens=column(*[2] * 6),
    )
    assert outcome.row_errors == {place: INTERNAL}
    for i, prompt in enumerate(prompts):
        if i != place:
            assert outcome.token_ids[i] == greedy_continuation(prompt, 1)[0]
    assert bench.runner.num_forwards <= 7  # halving, not one by one
    good = [i for i in range(6) if i != place]
    assert decode(bench, good, 2) == [greedy_continuation(prompts[i], 3)[1:] for i in good]


def test_when_all_rows_raise_the_step_failed_until_a_new_session() -> None:
    bench = Bench()
    bench.run(
        admit=[admit(i, [1, i], [i]) for i in range(3)], row_lanes=column(0, 1, 2), row_num_tokens=column(2, 2, 2)
    )
    bench.runner.broken = True
    assert bench.run(repeat_decode=True).failed
    bench.runner.broken = False
    assert bench.run(repeat_decode=True).failed
    bench.executor.reset()
    assert bench.mirror.num_mapped_blocks == 0
    fine = bench.run(admit=[admit(0, [1, 2], [0])], row_lanes=column(0), row_num_tokens=column(2))
    assert fine.token_ids.tolist() == greedy_continuation([1, 2], 1)


def test_a_lone_row_that_raises_fails_alone_but_not_for_ever() -> None:
    bench = Bench()
    outcomes = [
        bench.run(admit=[admit(i, [POISON, 1], [i])], row_lanes=column(i), row_num_tokens=column(2)) for i in range(3)
    ]
    assert [outcome.row_errors for outcome in outcomes[:2]] == [{0: INTERNAL}] * 2
    assert [outcome.failed for outcome in outcomes] == [False, False, True]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"row_lanes": column(5)}, BAD_ROW),
        ({"row_lanes": column(0), "row_num_tokens": column(2)}, BAD_ROW),
        ({"row_lanes": column(0), "row_num_tokens": column(0)}, BAD_ROW),
        ({"row_lanes": column(0), "row_num_tokens": column(-3)}, BAD_ROW),
        ({"admit": [admit(5, [1, VOCAB], [3])], "row_lanes": column(5)}, BAD_ROW),
        ({"admit": [admit(5, [1, 2], [99])], "row_lanes": column(5)}, BAD_ROW),
        ({"admit": [admit(5, [1, 2], [3], flags=1)], "row_lanes": column(5)}, BAD_ROW),
        ({"admit": [admit(5, [1, 2], [3], adapter="x")], "row_lanes": column(5)}, BAD_ROW),
        ({"admit": [admit(5, [1, 2], [3], sampling=Sampling(top_p=0.0))], "row_lanes": column(5)}, BAD_ROW),
        (
            {
                "admit": [admit(5, [1], [3], sampling=Sampling(top_p=1, temperature=float("nan")))],
                "row_lanes": column(5),
            },
            BAD_ROW,
        ),
        ({"append_lanes": column(0), "append_block_ids": column(32), "row_lanes": column(0)}, BAD_ROW),
    ],
)
def test_what_does_not_fit_fails_its_row_and_no_other(fields: dict[str, Any], code: int) -> None:
    bench = Bench()
    bench.run(admit=[admit(0, [1, 2], [0]), admit(1, [3, 4], [1])], row_lanes=column(0, 1), row_num_tokens=column(2, 2))
    counts = np.frombuffer(fields.get("row_num_tokens", column(1)), "<i4").tolist()
    lanes = np.frombuffer(fields["row_lanes"], "<i4").tolist()
    plan = {**fields, "row_lanes": column(*lanes, 1), "row_num_tokens": column(*counts, 1)}
    outcome = bench.run(**plan)
    assert outcome.row_errors == {0: code}
    assert outcome.token_ids.tolist() == [-1, greedy_continuation([3, 4], 2)[1]]
    assert encode_result(outcome).status == pb.STEP_STATUS_ROW_ERRORS


def test_a_lane_named_twice_runs_once() -> None:
    bench = Bench()
    outcome = bench.run(admit=[admit(0, [1, 2, 3], [0])], row_lanes=column(0, 0))
    assert outcome.row_errors == {1: BAD_ROW}


@pytest.mark.parametrize(
    "fields",
    [
        {"row_lanes": b"123"},
        {"row_lanes": column(8)},
        {"row_lanes": column(-1)},
        {"row_lanes": column(0), "row_num_tokens": column(1, 2)},
        {"row_lanes": column(0), "row_num_tokens": column(49)},
        {"row_lanes": column(0, 1), "row_num_tokens": column(2**31 - 1, 2**31 - 1)},
        {"row_lanes": column(*range(7))},
        {"row_lanes": column(0), "repeat_decode": True},
        {"release_lanes": column(99)},
        {"copy_src": column(0), "copy_dst": column(32)},
        {"copy_src": column(0, 1), "copy_dst": column(2)},
        {"append_lanes": column(0), "append_block_ids": b""},
        {"rewind_lanes": column(0)},
        {"admit": [pb.Admit(lane=8)]},
        {"admit": [pb.Admit(lane=1, token_ids=b"1")]},
        {"swap_out_src": column(0), "swap_out_dst": column(0)},
        {"swap_in_src": column(0), "swap_in_dst": column(0)},
        {"swap_out_src": column(0)},
        {"swap_in_dst": b"1"},
        {"row_lanes": column(0), "draft_ids": column(5), "num_drafts": column(1)},
        {"row_lanes": column(0), "want_logprobs": True},
        {"row_lanes": column(0), "mask_follows": True},
    ],
)
def test_a_plan_that_cannot_be_read_is_refused_whole(fields: dict[str, Any]) -> None:
    bench = Bench()
    plan = bench.plan(**fields)
    with pytest.raises(PlanError) as caught:
        decode_plan(plan, bench.limits)
    outcome = bench.executor.execute(caught.value, plan.step_id)
    assert outcome.failed
    assert encode_result(outcome).status == pb.STEP_STATUS_FAILED
    assert bench.runner.num_forwards == 0


def test_a_wrong_state_digest_fails_the_step_and_a_right_one_does_not() -> None:
    bench = Bench()
    bench.run(admit=[admit(0, [1, 2], [0])], row_lanes=column(0), row_num_tokens=column(2))
    right = bench.mirror.digest()
    outcome = bench.run(row_lanes=column(0), state_digest=right)
    assert not outcome.failed
    assert not encode_result(outcome).HasField("state_digest")
    num_forwards = bench.runner.num_forwards
    outcome = bench.run(row_lanes=column(0), state_digest=right)  # the position has moved on
    assert outcome.failed
    assert encode_result(outcome).state_digest == bench.mirror.digest() != right
    assert bench.runner.num_forwards == num_forwards


def test_the_digest_of_the_mirror_is_that_of_docs_wire() -> None:
    bench = Bench()
    assert bench.mirror.digest() == 0
    lanes = {2: [5, 6, 7], 0: [3], 1: []}
    for number, (lane, blocks) in enumerate(lanes.items()):
        bench.run(admit=[admit(lane, [1] * (4 * len(blocks) + 1), blocks, generation=number + 5)])
    numbers = [0, 6, 0, 1, 3, 1, 7, 0, 0, 2, 5, 0, 3, 5, 6, 7]
    assert bench.mirror.digest() == zlib.crc32(struct.pack(f"<{len(numbers)}i", *numbers))


# Sampling through the whole step


def sampled(
    bench: Bench, lane: int, prompt: list[int], blocks: list[int], sampling: Sampling, count: int, **fields: Any
) -> list[int]:
    first = bench.run(
        admit=[admit(lane, prompt, blocks, sampling=sampling, **fields)],
        row_lanes=column(lane),
        row_num_tokens=column(len(prompt)),
    )
    assert not first.row_errors
    return [int(first.token_ids[0]), *decode(bench, [lane], count - 1)[0]]


SAMPLING = Sampling(temperature=1.5, top_p=0.97, top_k=60, min_p=0.001, seed=-12345)


def test_neighbours_never_change_a_seeded_row() -> None:
    alone = sampled(Bench(), 0, PROMPT, [0, 1, 2, 3], SAMPLING, 8)
    rng = random.Random(7)
    for _ in range(20):
        bench = Bench(DigestRunner(num_blocks=64), num_lanes=8)
        lanes = rng.sample(range(8), 6)
        mine = rng.randrange(6)
        admits, lengths = [], []
        for i, lane in enumerate(lanes):
            prompt = PROMPT if i == mine else [rng.randrange(90) for _ in range(rng.randint(1, 8))]
            sampling = (
                SAMPLING if i == mine else Sampling(temperature=rng.choice([0, 0.5, 2]), top_p=rng.choice([1, 0.5]))
            )
            blocks = [6 * i + j for j in range(5)]
            admits.append(admit(lane, prompt, blocks, sampling=sampling))
            lengths.append(len(prompt))
        first = bench.run(admit=admits, row_lanes=column(*lanes), row_num_tokens=column(*lengths))
        rows = decode(bench, lanes, 7)
        assert [int(first.token_ids[mine]), *rows[mine]] == alone


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_stream_goes_on_identically_after_a_new_admission(cut: int) -> None:
    whole = sampled(Bench(), 0, PROMPT, [0, 1, 2, 3], SAMPLING, 8)
    tokens = PROMPT + whole[:cut]
    rest = sampled(Bench(), 5, tokens, [9, 3, 5, 7], SAMPLING, 8 - cut + 1, num_prompt_tokens=len(PROMPT))
    assert rest[: 8 - cut] == whole[cut:]


def test_choices_and_seeds_differ() -> None:
    runs = [
        sampled(Bench(), 0, PROMPT, [0, 1, 2, 3], Sampling(temperature=1.5, top_p=1, seed=seed), 8, choice_index=choice)
        for seed, choice in ((1, 0), (1, 1), (2, 0), (2**63 - 1, 0), (-(2**63), 0))
    ]
    assert len({tuple(run) for run in runs}) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_emitted", [0, 1])
@pytest.mark.parametrize("proposed_at", [0, 1, 2])
def test_stop_ids_are_held_back_until_min_tokens(temperature: float, num_emitted: int, proposed_at: int) -> None:
    """The model proposes the end at output 0, 1 or 2; with min_tokens 2 only the last can be chosen (B43)."""
    outputs = greedy_continuation(PROMPT, 3)
    end = outputs[proposed_at]
    sampling = Sampling(temperature=temperature, top_p=1e-6, min_tokens=2, stop_token_ids=column(end))
    emitted = outputs[:num_emitted] if end not in outputs[:num_emitted] else [1]
    got = sampled(Bench(), 0, PROMPT + emitted, [0, 1, 2], sampling, 3 - num_emitted, num_prompt_tokens=len(PROMPT))
    got = emitted + got
    for index in range(num_emitted, 3):
        logits = digest_logits(PROMPT + got[:index])
        if index < 2:
            logits[end] = -np.inf
        assert got[index] == int(logits.argmax())
        assert got[index] != end or index >= 2


def test_a_row_at_the_very_end_of_the_context_may_still_sample() -> None:
    bench = Bench(DigestRunner(max_model_len=8, num_blocks=4))
    prompt = list(range(1, 8))
    assert sampled(bench, 0, prompt, [0, 1], Sampling(top_p=1.0), 2) == greedy_continuation(prompt, 2)
    wasted = bench.run(repeat_decode=True)  # position 8 of 8
    assert wasted.row_errors == {0: BAD_ROW}
