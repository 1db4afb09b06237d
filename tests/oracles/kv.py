"""The KV-checking oracle: a paged pool of digests, read and written only through block tables.

Blocks are poisoned the moment their lane is released, so a stale table gives wrong ids with certainty. Fences are
checked against the wire itself: an envelope's `ack` says which results the scheduler had when it made the plan. A block
given out again before the result of the last plan that admitted, grew or ran its lane was in is a violation, and so is
a lane before the result of the plan that released it.
"""

from __future__ import annotations

import secrets

from pagemill.engine.v1 import executor_pb2 as pb
from tests.oracles.base import Lane, OracleExecutor
from tests.oracles.expected import START, digest_after, token_after

NOT_SENT = 2**63


class KvExecutor(OracleExecutor):
    """See the head of this file."""

    def on_session(self) -> None:
        geometry = self.geometry
        self._slots = [self._poison() for _ in range(geometry.num_blocks * geometry.block_size)]
        self._owner: dict[int, int] = {}
        """Block → lane."""
        self._freed: dict[tuple[str, int], int] = {}
        """("block" | "lane", id) → last step that touched it."""
        self._result_seq: dict[int, int] = {}
        """Step → number of the message that carried its result."""

    @staticmethod
    def _poison() -> int:
        return secrets.randbits(64)

    def on_admit(self, lane: Lane, envelope: pb.ExecutorEnvelope) -> None:
        self._check_fence("lane", lane.lane, envelope)

    def on_map(self, lane: int, blocks: list[int], envelope: pb.ExecutorEnvelope) -> None:
        for block in blocks:
            if not 0 <= block < self.geometry.num_blocks:
                self.violations.append(f"step {envelope.plan.step_id}: block {block} is outside the pool")
            if block in self._owner:
                self.violations.append(
                    f"step {envelope.plan.step_id}: block {block} of lane {self._owner[block]} goes to lane {lane}"
                )
            self._check_fence("block", block, envelope)
            self._owner[block] = lane

    def _check_fence(self, kind: str, number: int, envelope: pb.ExecutorEnvelope) -> None:
        step_id = self._freed.pop((kind, number), None)
        if step_id is not None and envelope.ack < self._result_seq.get(step_id, NOT_SENT):
            self.violations.append(
                f"step {envelope.plan.step_id}: {kind} {number} is given out before the result of step {step_id} is in"
            )

    def on_release(self, lane: Lane, step_id: int) -> None:
        self._freed["lane", lane.lane] = step_id
        for block in lane.blocks:
            self._owner.pop(block, None)
            self._freed["block", block] = lane.touched_step
            start = block * self.geometry.block_size
            for slot in range(start, start + self.geometry.block_size):
                self._slots[slot] = self._poison()

    def on_result_sent(self, result: pb.StepResult, seq: int) -> None:
        self._result_seq[result.step_id] = seq

    def _slot(self, lane: Lane, position: int) -> int:
        size = self.geometry.block_size
        return lane.blocks[position // size] * size + position % size

    def write(self, lane: Lane, start: int, count: int) -> None:
        previous = self._slots[self._slot(lane, start - 1)] if start else START
        for position in range(start, start + count):
            previous = digest_after(previous, lane.tokens[position])
            self._slots[self._slot(lane, position)] = previous

    def next_ids(self, lane: Lane) -> list[int] | pb.RowError:
        size = self.geometry.block_size
        total, left = 0, lane.position
        for block in lane.blocks:
            total += sum(self._slots[block * size : block * size + min(size, left)])
            left -= size
            if left <= 0:
                break
        return [
            token_after(
                total,
                lane.position,
                seed=lane.seed,
                choice=lane.choice,
                vocab_size=self.geometry.vocab_size,
                forbidden=lane.forbidden(),
            )
        ]
