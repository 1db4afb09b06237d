"""A runner without a model, whose every mistake shows, and helpers to write plans.

`DigestRunner` keeps the token ids of all positions in its pool and computes logits only from what it reads through the
block tables: a wrong slot, table, position or order of copies gives other tokens with certainty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.batch import Batch
from executor_svc.codec import decode_plan
from executor_svc.kv.copy_engine import CopyEngine
from executor_svc.kv.copy_thread import cpu_copies
from executor_svc.kv.host import HostPool
from executor_svc.lanes import LaneMirror
from executor_svc.plans import PlanLimits, StepOutcome
from executor_svc.step import StepExecutor
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.engine.v1.sampling_pb2 import Sampling

VOCAB = 101
POISON = 97
"""A batch with this id raises, as if it ran out of memory."""
NAN = 98
"""The row whose last token this is gets NaN logits."""
INF = 99
EMPTY = -7
"""What a slot holds before it is written."""


def column(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def ids_of(data: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(data, "<i4").tolist()
    return ids


def digest_logits(context: Sequence[int] | NDArray[np.int64], vocab: int = VOCAB) -> NDArray[np.float32]:
    """The logits of `DigestRunner` after these tokens; the arg-max is never a special id."""
    data = hashlib.sha256(np.asarray(context, "<i8").tobytes()).digest()
    logits = np.random.default_rng(int.from_bytes(data[:8], "little")).standard_normal(vocab).astype(np.float32)
    logits[[POISON, NAN, INF]] = -5.0
    return logits


def greedy_continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What `DigestRunner` must generate from a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(digest_logits(tokens).argmax()))
    return tokens[len(prompt) :]


class DigestRunner:
    """See the head of this file."""

    vocab_size = VOCAB
    weight_bytes = 1_000_000
    buffer_bytes_per_token = 0
    dtype_name = kv_dtype_name = "int64"
    device_name = "none"
    attention_name = "digest"
    model_name = "digest"
    fingerprint = "f" * 64
    tokenizer_hash = "t" * 64

    def __init__(self, *, block_size: int = 4, num_blocks: int = 32, max_model_len: int = 64) -> None:
        self.block_size = block_size
        self.bytes_per_block = block_size * 8
        self.max_model_len = max_model_len
        self.num_forwards = 0
        self.broken = False
        self.violations: list[str] = []
        """Batches that broke a promise of `Batch`."""
        self.allocate_kv(num_blocks)

    def allocate_kv(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.slots = np.full(num_blocks * self.block_size, EMPTY, np.int64)

    def forward(self, batch: Batch) -> torch.Tensor:
        self.num_forwards += 1
        try:
            self._check(batch)
        except AssertionError as error:  # the fault barrier would make a mere row error of it
            self.violations.append(repr(error))
            raise
        if self.broken:
            raise RuntimeError("device lost")
        if POISON in batch.token_ids.tolist():
            raise MemoryError("poison\nand a second line")
        self.slots[batch.slot_mapping.numpy()] = batch.token_ids.numpy()
        logits = np.zeros((len(batch.sample_rows), self.vocab_size), np.float32)
        for i, row in enumerate(batch.sample_rows):
            logits[i] = self._logits(batch, row)
        return torch.from_numpy(logits)

    def _logits(self, batch: Batch, row: int) -> NDArray[np.float32]:
        positions = np.arange(batch.context_lens[row])
        table = batch.block_tables[row].numpy()
        context = self.slots[table[positions // self.block_size] * self.block_size + positions % self.block_size]
        assert EMPTY not in context, "reads a position that was never written"
        logits = digest_logits(context, self.vocab_size)
        if context[-1] == NAN:
            logits[3] = np.nan
        if context[-1] == INF:
            logits[3] = -np.inf
        return logits

    def _check(self, batch: Batch) -> None:
        """What `Batch` promises."""
        num_tokens = sum(batch.query_lens)
        assert batch.token_ids.shape == batch.positions.shape == batch.slot_mapping.shape == (num_tokens,)
        assert {batch.token_ids.dtype, batch.positions.dtype, batch.slot_mapping.dtype} == {torch.int64}
        assert batch.block_tables.dtype == torch.int32
        assert batch.block_tables.shape[0] == len(batch.query_lens) == len(batch.context_lens)
        assert batch.block_tables.shape[1] == -(-max(batch.context_lens) // self.block_size)
        assert 0 <= int(batch.token_ids.min()) <= int(batch.token_ids.max()) < self.vocab_size
        assert 0 <= int(batch.block_tables.min()) <= int(batch.block_tables.max()) < self.num_blocks
        ends = np.cumsum(batch.query_lens)
        for row, (query, context, end) in enumerate(zip(batch.query_lens, batch.context_lens, ends, strict=True)):
            positions = np.arange(context - query, context)
            assert query >= 1
            assert batch.positions[end - query : end].tolist() == positions.tolist()
            blocks = batch.block_tables[row].numpy()[positions // self.block_size]
            slots = blocks * self.block_size + positions % self.block_size
            assert batch.slot_mapping[end - query : end].tolist() == slots.tolist()

    def block_bytes(self) -> NDArray[np.uint8]:
        return self.slots.view(np.uint8).reshape(self.num_blocks, self.bytes_per_block)


class Bench:
    """A step executor with its limits; plans go in as messages, outcomes come out."""

    def __init__(
        self,
        runner: DigestRunner | None = None,
        *,
        num_lanes: int = 8,
        max_rows: int = 6,
        num_host_blocks: int = 0,
        make_copies: Callable[..., CopyEngine] = cpu_copies,
        **copies: Any,
    ) -> None:
        self.runner = runner or DigestRunner()
        self.host = HostPool(num_host_blocks, self.runner.bytes_per_block).block_bytes()
        self.mirror = LaneMirror(
            num_lanes=num_lanes,
            block_size=self.runner.block_size,
            num_blocks=self.runner.num_blocks,
            max_model_len=self.runner.max_model_len,
        )
        self.limits = PlanLimits(
            num_lanes=num_lanes,
            num_blocks=self.runner.num_blocks,
            max_rows=max_rows,
            max_tokens=48,
            max_model_len=self.runner.max_model_len,
            vocab_size=self.runner.vocab_size,
            num_host_blocks=num_host_blocks,
        )
        self.copies = make_copies(self.runner.block_bytes(), self.host, **copies)
        self.executor = StepExecutor(self.runner, self.mirror, self.copies)
        self.step_id = 0

    def plan(self, **fields: Any) -> pb.StepPlan:
        self.step_id += 1
        return pb.StepPlan(step_id=self.step_id, **fields)

    def run(self, plan: pb.StepPlan | None = None, **fields: Any) -> StepOutcome:
        plan = self.plan(**fields) if plan is None else plan
        outcome = self.executor.execute(decode_plan(plan, self.limits), plan.step_id)
        assert not self.runner.violations
        return outcome


def admit(
    lane: int, token_ids: Sequence[int], block_ids: Sequence[int], *, generation: int = 1, **fields: Any
) -> pb.Admit:
    sampling = fields.pop("sampling", None) or Sampling(top_p=1.0)
    return pb.Admit(
        lane=lane,
        generation=generation,
        token_ids=column(*token_ids),
        num_prompt_tokens=fields.pop("num_prompt_tokens", len(token_ids)),
        block_ids=column(*block_ids),
        sampling=sampling,
        **fields,
    )
