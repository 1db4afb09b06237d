"""From a loaded model to a ready executor: warm up, measure, size the pool, write the hello."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import secrets
import socket
import time
from dataclasses import dataclass

import torch

from executor_svc.batch import Batch, ModelRunner
from executor_svc.codec import PlanLimits
from executor_svc.config import ExecutorSettings
from executor_svc.lanes import LaneMirror
from executor_svc.memory import (
    DoesNotFitError,
    PoolRequest,
    measure_peak,
    read_limit,
    resident_bytes,
    size_pool,
)
from executor_svc.step import StepExecutor
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.framing import PROTOCOL
from pagemill.logs import kv

log = logging.getLogger(__name__)

LANES_PER_SEQUENCE = 4
"""Lanes per running sequence: a lane waits in the fence for up to pipeline_depth plans, so depths up to 3 never lack
one."""

WARM_UP_BUDGET_S = 0.25
"""Longest warm-up step: the whole start has five seconds for a small model."""

_PROBE_TOKENS = 32
_COPY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """What the warm-up found."""

    activation_bytes: int
    """Memory that the largest step needs for a moment."""
    prefill_tokens_per_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything the worker needs."""

    executor: StepExecutor
    limits: PlanLimits
    hello: pb.ExecutorHello


class WrongOptionError(ValueError):
    """An option that this model or machine cannot honour; the text is one line that begins with the flag."""


def check_model_len(settings: ExecutorSettings, positions: int) -> None:
    """Raises WrongOptionError when --max-model-len is above the model's own `positions`."""
    if settings.max_model_len is not None and settings.max_model_len > positions:
        raise WrongOptionError(f"--max-model-len: the model has {positions} positions (got {settings.max_model_len})")


def prepare(runner: ModelRunner, settings: ExecutorSettings) -> Ready:
    """Measure, allocate the pool, build the mirror. Raises DoesNotFitError, WrongOptionError."""
    check_model_len(settings, runner.max_model_len)
    max_len = settings.max_model_len or runner.max_model_len
    with torch.inference_mode():
        measured = warm_up(runner, settings.max_num_seqs, settings.max_num_batched_tokens, max_len)
        num_blocks = _allocate(runner, settings, max_len, measured)
    num_lanes = settings.max_num_seqs * LANES_PER_SEQUENCE
    mirror = LaneMirror(num_lanes=num_lanes, block_size=runner.block_size, num_blocks=num_blocks, max_model_len=max_len)
    limits = PlanLimits(
        num_lanes=num_lanes,
        num_blocks=num_blocks,
        max_rows=settings.max_num_seqs,
        max_tokens=settings.max_num_batched_tokens,
        max_model_len=max_len,
        vocab_size=runner.vocab_size,
    )
    return Ready(StepExecutor(runner, mirror), limits, make_hello(runner, limits, measured))


def warm_up(runner: ModelRunner, max_rows: int, max_tokens: int, max_model_len: int) -> Measured:
    """Run a prefill and a decode step on a small pool of their own, which is then forgotten.

    Both have the largest shapes if the step fits `WARM_UP_BUDGET_S`. On a slow CPU with a large model they are as
    large as the budget allows, and the memory of activations is scaled up: it is proportional to the tokens.
    """
    decode = [1] * max_rows
    prefill = largest_rows(max_rows, max_tokens, max_model_len)
    most = max(sum(-(-n // runner.block_size) for n in rows) for rows in (decode, prefill))
    copied = max(1, min(most // 2, _COPY_BYTES // runner.bytes_per_block))
    runner.allocate_kv(max(most, 2 * copied, -(-_PROBE_TOKENS // runner.block_size)))
    probe = largest_rows(1, _PROBE_TOKENS, max_model_len)
    _timed_forward(runner, probe)  # first use of kernels and thread pools: not part of any rate
    affordable = int(sum(probe) / _timed_forward(runner, probe) * WARM_UP_BUDGET_S)
    share = min(1.0, max(affordable, 1) / sum(prefill))
    prefill = largest_rows(max(1, int(max_rows * share)), max(1, int(sum(prefill) * share)), max_model_len)
    seconds: list[float] = []
    peak_bytes = measure_peak(lambda: seconds.append(_timed_forward(runner, prefill)))
    if max_rows <= affordable:
        _timed_forward(runner, decode)
    started = time.perf_counter()
    runner.copy_blocks(range(copied), range(copied, 2 * copied))
    copy_rate = copied * runner.bytes_per_block / max(time.perf_counter() - started, 1e-9)
    return Measured(int(peak_bytes / share), sum(prefill) / seconds[0], copy_rate)


def _timed_forward(runner: ModelRunner, lengths: list[int]) -> float:
    batch = _dummy_batch(runner, lengths)
    started = time.perf_counter()
    runner.forward(batch)
    return max(time.perf_counter() - started, 1e-9)


def largest_rows(max_rows: int, max_tokens: int, max_model_len: int) -> list[int]:
    """Tokens per row of the step with most tokens and most sampling rows at once."""
    rows = min(max_rows, max_tokens)
    lengths = [1] * rows
    for i in range(rows):
        spare = max_tokens - sum(lengths)
        lengths[i] += min(spare, max_model_len - 1)
    return lengths


def _dummy_batch(runner: ModelRunner, lengths: list[int]) -> Batch:
    """New sequences of these lengths, each in blocks of its own, all sampling."""
    size = runner.block_size
    counts = [-(-n // size) for n in lengths]
    tables = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    slots: list[int] = []
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        slots.extend(range(first * size, first * size + length))
        first += count
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Batch(
        token_ids=positions % runner.vocab_size,
        positions=positions,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_lens=lengths,
        context_lens=lengths,
        block_tables=tables,
        sample_rows=list(range(len(lengths))),
    )


def _allocate(runner: ModelRunner, settings: ExecutorSettings, max_len: int, measured: Measured) -> int:
    """Size the pool and allocate it; the arithmetic goes to the log in one line."""
    request = PoolRequest(
        block_size=runner.block_size,
        bytes_per_block=runner.bytes_per_block,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_len,
        max_model_len_is_explicit=settings.max_model_len is not None,
        utilization=settings.memory_utilization,
        kv_memory_bytes=settings.kv_memory_bytes,
        num_device_blocks=settings.num_device_blocks,
    )
    resident = max(resident_bytes(), runner.weight_bytes)
    pool = size_pool(request, read_limit(), resident_bytes=resident, activation_bytes=measured.activation_bytes)
    log.info("kv pool", extra=kv(weights_bytes=runner.weight_bytes, arithmetic=pool.arithmetic))
    try:
        runner.allocate_kv(pool.num_blocks)
    except (MemoryError, RuntimeError) as error:
        raise DoesNotFitError(f"the KV pool cannot be allocated: {pool.arithmetic}") from error
    return pool.num_blocks


def make_hello(runner: ModelRunner, limits: PlanLimits, measured: Measured) -> pb.ExecutorHello:
    """Everything a scheduler must know."""
    return pb.ExecutorHello(
        protocol_min=PROTOCOL,
        protocol_max=PROTOCOL,
        schema_hash=hashlib.sha256(pb.DESCRIPTOR.serialized_pb).hexdigest()[:16],
        version=importlib.metadata.version("pagemill"),
        incarnation=secrets.token_hex(8),
        host=socket.gethostname(),
        device=runner.device_name,
        rank=0,
        world_size=1,
        model_fingerprint=runner.fingerprint,
        tokenizer_hash=runner.tokenizer_hash,
        dtype=runner.dtype_name,
        kv_dtype=runner.kv_dtype_name,
        block_size=runner.block_size,
        num_device_blocks=limits.num_blocks,
        num_host_blocks=0,
        bytes_per_block=runner.bytes_per_block,
        max_rows=limits.max_rows,
        max_tokens=limits.max_tokens,
        num_lanes=limits.num_lanes,
        max_model_len=limits.max_model_len,
        swap_out_bytes_per_s=measured.copy_bytes_per_s,
        swap_in_bytes_per_s=measured.copy_bytes_per_s,
        prefill_tokens_per_s=measured.prefill_tokens_per_s,
        vocab_size=limits.vocab_size,
    )
