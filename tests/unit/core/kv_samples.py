"""Set-up that the tests of the prefix index, the tiers and their costs share."""

from __future__ import annotations

from dataclasses import replace

from cache_svc.blocks.pool import BlockPool
from cache_svc.blocks.table import BlockTable
from scheduler_svc.core.limits import StepLimits, combine
from scheduler_svc.core.memory import KvMemory
from scheduler_svc.core.params import ExecutorLimits, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.sequence import Sequence

EXECUTOR = ExecutorLimits(
    block_size=4,
    num_device_blocks=16,
    max_rows=8,
    max_tokens=160,
    num_lanes=24,
    max_model_len=64,
    num_host_blocks=8,
    bytes_per_block=1000,
    swap_out_bytes_per_s=1e5,
    swap_in_bytes_per_s=2e5,
    prefill_tokens_per_s=100.0,
    model_fingerprint="model",
    kv_dtype="bfloat16",
)


def limits(executor: ExecutorLimits = EXECUTOR, **settings: object) -> StepLimits:
    """Without a limit of a step's time, unless one is given."""
    return combine(replace(SchedulerConfig(max_step_ms=0), **settings), executor)  # type: ignore[arg-type]


def started(number: int, prompt: list[int], block_ids: list[int], **fields: object) -> Sequence:
    spec = SequenceSpec(SeqId(number), prompt, 20, **fields)  # type: ignore[arg-type]
    seq = Sequence(spec, priority=0)
    table = BlockTable(4)
    table.extend(block_ids)
    seq.start(number, table, 0, 0, 0.0)
    return seq


def allocate(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


def computed(memory: KvMemory, num_positions: int = 8, prompt: list[int] | None = None) -> Sequence:
    """A sequence that has computed its prompt of that length (or that one), with its full blocks published."""
    prompt = list(range(num_positions)) if prompt is None else prompt
    seq = started(1, prompt, allocate(memory.device, -(-len(prompt) // 4)))
    seq.num_planned = len(prompt)
    memory.publish(seq, len(prompt))
    return seq


def copy(memory: KvMemory, step_id: int) -> StepPlan:
    """Has what is queued copied by a plan of that number, and reported."""
    plan = StepPlan(step_id)
    memory.copies.write(plan)
    memory.copies.finished(step_id)
    return plan
