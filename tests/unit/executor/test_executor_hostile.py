"""Whatever a plan says, the worker lives, stays within its arrays, and runs the next good plan."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_svc.codec import decode_plan, encode_result
from executor_svc.lanes import LaneState
from executor_svc.plans import DecodedPlan, PlanError, StepOutcome
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.engine.v1.sampling_pb2 import Sampling
from tests.unit.executor.executor_fakes import VOCAB, Bench, admit, column, greedy_continuation

SLOW = HealthCheck.too_slow  # a busy machine is no finding

ints = st.one_of(
    st.integers(0, 9), st.integers(0, 9), st.sampled_from([-1, 31, 32, 33, 64, 65, 100, 101, 2**31 - 1, -(2**31)])
)
columns = st.lists(ints, max_size=6).map(lambda values: column(*values))
raw = st.one_of(columns, columns, columns, st.binary(max_size=9))
seldom = st.one_of(st.just(b""), st.just(b""), raw)
uints = st.one_of(st.integers(0, 12), st.sampled_from([2**31, 2**32 - 1]))
floats = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, 0.5]))
samplings = st.builds(
    Sampling,
    temperature=floats,
    top_p=floats,
    top_k=uints,
    min_p=floats,
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=uints,
    stop_token_ids=raw,
)
admits = st.builds(
    pb.Admit,
    lane=uints,
    generation=uints,
    token_ids=raw,
    num_prompt_tokens=uints,
    num_cached_tokens=uints,
    block_ids=raw,
    sampling=st.one_of(samplings, st.just(Sampling(top_p=1.0))),
    choice_index=uints,
)
plans = st.builds(
    pb.StepPlan,
    release_lanes=raw,
    rewind_lanes=raw,
    rewind_num_tokens=raw,
    rewind_num_blocks=raw,
    swap_out_src=seldom,
    swap_out_dst=seldom,
    swap_in_src=seldom,
    swap_in_dst=seldom,
    copy_src=raw,
    copy_dst=raw,
    admit=st.lists(admits, max_size=3),
    append_lanes=raw,
    append_block_ids=raw,
    repeat_decode=st.booleans(),
    row_lanes=raw,
    row_num_tokens=raw,
)
scenes = st.tuples(
    st.dictionaries(
        st.integers(0, 7),
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
            st.integers(1, 12),
            st.sampled_from([0.0, 1.0]),
        ),
        max_size=3,
    ),
    st.lists(st.integers(0, 7), max_size=3),
)


Scene = tuple[dict[int, tuple[list[int], int, float]], list[int]]
"""New sequences by lane, each with its tokens, the size of its first chunk and its temperature; lanes to decode."""


def good_plan(generation: int, scene: Scene) -> pb.StepPlan:
    """New sequences on some lanes, with all of their prompt or a first chunk, and decode rows for some other lanes."""
    new, others = scene
    decoding = sorted(set(others) - set(new))
    counts = [min(chunk, len(tokens)) for tokens, chunk, _ in new.values()]
    return pb.StepPlan(
        release_lanes=column(*new),
        admit=[
            admit(
                lane,
                tokens,
                range(lane * 4, lane * 4 + 4),
                generation=generation,
                sampling=Sampling(top_p=1.0, temperature=temperature),
            )
            for lane, (tokens, _, temperature) in new.items()
        ],
        row_lanes=column(*new, *decoding),
        row_num_tokens=column(*counts, *[1] * len(decoding)),
    )


def mutate(plan: pb.StepPlan, cuts: list[tuple[int, int]]) -> pb.StepPlan | None:
    """The plan with some bytes of its frame changed; None if it is no message any more."""
    data = bytearray(plan.SerializeToString())
    for place, value in cuts:
        if data:
            data[place % len(data)] = value
    mutated = pb.StepPlan()
    try:
        mutated.ParseFromString(bytes(data))
    except Exception:
        return None
    return mutated


def assert_in_range(bench: Bench) -> None:
    mirror = bench.mirror
    assert mirror.tables.min() >= 0
    assert mirror.tables.max() < bench.limits.num_blocks
    assert (mirror.table_len >= 0).all()
    assert (mirror.table_len <= mirror.max_blocks).all()
    assert (mirror.position >= 0).all()
    assert (mirror.position <= mirror.num_tokens).all()
    assert (mirror.num_tokens <= bench.limits.max_model_len + 1).all()
    assert mirror.tokens.min() >= 0
    assert mirror.tokens.max() < VOCAB
    refs = np.zeros(bench.limits.num_blocks, np.int64)
    for lane in range(mirror.num_lanes):
        np.add.at(refs, mirror.tables[lane, : mirror.table_len[lane]], 1)
    assert (refs == mirror._refs).all()
    assert mirror.num_mapped_blocks == (refs > 0).sum()
    assert not bench.runner.violations


def run(bench: Bench, plan: pb.StepPlan) -> StepOutcome:
    decoded: DecodedPlan | PlanError
    try:
        decoded = decode_plan(plan, bench.limits)
    except PlanError as error:
        decoded = error
    outcome = bench.executor.execute(decoded, plan.step_id)
    encode_result(outcome)
    assert_in_range(bench)
    return outcome


def assert_still_works(bench: Bench) -> None:
    """A sequence on a fresh lane and blocks is served, in a new session if this one was lost."""
    outcome = run(bench, pb.StepPlan(step_id=1))
    if outcome.failed:
        bench.executor.reset()
    lane = next((i for i in range(8) if bench.mirror.state[i] == LaneState.FREE), 0)
    plan = pb.StepPlan(
        step_id=2,
        release_lanes=column(lane),
        admit=[admit(lane, [1, 2, 3], [31], generation=2**32 - 1)],
        row_lanes=column(lane),
        row_num_tokens=column(3),
    )
    if bench.mirror.generation[lane] < 2**32 - 1:
        assert run(bench, plan).token_ids.tolist() == greedy_continuation([1, 2, 3], 1)


@settings(max_examples=200, deadline=None, suppress_health_check=[SLOW])
@given(st.lists(st.one_of(plans, scenes), max_size=8))
def test_arbitrary_plans(sequence: list[pb.StepPlan | Scene]) -> None:
    bench = Bench(num_host_blocks=6)
    bench.runner.slots[:] = 1  # so that lies about cached positions read something
    for i, item in enumerate(sequence):
        plan = item if isinstance(item, pb.StepPlan) else good_plan(i + 1, item)
        if run(bench, plan).failed:
            bench.executor.reset()
    assert_still_works(bench)
    bench.executor.close()


@settings(max_examples=200, deadline=None, suppress_health_check=[SLOW])
@given(
    st.lists(st.tuples(scenes, st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=3)), max_size=8)
)
def test_good_plans_with_flipped_bytes(sequence: list[tuple[Scene, list[tuple[int, int]]]]) -> None:
    bench = Bench(num_host_blocks=6)
    bench.runner.slots[:] = 1
    for i, (scene, cuts) in enumerate(sequence):
        mutated = mutate(good_plan(i + 1, scene), cuts)
        if mutated is not None and run(bench, mutated).failed:
            bench.executor.reset()
    assert_still_works(bench)
    bench.executor.close()


def test_the_good_plans_are_good() -> None:
    """The two tests above are worth something only if many of their plans run."""
    ran = []

    @settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=[SLOW])
    @given(st.lists(scenes, min_size=3, max_size=8))
    def probe(sequence: list[Scene]) -> None:
        bench = Bench()
        ran.append(sum(bool((run(bench, good_plan(i + 1, s)).token_ids >= 0).any()) for i, s in enumerate(sequence)))

    probe()
    assert sum(count >= 2 for count in ran) > len(ran) // 2
