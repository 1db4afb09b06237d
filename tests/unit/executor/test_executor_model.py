"""The whole executor on the demo model: plans in, tokens out, against the runner alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from executor_svc.batch import Batch, ModelRunner
from executor_svc.config import ExecutorSettings
from executor_svc.runner import load
from executor_svc.startup import Ready, prepare
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.engine.v1.sampling_pb2 import Sampling
from tests.unit.executor.executor_fakes import Bench, admit, column, ids_of
from tests.unit.executor.executor_scheduler import RunningWorker

pytestmark = pytest.mark.model

BLOCK, NUM_NEW = 16, 6
LENGTHS = [1, 17, 40]


@pytest.fixture(scope="module")
def runner(demo_model: Path) -> ModelRunner:
    return load(demo_model, dtype="float32", block_size=BLOCK, num_threads=1)


@pytest.fixture(scope="module")
def ready(runner: ModelRunner, demo_model: Path) -> Ready:
    settings = ExecutorSettings(model=demo_model, max_num_seqs=8, max_num_batched_tokens=64, num_device_blocks=64)
    return prepare(runner, settings)


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(100, vocab_size) for _ in range(length)] for length in LENGTHS]


def greedy_alone(runner: ModelRunner, prompt: list[int]) -> list[int]:
    """Greedy tokens from the runner with one row per step, in blocks 0, 1, 2, …"""
    tokens, computed = list(prompt), 0
    for _ in range(NUM_NEW):
        positions = torch.arange(computed, len(tokens))
        logits = runner.forward(
            Batch(
                token_ids=torch.tensor(tokens[computed:]),
                positions=positions,
                slot_mapping=positions,
                query_lens=[len(tokens) - computed],
                context_lens=[len(tokens)],
                block_tables=torch.arange(-(-len(tokens) // BLOCK), dtype=torch.int32)[None],
                sample_rows=[0],
            )
        )
        computed = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


class Lanes:
    """Plans for all prompts at once: chunks of random size beside decode rows, scattered blocks."""

    def __init__(self, all_prompts: list[list[int]], num_blocks: int, sampling: Sampling) -> None:
        self.rng = random.Random(5)
        free = list(range(num_blocks))
        self.rng.shuffle(free)
        self.tokens = [list(prompt) for prompt in all_prompts]
        self.done = [0] * len(all_prompts)
        self.admits = []
        for lane, prompt in enumerate(all_prompts):
            blocks = [free.pop() for _ in range(-(-(len(prompt) + NUM_NEW) // BLOCK))]
            self.admits.append(admit(lane, prompt, blocks, sampling=sampling))

    def next_plan(self, step_id: int, all_prompts: list[list[int]]) -> pb.StepPlan | None:
        lanes, counts, budget = [], [], 64
        for lane, tokens in enumerate(self.tokens):
            if len(tokens) - len(all_prompts[lane]) < NUM_NEW and budget > 0:
                left = len(tokens) - self.done[lane]
                lanes.append(lane)
                counts.append(min(budget, left if left == 1 else self.rng.randint(1, left)))
                budget -= counts[-1]
        admits, self.admits = self.admits, []
        plan = pb.StepPlan(step_id=step_id, admit=admits, row_lanes=column(*lanes), row_num_tokens=column(*counts))
        for lane, count in zip(lanes, counts, strict=True):
            self.done[lane] += count
        return plan if lanes else None

    def take(self, plan: pb.StepPlan, result: pb.StepResult) -> None:
        assert result.status == pb.STEP_STATUS_OK
        for lane, token in zip(ids_of(plan.row_lanes), ids_of(result.token_ids), strict=True):
            assert (token >= 0) == (self.done[lane] == len(self.tokens[lane]))
            if token >= 0:
                self.tokens[lane].append(token)


def serve(ready: Ready, all_prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    bench = Bench()
    bench.executor, bench.limits = ready.executor, ready.limits
    lanes = Lanes(all_prompts, ready.limits.num_blocks, sampling)
    with RunningWorker(bench) as running:
        running.scheduler.start(epoch=1)
        step_id = 0
        while (plan := lanes.next_plan(step_id := step_id + 1, all_prompts)) is not None:
            lanes.take(plan, running.scheduler.step(plan))
    ready.executor.reset()
    return [tokens[len(prompt) :] for tokens, prompt in zip(lanes.tokens, all_prompts, strict=True)]


def test_batches_of_chunks_and_decodes_equal_the_runner_alone(runner: ModelRunner, ready: Ready) -> None:
    all_prompts = prompts(runner.vocab_size)
    expected = [greedy_alone(runner, prompt) for prompt in all_prompts]
    assert serve(ready, all_prompts, Sampling(top_p=1.0)) == expected
    tiny = Sampling(temperature=1e-4, top_p=1e-9)
    assert serve(ready, all_prompts, tiny) == expected


def test_seeded_streams_repeat_whatever_the_batches(runner: ModelRunner, ready: Ready) -> None:
    all_prompts = prompts(runner.vocab_size)
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=99)
    together = serve(ready, all_prompts, sampling)
    assert together == [serve(ready, [prompt], sampling)[0] for prompt in all_prompts]
    assert together != serve(ready, all_prompts, Sampling(temperature=1.0, top_p=0.95, seed=100))


def test_the_hello_tells_the_truth(runner: ModelRunner, ready: Ready) -> None:
    hello = ready.hello
    assert (hello.num_device_blocks, hello.num_host_blocks, hello.block_size) == (64, 128, BLOCK)
    assert (hello.max_rows, hello.max_tokens, hello.num_lanes) == (8, 64, 32)
    assert hello.vocab_size == runner.vocab_size
    assert hello.model_fingerprint == runner.fingerprint
    assert hello.prefill_tokens_per_s > 0
    assert hello.swap_out_bytes_per_s > 0
    assert runner.num_blocks == 64
