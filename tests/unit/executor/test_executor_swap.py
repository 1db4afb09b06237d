"""Swapped out and resumed equals never swapped, through whole steps; what cannot be copied fails in one line."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from executor_svc.codec import decode_plan, encode_result
from executor_svc.config import ExecutorSettings
from executor_svc.kv.copy_engine import CopyEngine, CopyOp
from executor_svc.kv.copy_thread import CopyThread
from executor_svc.memory import DoesNotFitError
from executor_svc.metrics import ExecutorMetrics
from executor_svc.plans import PlanError, StepOutcome
from executor_svc.runner import PagedRunner, load
from executor_svc.startup import WrongOptionError, prepare
from executor_svc.worker import Exit
from pagemill.engine.v1 import executor_pb2 as pb
from tests.unit.executor.copy_world import NoReadFence, NoWriteFence
from tests.unit.executor.executor_fakes import (
    Bench,
    DigestRunner,
    admit,
    column,
    greedy_continuation,
    ids_of,
)
from tests.unit.executor.executor_scheduler import RunningWorker, until

PROMPT = [5, 6, 7, 8, 9, 10]
OTHER = [50, 51, 52, 53, 54, 55, 56]
LATE_S = 0.03


def late(op: CopyOp) -> float:
    return LATE_S


def copies_with(engine: type[CopyEngine]) -> Callable[..., CopyEngine]:
    def make(device: NDArray[np.uint8], host: NDArray[np.uint8], **options: Any) -> CopyEngine:
        return engine(
            CopyThread(device, host, **options),
            num_device_blocks=len(device),
            num_host_blocks=len(host),
        )

    return make


def taken(outcomes: list[StepOutcome]) -> list[int]:
    return [int(outcome.token_ids[0]) for outcome in outcomes]


def swap_cycle(bench: Bench) -> tuple[list[int], list[StepOutcome]]:
    """Lane 0 runs, is swapped out while lane 1 takes its device blocks, and goes on as lane 2 in other blocks.

    Returns the tokens of the interrupted sequence, and the outcomes of the steps with copies.
    """
    outcomes = [bench.run(admit=[admit(0, PROMPT, [1, 2, 3])], row_lanes=column(0), row_num_tokens=column(6))]
    outcomes += [bench.run(row_lanes=column(0)) for _ in range(4)]
    tokens = PROMPT + taken(outcomes)  # 11 known, 10 computed: the third block is partly full
    swapped = bench.run(
        release_lanes=column(0),
        swap_out_src=column(1, 2, 3),
        swap_out_dst=column(5, 0, 3),
        admit=[admit(1, OTHER, [3, 2, 1])],
        row_lanes=column(1),
        row_num_tokens=column(7),
    )
    resumed = bench.run(
        release_lanes=column(1),
        swap_in_src=column(5, 0, 3),
        swap_in_dst=column(7, 8, 9),
        admit=[admit(2, tokens, [7, 8, 9], num_cached_tokens=10, num_prompt_tokens=6)],
        row_lanes=column(2),
    )
    rest = [bench.run(row_lanes=column(2))]  # position 11 is the last of the table
    return tokens[len(PROMPT) :] + taken([resumed, *rest]), [swapped, resumed, *rest]


def test_a_sequence_goes_on_from_the_host_tier_with_the_same_tokens() -> None:
    for delay in (None, late):
        bench = Bench(num_host_blocks=6, delay=delay)
        tokens, outcomes = swap_cycle(bench)
        assert tokens == greedy_continuation(PROMPT, 7)
        assert taken(outcomes[:1]) == greedy_continuation(OTHER, 1)
        finished = [step for outcome in outcomes if outcome.copies for step in outcome.copies.steps]
        assert finished == [6, 7]
        bench.executor.close()


@pytest.mark.parametrize("engine", [NoReadFence, NoWriteFence])
def test_without_a_fence_it_goes_on_with_other_tokens(engine: type[CopyEngine]) -> None:
    def survives() -> bool:
        bench = Bench(num_host_blocks=6, delay=late, make_copies=copies_with(engine))
        try:
            return swap_cycle(bench)[0] == greedy_continuation(PROMPT, 7)
        finally:
            bench.executor.close()

    assert not all(survives() for _ in range(5))


@pytest.mark.parametrize("num_cached", range(6))
def test_any_number_of_cached_positions_may_be_resumed(num_cached: int) -> None:
    bench = Bench(num_host_blocks=2)
    bench.run(admit=[admit(0, PROMPT, [1, 2])], row_lanes=column(0), row_num_tokens=column(6))
    bench.run(release_lanes=column(0), swap_out_src=column(1, 2), swap_out_dst=column(1, 0))
    outcome = bench.run(
        swap_in_src=column(1, 0),
        swap_in_dst=column(20, 21),
        admit=[admit(3, PROMPT, [20, 21], num_cached_tokens=num_cached)],
        row_lanes=column(3),
        row_num_tokens=column(6 - num_cached),
    )
    assert outcome.token_ids.tolist() == greedy_continuation(PROMPT, 1)


def test_a_swap_in_for_a_lane_without_a_row_does_not_hold_the_batch() -> None:
    gate = threading.Event()
    bench = Bench(num_host_blocks=2, delay=lambda op: 0.0 * gate.wait(20))
    gate.set()
    bench.run(
        admit=[admit(0, PROMPT, [1, 2]), admit(1, OTHER, [3, 4, 5])],
        row_lanes=column(0, 1),
        row_num_tokens=column(6, 7),
    )
    first = bench.run(release_lanes=column(0), swap_out_src=column(1, 2), swap_out_dst=column(0, 1))
    assert first.copies is not None
    assert first.copies.steps == [2]
    gate.clear()
    tokens = PROMPT + greedy_continuation(PROMPT, 1)
    prefetch = bench.run(
        swap_in_src=column(0, 1),
        swap_in_dst=column(8, 9),
        admit=[admit(2, tokens, [8, 9], num_cached_tokens=6)],
        row_lanes=column(1),
    )
    assert taken([prefetch]) == greedy_continuation(OTHER, 2)[1:]
    assert encode_result(prefetch).finished_copy_steps == []
    gate.set()
    both = bench.run(row_lanes=column(2, 1))
    assert both.token_ids.tolist() == [greedy_continuation(PROMPT, 2)[1], greedy_continuation(OTHER, 3)[2]]
    assert encode_result(both).finished_copy_steps == [3]
    assert encode_result(bench.run(row_lanes=column(1))).finished_copy_steps == []
    bench.executor.close()


def test_a_plan_without_rows_answers_when_every_copy_has_finished() -> None:
    bench = Bench(num_host_blocks=4, delay=late)
    bench.run(admit=[admit(0, PROMPT, [1, 2])], row_lanes=column(0), row_num_tokens=column(6))
    early = bench.run(swap_out_src=column(8), swap_out_dst=column(0), row_lanes=column(0))
    assert encode_result(early).finished_copy_steps == []
    result = encode_result(bench.run(copy_src=column(9), copy_dst=column(10)))
    assert result.finished_copy_steps == [2, 3]
    assert result.copy_us >= 2 * LATE_S * 1e6
    assert not bench.copies.busy
    bench.executor.close()


def test_rewound_to_the_middle_of_a_block_and_computed_again() -> None:
    bench = Bench()
    outcomes = [bench.run(admit=[admit(0, PROMPT, [1, 2])], row_lanes=column(0), row_num_tokens=column(6))]
    outcomes += [bench.run(row_lanes=column(0)) for _ in range(2)]
    again = bench.run(
        rewind_lanes=column(0),
        rewind_num_tokens=column(3),
        rewind_num_blocks=column(1),
        append_lanes=column(0, 0),
        append_block_ids=column(15, 16),
        row_lanes=column(0),
        row_num_tokens=column(6),
    )
    assert taken([*outcomes, again]) == greedy_continuation(PROMPT, 4)


def test_a_rewind_beyond_its_blocks_breaks_the_lane() -> None:
    bench = Bench()
    bench.run(admit=[admit(0, PROMPT, [1, 2])], row_lanes=column(0), row_num_tokens=column(6))
    outcome = bench.run(
        rewind_lanes=column(0), rewind_num_tokens=column(5), rewind_num_blocks=column(1), row_lanes=column(0)
    )
    assert outcome.row_errors == {0: pb.ROW_ERROR_CODE_BAD_ROW}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"swap_out_src": column(32), "swap_out_dst": column(0)}, r"swap_out_src: 32\.\.32, expected 0\.\.31"),
        ({"swap_out_src": column(0), "swap_out_dst": column(4)}, r"swap_out_dst: 4\.\.4, expected 0\.\.3"),
        ({"swap_in_src": column(-1), "swap_in_dst": column(0)}, "swap_in_src"),
        ({"swap_in_src": column(0), "swap_in_dst": column(32)}, "swap_in_dst"),
        ({"swap_out_src": column(0, 1), "swap_out_dst": column(0)}, "swap_out: parallel columns of 2 and 1"),
        ({"swap_out_src": column(0)}, "swap_out: parallel columns of 1 and 0"),
        ({"swap_in_dst": column(0)}, "swap_in: parallel columns"),
        ({"swap_out_src": column(0, 1), "swap_out_dst": column(2, 2)}, "swap_out_dst: a block twice"),
        ({"swap_in_src": column(0, 1), "swap_in_dst": column(2, 2)}, "swap_in_dst: a block twice"),
        ({"copy_src": column(0, 1), "copy_dst": column(2, 2)}, "copy_dst: a block twice"),
        ({"copy_src": column(0, 1), "copy_dst": column(1, 2)}, "copy: a block is source and destination"),
        ({"swap_out_src": b"123", "swap_out_dst": column(0)}, "3 bytes"),
    ],
)
def test_copies_that_make_no_sense_are_refused_with_a_line(fields: dict[str, bytes], why: str) -> None:
    bench = Bench(num_host_blocks=4)
    with pytest.raises(PlanError, match=why):
        decode_plan(bench.plan(**fields), bench.limits)


def test_a_swap_in_of_what_was_never_swapped_out_fails_the_step(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(num_host_blocks=4)
    assert bench.run(swap_in_src=column(3), swap_in_dst=column(0)).failed
    assert "host block 3 has no content" in str([vars(record) for record in caplog.records])
    bench.executor.reset()
    assert not bench.run(
        swap_out_src=column(1), swap_out_dst=column(3), swap_in_src=column(3), swap_in_dst=column(0)
    ).failed
    bench.executor.reset()
    assert bench.run(swap_in_src=column(3), swap_in_dst=column(0)).failed  # another session's bytes
    bench.executor.close()


def resume(lane: int, host: list[int], device: list[int], generation: int = 1) -> dict[str, Any]:
    tokens = PROMPT + greedy_continuation(PROMPT, 1)
    return {
        "swap_in_src": column(*host),
        "swap_in_dst": column(*device),
        "admit": [admit(lane, tokens, device, num_cached_tokens=6, generation=generation)],
    }


def test_verified_copies_fail_the_row_whose_bytes_have_changed_and_no_other() -> None:
    bench = Bench(num_host_blocks=4, verify=True)
    good = bench.run(admit=[admit(0, PROMPT, [1, 2])], row_lanes=column(0), row_num_tokens=column(6))
    bench.run(swap_out_src=column(1, 2, 1, 2), swap_out_dst=column(0, 1, 2, 3), release_lanes=column(0), admit=[])
    bench.host[1, 3] ^= 1
    plan = resume(1, [0, 1], [5, 6])
    other = resume(2, [2, 3], [7, 8])
    outcome = bench.run(
        swap_in_src=plan["swap_in_src"] + other["swap_in_src"],
        swap_in_dst=plan["swap_in_dst"] + other["swap_in_dst"],
        admit=plan["admit"] + other["admit"],
        row_lanes=column(1, 2),
    )
    assert outcome.row_errors == {0: pb.ROW_ERROR_CODE_INTERNAL}
    assert outcome.token_ids.tolist() == [-1, greedy_continuation(PROMPT, 2)[1]]
    assert not good.failed
    assert outcome.copies is not None
    assert outcome.copies.num_mismatches == 1
    metrics = ExecutorMetrics()
    metrics.step(outcome, num_rows=2, num_tokens=2)
    value = metrics.registry.get_sample_value
    assert value("pagemill_copy_mismatches_total") == 1
    assert value("pagemill_swap_bytes_total", {"direction": "in"}) == 4 * bench.runner.bytes_per_block
    assert (value("pagemill_swap_seconds_sum", {"direction": "in"}) or 0) > 0
    # A copy of the changed block is as bad, on the way out and back too; new content makes the block good again.
    outcome = bench.run(
        release_lanes=column(1),
        copy_src=column(6),
        copy_dst=column(9),
        swap_out_src=column(6),
        swap_out_dst=column(1),
        admit=[admit(1, PROMPT, [5, 9], num_cached_tokens=5, generation=2), admit(3, OTHER, [20, 6])],
        row_lanes=column(1, 3),
        row_num_tokens=column(1, 7),
    )
    assert outcome.row_errors == {0: pb.ROW_ERROR_CODE_INTERNAL}
    assert outcome.token_ids[1] == greedy_continuation(OTHER, 1)[0]
    assert bench.run(row_lanes=column(3)).token_ids.tolist() == greedy_continuation(OTHER, 2)[1:]
    outcome = bench.run(**resume(4, [0, 1], [10, 11]), row_lanes=column(4, 2))
    assert outcome.row_errors == {0: pb.ROW_ERROR_CODE_INTERNAL}
    assert not outcome.failed
    bench.executor.close()


def test_a_bad_block_alone_in_its_step_is_not_the_devices_fault() -> None:
    bench = Bench(num_host_blocks=2, verify=True)
    for generation in range(1, 6):
        bench.run(
            admit=[admit(0, PROMPT, [1, 2], generation=generation)], row_lanes=column(0), row_num_tokens=column(6)
        )
        bench.run(release_lanes=column(0), swap_out_src=column(1, 2), swap_out_dst=column(0, 1))
        bench.host[0, 0] ^= 1
        outcome = bench.run(**resume(1, [0, 1], [5, 6], generation), row_lanes=column(1))
        assert outcome.row_errors == {0: pb.ROW_ERROR_CODE_INTERNAL}
        assert not outcome.failed
        bench.run(release_lanes=column(1))
    bench.executor.close()


def test_verified_copies_of_honest_memory_change_nothing() -> None:
    bench = Bench(num_host_blocks=6, verify=True)
    assert swap_cycle(bench)[0] == greedy_continuation(PROMPT, 7)
    bench.executor.close()


def test_results_on_the_wire_name_finished_copies() -> None:
    with RunningWorker(Bench(num_host_blocks=2)) as running:
        scheduler = running.scheduler
        for epoch in (1, 2):
            scheduler.start(epoch) if epoch == 1 else scheduler.accept(epoch)
            result = scheduler.step(pb.StepPlan(step_id=1, swap_out_src=column(3, 4), swap_out_dst=column(0, 1)))
            assert result.finished_copy_steps == [1]
            result = scheduler.step(
                pb.StepPlan(step_id=2, admit=[admit(0, PROMPT, [1, 2])], row_lanes=column(0), row_num_tokens=column(6))
            )
            assert result.finished_copy_steps == []
            assert ids_of(result.token_ids) == greedy_continuation(PROMPT, 1)


@pytest.mark.parametrize("end", ["stop", "session"])
def test_neither_a_stop_nor_a_new_session_waits_for_throttled_copies(end: str) -> None:
    with RunningWorker(Bench(num_host_blocks=2, delay=lambda op: 1e6)) as running:
        scheduler, compute = running.scheduler, running.worker._compute
        scheduler.start(epoch=1)
        scheduler.send(plan=pb.StepPlan(step_id=1, swap_out_src=column(3, 4), swap_out_dst=column(0, 1)))
        until(lambda: compute.running_step == 1 and running.bench.executor._copies.busy)
        if end == "stop":
            running.worker.stop()
            assert list(scheduler.receive("result").result.finished_copy_steps) == [1]
            assert scheduler.receive("goodbye").goodbye.reason == "stopped"
            assert running.join() is Exit.STOPPED
            return
        scheduler.accept(epoch=2)
        result = scheduler.step(
            pb.StepPlan(step_id=1, admit=[admit(0, PROMPT, [1, 2])], row_lanes=column(0), row_num_tokens=column(6))
        )
        assert ids_of(result.token_ids) == greedy_continuation(PROMPT, 1)


# A real model


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=80,
        max_position_embeddings=64,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.08)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, tiny_llama: Path) -> PagedRunner:
    return load(tiny_llama, dtype=request.param, block_size=4, num_threads=1)


def settings_for(model: Path, **more: Any) -> ExecutorSettings:
    return ExecutorSettings(model=model, max_num_seqs=4, max_num_batched_tokens=32, num_device_blocks=40, **more)


def test_a_llama_swapped_out_and_in_gives_the_same_ids(runner: PagedRunner, tiny_llama: Path) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(97) for _ in range(n)] for n in (5, 11, 18)]
    expected = [generate(runner, tiny_llama, prompt, swap_every=0) for prompt in prompts]
    for swap_every in (1, 3):
        got = [generate(runner, tiny_llama, prompt, swap_every=swap_every) for prompt in prompts]
        assert got == expected


def generate(runner: PagedRunner, model: Path, prompt: list[int], *, swap_every: int, count: int = 12) -> list[int]:
    """Greedy ids; every `swap_every` tokens the sequence goes to the host, its old blocks are ruined, and back."""
    ready = prepare(runner, settings_for(model, host_kv_memory_bytes=runner.bytes_per_block * 16, copy_delay_ms=2))
    rng = random.Random(len(prompt))
    tokens, blocks, lane, step_id = list(prompt), rng.sample(range(40), 16), 0, 0

    def run(**fields: Any) -> StepOutcome:
        nonlocal step_id
        step_id += 1
        plan = decode_plan(pb.StepPlan(step_id=step_id, **fields), ready.limits)
        outcome = ready.executor.execute(plan, step_id)
        assert not outcome.failed
        assert not outcome.row_errors
        return outcome

    outcome = run(admit=[admit(0, tokens, blocks)], row_lanes=column(0), row_num_tokens=column(len(tokens)))
    tokens.append(int(outcome.token_ids[0]))
    while len(tokens) < len(prompt) + count:
        more: dict[str, Any] = {}
        if swap_every and len(tokens) % swap_every == 0:
            host = rng.sample(range(16), 16)
            run(release_lanes=column(lane), swap_out_src=column(*blocks), swap_out_dst=column(*host))
            runner.block_bytes()[blocks] = 0xFF  # NaN in both types
            blocks, lane = rng.sample(range(40), 16), (lane + 1) % 4
            again = admit(lane, tokens, blocks, num_cached_tokens=len(tokens) - 1, generation=step_id)
            more = {"swap_in_src": column(*host), "swap_in_dst": column(*blocks), "admit": [again]}
        tokens.append(int(run(**more, row_lanes=column(lane)).token_ids[0]))
    ready.executor.close()
    return tokens[len(prompt) :]


def test_the_hello_tells_of_the_host_tier(tiny_llama: Path) -> None:
    runner = load(tiny_llama, dtype="float32", block_size=4, num_threads=1)
    size = runner.bytes_per_block
    hello = prepare(runner, settings_for(tiny_llama)).hello
    assert hello.num_host_blocks == 80  # twice the device's: there is memory for more
    assert hello.swap_out_bytes_per_s > 1e6
    assert hello.swap_in_bytes_per_s > 1e6
    hello = prepare(runner, settings_for(tiny_llama, host_kv_memory_bytes=7 * size + 1, copy_bytes_per_s=5e5)).hello
    assert hello.num_host_blocks == 7
    assert (hello.swap_out_bytes_per_s, hello.swap_in_bytes_per_s) == (5e5, 5e5)
    ready = prepare(runner, settings_for(tiny_llama, host_kv_memory_bytes=0))
    assert (ready.hello.num_host_blocks, ready.hello.swap_out_bytes_per_s) == (0, 0)
    with pytest.raises(PlanError, match="unsupported: swap_out"):
        decode_plan(pb.StepPlan(swap_out_src=column(0), swap_out_dst=column(0)), ready.limits)
    with pytest.raises(WrongOptionError, match=f"--host-kv-memory-bytes: one block has {size} bytes"):
        prepare(runner, settings_for(tiny_llama, host_kv_memory_bytes=size - 1))


@pytest.mark.parametrize("asked", [1 << 50, 1 << 63])
def test_a_host_tier_larger_than_the_machine_is_refused_before_allocation(tiny_llama: Path, asked: int) -> None:
    runner = load(tiny_llama, dtype="float32", block_size=4, num_threads=1)
    with pytest.raises(DoesNotFitError, match=r"--host-kv-memory-bytes: [0-9.]+ GiB do not fit, .* - resident"):
        prepare(runner, settings_for(tiny_llama, host_kv_memory_bytes=asked))
    assert len(runner.block_bytes()) != 40  # still that of the warm-up


def test_without_copies_no_copy_thread_is_started() -> None:
    bench = Bench(DigestRunner(), num_host_blocks=4)
    before = threading.active_count()
    bench.run(admit=[admit(0, PROMPT, [1, 2])], row_lanes=column(0), row_num_tokens=column(6))
    assert bench.run(row_lanes=column(0)).copies is None
    assert threading.active_count() == before
