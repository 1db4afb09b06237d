"""From a loaded model to a ready executor: warm up, measure, size the pool, write the hello."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import secrets
import socket
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.batch import Batch, ModelRunner
from executor_svc.config import ExecutorSettings
from executor_svc.kv.copy_engine import CopyEngine
from executor_svc.kv.copy_thread import cpu_copies
from executor_svc.kv.host import HostPool
from executor_svc.lanes import LaneMirror
from executor_svc.memory import (
    DoesNotFitError,
    PoolRequest,
    measure_peak,
    read_limit,
    resident_bytes,
    size_host_pool,
    size_pool,
)
from executor_svc.plans import PlanLimits
from executor_svc.step import StepExecutor
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.framing import PROTOCOL
from pagemill.logs import kv

log = logging.getLogger(__name__)

LANES_PER_SEQUENCE = 4
"""Lanes per running sequence: a lane waits in the fence for up to pipeline_depth plans, so depths up to 3 never lack
one."""

WARM_UP_BUDGET_S = 0.15
"""Longest warm-up step: the whole start has five seconds for a small model."""

_PROBE_TOKENS = 32
_COPY_BYTES = 24 << 20
"""With its copy 48 MiB: more than the last cache's share of a few cores, and a few milliseconds."""
_COPY_BLOCKS = 4
"""At least, however large they are."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the warm-up found."""

    activation_bytes: int
    """Memory that the largest step needs for a moment."""
    prefill_tokens_per_s: float
    """Of the largest step, or as much of it as the budget allows: chunks at the beginning of their prompts, each with
    its sampling. The better of two, unless the machine is so slow that a second would delay the start."""
    swap_out_bytes_per_s: float = 0.0
    """Of one run of blocks from pool to host memory, both in use before, while nothing computes. 0: not measured."""
    swap_in_bytes_per_s: float = 0.0
    """The same the other way."""


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
    size = runner.bytes_per_block
    if settings.host_kv_memory_bytes and settings.host_kv_memory_bytes < size:
        raise WrongOptionError(
            f"--host-kv-memory-bytes: one block has {size} bytes (got {settings.host_kv_memory_bytes}; 0: no host tier)"
        )
    with torch.inference_mode():
        measured = warm_up(runner, settings.max_num_seqs, settings.max_num_batched_tokens, max_len)
        if settings.host_kv_memory_bytes != 0:
            measured = measure_copies(runner, measured, settings.copy_bytes_per_s)
        num_blocks, num_host_blocks = _allocate(runner, settings, max_len, measured)
    num_lanes = settings.max_num_seqs * LANES_PER_SEQUENCE
    mirror = LaneMirror(num_lanes=num_lanes, block_size=runner.block_size, num_blocks=num_blocks, max_model_len=max_len)
    limits = PlanLimits(
        num_lanes=num_lanes,
        num_blocks=num_blocks,
        max_rows=settings.max_num_seqs,
        max_tokens=settings.max_num_batched_tokens,
        max_model_len=max_len,
        vocab_size=runner.vocab_size,
        num_host_blocks=num_host_blocks,
    )
    executor = StepExecutor(runner, mirror, _copies(runner, settings, num_host_blocks))
    return Ready(executor, limits, make_hello(runner, limits, measured))


def _copies(runner: ModelRunner, settings: ExecutorSettings, num_host_blocks: int) -> CopyEngine:
    try:
        host = HostPool(num_host_blocks, runner.bytes_per_block)
    except OSError as error:
        size = num_host_blocks * runner.bytes_per_block
        raise DoesNotFitError(f"the host tier of {size} bytes cannot be allocated: {error.strerror}") from error
    delay_s = settings.copy_delay_ms / 1000
    return cpu_copies(
        runner.block_bytes(),
        host.block_bytes(),
        delay=(lambda op: delay_s) if delay_s else None,
        bytes_per_s=settings.copy_bytes_per_s,
        verify=settings.verify_copies,
    )


def warm_up(runner: ModelRunner, max_rows: int, max_tokens: int, max_model_len: int) -> Measured:
    """Run a prefill and a decode step on a small pool of their own, which is then forgotten.

    Both have the largest shapes if the step fits `WARM_UP_BUDGET_S`. On a slow CPU with a large model they are as
    large as the budget allows, and the memory of activations is scaled up: it is proportional to the tokens.
    """
    decode = [1] * max_rows
    prefill = largest_rows(max_rows, max_tokens, max_model_len)
    most = max(sum(-(-n // runner.block_size) for n in rows) for rows in (decode, prefill))
    runner.allocate_kv(max(most, -(-_PROBE_TOKENS // runner.block_size), _copied_blocks(runner)))
    probe = largest_rows(1, _PROBE_TOKENS, max_model_len)
    _timed_forward(runner, probe)  # first use of kernels and thread pools: not part of any rate
    affordable = int(sum(probe) / _timed_forward(runner, probe) * WARM_UP_BUDGET_S)
    share = min(1.0, max(affordable, 1) / sum(prefill))
    prefill = largest_rows(max(1, int(max_rows * share)), max(1, int(sum(prefill) * share)), max_model_len)
    seconds: list[float] = []
    peak_bytes = measure_peak(lambda: seconds.append(_timed_forward(runner, prefill)))
    if seconds[0] < 2 * WARM_UP_BUDGET_S:  # again: the first had the system's work for new memory, and perhaps a guest
        seconds.append(_timed_forward(runner, prefill))
    if max_rows <= affordable:
        _timed_forward(runner, decode)
    # Buffers that the probe had made are not in the peak. The pool must leave room for them at their largest.
    buffer_bytes = max_tokens * runner.buffer_bytes_per_token
    return Measured(max(int(peak_bytes / share), buffer_bytes), sum(prefill) / min(seconds))


def measure_copies(runner: ModelRunner, measured: Measured, bytes_per_s: float) -> Measured:
    """`measured` with the rates of copies, of which `bytes_per_s` (0: none) is the most that an operator allows.

    Copies `_COPY_BYTES` between the warm-up pool and a host pool of its own: more than caches hold, and once before the
    clock runs, so that no rate has the system's work for memory that is new. Better of two.
    """
    count = _copied_blocks(runner)
    device = runner.block_bytes()[:count]
    host = HostPool(count, runner.bytes_per_block).block_bytes()

    def rate(dst: NDArray[np.uint8], src: NDArray[np.uint8]) -> float:
        started = time.perf_counter()
        np.copyto(dst, src)
        return src.size / max(time.perf_counter() - started, 1e-9)

    np.copyto(host, device)
    np.copyto(device, host)
    most = bytes_per_s or float("inf")
    swap_out = max(rate(host, device) for _ in range(2))
    swap_in = max(rate(device, host) for _ in range(2))
    return replace(measured, swap_out_bytes_per_s=min(swap_out, most), swap_in_bytes_per_s=min(swap_in, most))


def _copied_blocks(runner: ModelRunner) -> int:
    """Blocks copied by the measurement."""
    return max(_COPY_BLOCKS, _COPY_BYTES // runner.bytes_per_block)


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


def _allocate(runner: ModelRunner, settings: ExecutorSettings, max_len: int, measured: Measured) -> tuple[int, int]:
    """Blocks of the pool, which is allocated, and of the host tier. The arithmetic goes to the log, a line each."""
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
    limit = read_limit()
    pool = size_pool(request, limit, resident_bytes=resident, activation_bytes=measured.activation_bytes)
    log.info("kv pool", extra=kv(weights_bytes=runner.weight_bytes, arithmetic=pool.arithmetic))
    host = size_host_pool(
        request,
        limit,
        num_device_blocks=pool.num_blocks,
        resident_bytes=resident,
        activation_bytes=measured.activation_bytes,
        host_kv_memory_bytes=settings.host_kv_memory_bytes,
    )
    log.info("host tier", extra=kv(arithmetic=host.arithmetic))
    try:
        runner.allocate_kv(pool.num_blocks)
    except (MemoryError, RuntimeError) as error:
        raise DoesNotFitError(f"the KV pool cannot be allocated: {pool.arithmetic}") from error
    return pool.num_blocks, host.num_blocks


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
        num_host_blocks=limits.num_host_blocks,
        bytes_per_block=runner.bytes_per_block,
        max_rows=limits.max_rows,
        max_tokens=limits.max_tokens,
        num_lanes=limits.num_lanes,
        max_model_len=limits.max_model_len,
        swap_out_bytes_per_s=measured.swap_out_bytes_per_s,
        swap_in_bytes_per_s=measured.swap_in_bytes_per_s,
        prefill_tokens_per_s=measured.prefill_tokens_per_s,
        vocab_size=limits.vocab_size,
    )
