"""The KV-checking oracle: paged pools of digests in two tiers, read and written only through block tables and copies.

A cell holds the digest of a position: of its token and of every token before it. The next id is computed from the cells
that the block table leads to and from nothing else, so a stale, half-copied, swapped or foreign block gives wrong ids
with certainty; it is also named as a violation, because before each batch every cell that a row will read is compared
with the chain of the lane's own tokens. Blocks are poisoned the moment they are given out to be written.

Fences are checked against the wire itself: an envelope's `ack` says which results the scheduler had when it made the
plan. A device block may be given out again only when the results of the last plans that admitted, grew or ran its lane
or copied it were in, and the report that those copies have finished; a host block likewise. The one exception is what
an executor promises: a block may be swapped out and given out in the same plan. Content that is still there may be
shared at any time.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from pagemill.engine.v1 import executor_pb2 as pb
from tests.oracles.base import Lane, OracleExecutor
from tests.oracles.copies import BlockCopy, CopyKind
from tests.oracles.expected import MASK, START, digest_after, digests, mix, token_after

NOT_SENT = 2**63


@dataclass
class KvCounts:
    """What the oracle has seen over all its sessions."""

    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_copied: int = 0
    num_mismatches: int = 0
    """Copies whose bytes were not those that the plan meant, or blocks that came in other than they went out."""
    num_cached_reads: int = 0
    """Blocks with content in admissions."""
    num_foreign_reads: int = 0
    """Of those, blocks that a lane of another tenant had written."""
    num_killed_copies: int = 0
    """Copies that a new session cut off."""


class _Tier:
    """Cells, writers and fences of the blocks of one memory."""

    def __init__(self, num_blocks: int, poison: Callable[[], list[int]]) -> None:
        self.cells = [poison() for _ in range(num_blocks)]
        self.tenants: list[Hashable] = [None] * num_blocks
        """Whose lane wrote the block."""
        self.row_step = [0] * num_blocks
        """The last plan that admitted, grew or ran a lane that had it."""
        self.copy_step = [0] * num_blocks
        self.is_target = [False] * num_blocks
        """Whether plan `copy_step` copies into it."""


class KvExecutor(OracleExecutor):
    """See the head of this file."""

    def __init__(self, *args: Any, tenant_of: Callable[[Lane], Hashable] | None = None, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.tenant_of = tenant_of
        """Who a lane computes for; with it, reading what another tenant computed is a violation."""
        self.counts = KvCounts()
        self._num_poisons = 0

    def on_session(self) -> None:
        geometry = self.geometry
        self._device = _Tier(geometry.num_blocks, self._poison)
        self._host = _Tier(geometry.num_host_blocks, self._poison)
        self._lanes_of: list[set[int]] = [set() for _ in range(geometry.num_blocks)]
        self._lane_step: dict[int, int] = {}
        """Lane → the plan that released it."""
        self._result_seq: dict[int, int] = {}
        """Step → number of the message that carried its result."""
        self._report_seq: dict[int, int] = {}
        """Step → number of the message that reported its copies as finished."""
        self._meant: dict[tuple[bool, int], int] = {}
        """(is device, block) → checksum that it will have when all queued copies have happened."""
        self._swapped_out: dict[int, int] = {}
        """Host block → checksum of the device block that went there."""
        self._unread: set[int] = set()
        """Lanes admitted with content that no row has read yet."""

    def on_session_over(self) -> None:
        self.counts.num_killed_copies += len(self.copies.pending)

    def _poison(self) -> list[int]:
        self._num_poisons += 1
        return [mix(self._num_poisons)] * self.geometry.block_size

    # Tables

    def on_admit(self, lane: Lane, envelope: pb.ExecutorEnvelope) -> None:
        released = self._lane_step.pop(lane.lane, 0)
        if released and envelope.ack < self._result_seq.get(released, NOT_SENT):
            self.violation(
                f"step {envelope.plan.step_id}: lane {lane.lane} is given out before the result of step {released}"
            )

    def on_map(self, lane: Lane, first: int, envelope: pb.ExecutorEnvelope) -> None:
        step_id = envelope.plan.step_id
        for index in range(first, len(lane.blocks)):
            block = lane.blocks[index]
            if not 0 <= block < self.geometry.num_blocks:
                self.violation(f"step {step_id}: block {block} is outside the pool")
                continue
            if index >= lane.num_cached_blocks:
                self._give_out(block, envelope, f"lane {lane.lane}")
                if not any(copy.device_source == block for copy in self.copies.pending):
                    self._device.cells[block] = self._poison()
            elif lane.lane in self._lanes_of[block]:
                self.violation(f"step {step_id}: block {block} is twice in the table of lane {lane.lane}")
            self._lanes_of[block].add(lane.lane)
        if first == 0 and lane.num_cached_blocks:
            self.counts.num_cached_reads += lane.num_cached_blocks
            self._unread.add(lane.lane)
            self._check_content(lane, step_id, skip=self._targets())

    def on_unmap(self, lane: Lane, blocks: list[int]) -> None:
        for block in blocks:
            if 0 <= block < self.geometry.num_blocks:
                self._lanes_of[block].discard(lane.lane)
                self._device.row_step[block] = max(self._device.row_step[block], lane.touched_step)
        lane.num_cached_blocks = min(lane.num_cached_blocks, len(lane.blocks))

    def on_release(self, lane: Lane, step_id: int) -> None:
        self._lane_step[lane.lane] = step_id
        self._unread.discard(lane.lane)

    def _give_out(self, block: int, envelope: pb.ExecutorEnvelope, to: str) -> None:
        """The block will be overwritten: nobody may have it, and its fences must have passed."""
        step_id, tier = envelope.plan.step_id, self._device
        for holder in sorted(self._lanes_of[block]):
            self.violation(f"step {step_id}: block {block} of lane {holder} goes to {to}")
        ran = tier.row_step[block]
        if ran and envelope.ack < self._result_seq.get(ran, NOT_SENT):
            self.violation(f"step {step_id}: block {block} goes to {to} before the result of step {ran} is in")
        if tier.copy_step[block] != step_id or tier.is_target[block]:
            self._check_copied("block", tier, block, envelope, to)

    def _check_copied(self, kind: str, tier: _Tier, block: int, envelope: pb.ExecutorEnvelope, to: str) -> None:
        copied = tier.copy_step[block]
        if copied and not self._knows_finished(copied, envelope):
            self.violation(
                f"step {envelope.plan.step_id}: {kind} {block} goes to {to} before the copies of step {copied} "
                "are known to have finished"
            )

    def _knows_finished(self, step_id: int, envelope: pb.ExecutorEnvelope) -> bool:
        """Whether the scheduler had the result of that plan and the report of its copies."""
        last = max(self._result_seq.get(step_id, NOT_SENT), self._report_seq.get(step_id, NOT_SENT))
        return envelope.ack >= last

    def on_result_sent(self, result: pb.StepResult, seq: int) -> None:
        self._result_seq[result.step_id] = seq
        for step_id in result.finished_copy_steps:
            if step_id in self._report_seq:
                self.violation(f"the oracle reports the copies of step {step_id} twice")
            self._report_seq[step_id] = seq

    # Copies

    def on_copy_planned(self, copy: BlockCopy, envelope: pb.ExecutorEnvelope) -> None:
        source, target, name = self._tiers(copy)
        if not (0 <= copy.src < len(source.cells) and 0 <= copy.dst < len(target.cells)):
            self.violation(f"step {copy.step_id}: {copy.kind.value} {copy.src} → {copy.dst} is outside a tier")
            return
        if target is self._device:
            self._give_out(copy.dst, envelope, name)
        else:
            self._check_copied("host block", target, copy.dst, envelope, name)
        if copy.kind is CopyKind.IN and not source.copy_step[copy.src]:
            self.violation(f"step {copy.step_id}: {name} reads host block {copy.src}, which was never written")
        copy.checksum = self._meant.get((source is self._device, copy.src), 0) or checksum(source.cells[copy.src])
        self._meant[target is self._device, copy.dst] = copy.checksum
        for tier, block, is_target in ((source, copy.src, False), (target, copy.dst, True)):
            tier.is_target[block] = is_target or (tier.copy_step[block] == copy.step_id and tier.is_target[block])
            tier.copy_step[block] = copy.step_id

    def _tiers(self, copy: BlockCopy) -> tuple[_Tier, _Tier, str]:
        source = self._host if copy.kind is CopyKind.IN else self._device
        target = self._host if copy.kind is CopyKind.OUT else self._device
        return source, target, f"{copy.kind.value} {copy.src} → {copy.dst}"

    def perform(self, copy: BlockCopy) -> None:
        source, target, name = self._tiers(copy)
        if not (0 <= copy.src < len(source.cells) and 0 <= copy.dst < len(target.cells)):
            return
        target.cells[copy.dst] = source.cells[copy.src].copy()
        target.tenants[copy.dst] = source.tenants[copy.src]
        found = checksum(target.cells[copy.dst])
        if found != copy.checksum:
            self._mismatch(f"step {copy.step_id}: {name} copied other bytes than were there when it was planned")
        if self._meant.get((target is self._device, copy.dst)) == copy.checksum:
            del self._meant[target is self._device, copy.dst]
        if copy.kind is CopyKind.OUT:
            self.counts.num_swapped_out += 1
            self._swapped_out[copy.dst] = found
        elif copy.kind is CopyKind.IN:
            self.counts.num_swapped_in += 1
            if self._swapped_out.get(copy.src) != found:
                self._mismatch(f"step {copy.step_id}: {name} brings other bytes than went out")
        else:
            self.counts.num_copied += 1

    def _mismatch(self, text: str) -> None:
        self.counts.num_mismatches += 1
        self.violation(text)

    def _targets(self) -> set[int]:
        """Device blocks whose content is not there yet."""
        return {copy.dst for copy in self.copies.pending if copy.kind is not CopyKind.OUT}

    # Rows

    def before_batch(self, rows: list[int], step_id: int) -> None:
        for lane_id in rows:
            lane = self.lanes.get(lane_id)
            if lane is not None and not lane.is_broken:
                self._check_content(lane, step_id)
                if lane_id in self._unread:
                    self._unread.discard(lane_id)
                    self._check_tenant(lane, step_id)

    def _check_content(self, lane: Lane, step_id: int, skip: set[int] | frozenset[int] = frozenset()) -> None:
        """Every cell that the lane's next row reads is of the lane's own tokens."""
        size, chain = self.geometry.block_size, lane.chain
        while len(chain) < min(lane.position, len(lane.tokens)):
            chain.append(digest_after(chain[-1] if chain else START, lane.tokens[len(chain)]))
        for start, block in zip(range(0, lane.position, size), lane.blocks, strict=False):
            if block in skip or not 0 <= block < self.geometry.num_blocks:
                continue
            wanted = chain[start : min(start + size, lane.position)]
            found = self._device.cells[block]
            if found != wanted and found[: len(wanted)] != wanted:
                offset = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b)
                self.violation(
                    f"step {step_id}: lane {lane.lane} reads block {block} for position {start + offset}, and finds "
                    f"{self._describe(found[offset])}"
                )

    def _describe(self, cell: int) -> str:
        for lane in self.lanes.values():
            chain = digests(lane.tokens)
            if cell in chain:
                return f"position {chain.index(cell)} of lane {lane.lane}"
        return "nothing that a lane of now has computed"

    def _check_tenant(self, lane: Lane, step_id: int) -> None:
        if self.tenant_of is None:
            return
        own = self.tenant_of(lane)
        for block in lane.blocks[: lane.num_cached_blocks]:
            if self._device.tenants[block] != own:
                self.counts.num_foreign_reads += 1
                self.violation(f"step {step_id}: lane {lane.lane} of {own!r} reads block {block} of another tenant")

    def write(self, lane: Lane, start: int, count: int) -> None:
        size, cells = self.geometry.block_size, self._device.cells
        previous = cells[lane.blocks[(start - 1) // size]][(start - 1) % size] if start else START
        for position in range(start, start + count):
            block = lane.blocks[position // size]
            previous = digest_after(previous, lane.tokens[position])
            cells[block][position % size] = previous
            if position == start or position % size == 0:
                self._note_writer(lane, block)

    def spoil(self, lane: Lane, start: int, count: int) -> None:
        size = self.geometry.block_size
        for position in range(start, start + count):
            self._device.cells[lane.blocks[position // size]][position % size] = self._poison()[0]

    def _note_writer(self, lane: Lane, block: int) -> None:
        if len(self._lanes_of[block]) > 1:
            self.violation(f"lane {lane.lane} writes block {block}, which lanes {sorted(self._lanes_of[block])} share")
        if self.tenant_of is not None:
            self._device.tenants[block] = self.tenant_of(lane)

    def next_ids(self, lane: Lane) -> list[int] | pb.RowError:
        size = self.geometry.block_size
        total, left = 0, lane.position
        for block in lane.blocks:
            cells = self._device.cells[block]
            total += sum(cells) if left >= size else sum(cells[:left])
            left -= size
            if left <= 0:
                break
        return [
            token_after(
                total & MASK,
                lane.position,
                seed=lane.seed,
                choice=lane.choice,
                vocab_size=self.geometry.vocab_size,
                forbidden=lane.forbidden(),
            )
        ]


def checksum(cells: list[int]) -> int:
    """CRC-32 of a block, never 0."""
    return zlib.crc32(array("Q", cells)) or 1
