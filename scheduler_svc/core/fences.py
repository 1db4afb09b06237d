"""Lanes, and the fence: nothing that a plan in flight touches is given out again.

A block is safe once the result of the last plan with a row, copy or admission that touched it has been applied. A
lane is safe once the result of the plan that carries its *release* has: the executor keeps the lane until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cache_svc.blocks.pool import BlockPool


class LanePool:
    """Free lanes, least recently used first, and how often each has been given out."""

    __slots__ = ("_free", "_generations")

    def __init__(self, num_lanes: int) -> None:
        self._free: deque[int] = deque(range(num_lanes))
        self._generations = [0] * num_lanes

    @property
    def num_free(self) -> int:
        """Lanes that can be given out now."""
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """A lane and its generation, counted from 1. IndexError when none is free."""
        lane = self._free.popleft()
        self._generations[lane] += 1
        return lane, self._generations[lane]

    def generation(self, lane: int) -> int:
        """How often the lane has been given out."""
        return self._generations[lane]

    def give_back(self, lanes: Iterable[int]) -> None:
        """The lanes may be given out again."""
        self._free.extend(lanes)

    def free_lanes(self) -> list[int]:
        """Lanes in the order in which they will be given out; for checks."""
        return list(self._free)


class Fences:
    """What sequences have left behind and when it may be used again. Each lane and block id is held once per owner."""

    __slots__ = ("_blocks", "_lanes", "_pool", "_released", "applied_step_id", "lanes")

    def __init__(self, pool: BlockPool, lanes: LanePool, applied_step_id: int) -> None:
        self._pool = pool
        self.lanes = lanes
        self.applied_step_id = applied_step_id
        """The last plan whose result is in; plans are applied in order."""
        self._blocks: dict[int, list[int]] = {}
        self._lanes: dict[int, list[int]] = {}
        self._released: list[int] = []

    @property
    def has_releases(self) -> bool:
        """Whether lanes wait for a plan to carry their release."""
        return bool(self._released)

    def drop_blocks(self, block_ids: list[int], last_step_id: int) -> None:
        """Gives up one reference of each block, last touched by plan `last_step_id`."""
        if last_step_id <= self.applied_step_id:
            self._pool.release(block_ids)
            return
        self._pool.release(block_ids, fenced=True)
        self._blocks.setdefault(last_step_id, []).extend(block_ids)

    def drop_lane(self, lane: int) -> None:
        """The next plan is to release the lane."""
        self._released.append(lane)

    def take_releases(self, step_id: int) -> list[int]:
        """Lanes that plan `step_id` releases; they are held until its result is in."""
        released, self._released = self._released, []
        if released:
            self._lanes[step_id] = released
        return released

    def passed(self, step_id: int) -> None:
        """The result of the plan is in: what it held alone is free."""
        self.applied_step_id = step_id
        self._pool.settle(self._blocks.pop(step_id, ()))
        self.lanes.give_back(self._lanes.pop(step_id, ()))

    def held_blocks(self) -> list[int]:
        """Blocks under a fence, once per fence; for checks."""
        return [block_id for held in self._blocks.values() for block_id in held]

    def held_lanes(self) -> list[int]:
        """Lanes that are released or are to be, but not free yet; for checks."""
        return [*self._released, *(lane for held in self._lanes.values() for lane in held)]
