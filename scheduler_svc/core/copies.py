"""Copies between the tiers: what the next plan will carry, and what the executor has not reported finished.

A copy holds a reference to both of its blocks from the moment it is queued until it is reported, so neither can be
given out again in between, whoever else lets go of them. A key goes to the destination only with the report: until
then nobody finds a block that is half written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_svc.blocks.pool import BlockPool
from scheduler_svc.core.plan import StepPlan


class Copy(NamedTuple):
    """One block's."""

    src: int
    dst: int
    key: bytes | None
    """Of the content; None: nobody is to find it."""


@dataclass(slots=True)
class Transfer:
    """The copies of one plan, and whether all have finished."""

    swap_outs: list[Copy] = field(default_factory=list)
    """From the device to the host."""
    swap_ins: list[Copy] = field(default_factory=list)
    """From the host to the device."""
    is_done: bool = False

    def __bool__(self) -> bool:
        """Whether there is anything to copy."""
        return bool(self.swap_outs or self.swap_ins)


class Copies:
    """Copies of one executor, in the order of the plans that carry them."""

    __slots__ = ("_device", "_host", "_under_way", "num_swapped_in", "num_swapped_out", "queued")

    def __init__(self, device: BlockPool, host: BlockPool | None) -> None:
        self._device = device
        self._host = host
        self.queued = Transfer()
        """What the next plan carries. Kept by whoever must know when it is done."""
        self._under_way: dict[int, Transfer] = {}
        self.num_swapped_out = 0
        """Blocks copied device to host, over the life of the executor's session."""
        self.num_swapped_in = 0

    @property
    def is_idle(self) -> bool:
        """Whether no copy is queued or under way."""
        return not self.queued and not self._under_way

    def swap_out(self, src: int, dst: int, key: bytes | None) -> None:
        """Queues a copy of a device block to a host block, both referred to by the caller now."""
        assert self._host is not None
        self._device.retain([src])
        self._host.retain([dst])
        self.queued.swap_outs.append(Copy(src, dst, key))

    def swap_in(self, src: int, dst: int, key: bytes | None) -> None:
        """Queues a copy of a host block to a device block, both referred to by the caller now."""
        assert self._host is not None
        self._host.retain([src])
        self._device.retain([dst])
        self.queued.swap_ins.append(Copy(src, dst, key))

    def write(self, plan: StepPlan) -> None:
        """Puts what is queued into the plan."""
        transfer = self.queued
        if not transfer:
            return
        plan.swap_out_src = [copy.src for copy in transfer.swap_outs]
        plan.swap_out_dst = [copy.dst for copy in transfer.swap_outs]
        plan.swap_in_src = [copy.src for copy in transfer.swap_ins]
        plan.swap_in_dst = [copy.dst for copy in transfer.swap_ins]
        self._under_way[plan.step_id] = transfer
        self.queued = Transfer()

    def finished(self, step_id: int) -> bool:
        """The executor reports a plan's copies. False, changing nothing, for one that has none under way."""
        transfer = self._under_way.pop(step_id, None)
        if transfer is None:
            return False
        assert self._host is not None
        for copy in transfer.swap_outs:
            _settle(self._device, self._host, copy)
        for copy in transfer.swap_ins:
            _settle(self._host, self._device, copy)
        self.num_swapped_out += len(transfer.swap_outs)
        self.num_swapped_in += len(transfer.swap_ins)
        transfer.is_done = True
        return True

    def num_leaving(self) -> int:
        """Device blocks that only copies hold. O(blocks under way)."""
        if self.is_idle:
            return 0
        held = Counter(self.device_refs())
        return sum(1 for block_id, count in held.items() if self._device.num_refs(block_id) == count)

    def forget(self, key: bytes | None = None) -> None:
        """What is copied under that key, or under any, is not to be found by it."""
        for transfer in (self.queued, *self._under_way.values()):
            for copies in (transfer.swap_outs, transfer.swap_ins):
                copies[:] = [copy._replace(key=None) if key in {None, copy.key} else copy for copy in copies]

    def device_refs(self) -> list[int]:
        """Device blocks that copies hold, once per copy."""
        transfers = [self.queued, *self._under_way.values()]
        return [copy.src for t in transfers for copy in t.swap_outs] + [
            copy.dst for t in transfers for copy in t.swap_ins
        ]

    def host_refs(self) -> list[int]:
        """Host blocks that copies hold, once per copy."""
        transfers = [self.queued, *self._under_way.values()]
        return [copy.dst for t in transfers for copy in t.swap_outs] + [
            copy.src for t in transfers for copy in t.swap_ins
        ]


def _settle(source: BlockPool, target: BlockPool, copy: Copy) -> None:
    if copy.key is not None:
        target.publish(copy.dst, copy.key)
    source.release([copy.src])
    target.release([copy.dst])
