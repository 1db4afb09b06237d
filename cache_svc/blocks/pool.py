"""`BlockPool`: who holds which block of one tier of one executor.

    allocate            release (last reference)            next allocate
    free ──────► used ──────────────────────────────► free
                   │ release(fenced=True)       ▲
                   └──────────► in flight ──────┘ settle (the last fence has passed)

A block may be shared (`retain`), and several fences may hold it at once; it is free when neither a reference nor a
fence is left. A second tier is a second instance. Callers ask only `allocate` and `num_allocatable`, so content kept
for reuse (a block that nobody refers to but that still has a hash) can enter here as one more state that `allocate`
evicts, oldest first, without any caller noticing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class BlockPool:
    """Reference counts and the free list of `num_blocks` blocks with ids from 0.

    Invariant: free + used + cached + in flight + reserved = total. The free list is in eviction order: the block that
    has been free the longest goes first, so content stays as long as it can.
    """

    __slots__ = ("_fences", "_free", "_refs", "num_blocks", "num_in_flight", "num_reserved", "num_used")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"Got {num_blocks = } but expected at least 1")
        self.num_blocks = num_blocks
        self.num_used = 0
        """Blocks with at least one reference."""
        self.num_in_flight = 0
        """Blocks without a reference that a step in flight may still touch."""
        self.num_reserved = 0
        """Free blocks that are promised: only `allocate(reserved=True)` takes them."""
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks
        self._fences = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without reference, fence, content or promise."""
        return len(self._free) - self.num_reserved

    @property
    def num_cached(self) -> int:
        """Blocks without a reference whose content is kept for reuse; none until there is a prefix index."""
        return 0

    @property
    def num_allocatable(self) -> int:
        """The largest `n` for which `allocate(n)` gives blocks now."""
        return len(self._free) - self.num_reserved

    def allocate(self, num_blocks: int, *, reserved: bool = False) -> list[int] | None:
        """Takes blocks with one reference each, all or nothing; None when there are not enough.

        With `reserved` they come out of an earlier `reserve`, which cannot fail: ValueError past the promise.
        """
        free = self._free
        if reserved:
            self.unreserve(num_blocks)
        elif num_blocks > len(free) - self.num_reserved:
            return None
        popleft = free.popleft
        block_ids = [popleft() for _ in range(num_blocks)]
        refs = self._refs
        for block_id in block_ids:
            refs[block_id] = 1
        self.num_used += num_blocks
        return block_ids

    def reserve(self, num_blocks: int) -> bool:
        """Promises free blocks to a later `allocate(reserved=True)`; False, changing nothing, if there are too few."""
        if num_blocks > self.num_allocatable:
            return False
        self.num_reserved += num_blocks
        return True

    def unreserve(self, num_blocks: int) -> None:
        """Gives a promise back. ValueError when more than was promised."""
        if not 0 <= num_blocks <= self.num_reserved:
            raise ValueError(f"Got {num_blocks = } but expected at most {self.num_reserved} reserved")
        self.num_reserved -= num_blocks

    def retain(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to each; a block in flight becomes used. ValueError, changing nothing, for a free one."""
        refs, fences = self._refs, self._fences
        if any(refs[block_id] == 0 and fences[block_id] == 0 for block_id in block_ids):
            raise ValueError(f"Got {block_ids = } but expected blocks that are used or in flight")
        for block_id in block_ids:
            if refs[block_id] == 0:
                self.num_in_flight -= 1
                self.num_used += 1
            refs[block_id] += 1

    def release(self, block_ids: Sequence[int], *, fenced: bool = False) -> None:
        """Drops a reference of each; ids must differ. ValueError, changing nothing, for one without a reference.

        A block without any reference left is free at once, or with `fenced` in flight until `settle`. The last block
        of a table goes to the head of what this call frees: a shared prefix is worth more than a tail.
        """
        refs, fences, free = self._refs, self._fences, self._free
        if block_ids and min(map(refs.__getitem__, block_ids)) < 1:
            raise ValueError(f"Got {block_ids = } but expected blocks with a reference")
        for block_id in reversed(block_ids):
            refs[block_id] -= 1
            if fenced:
                fences[block_id] += 1
            if refs[block_id] == 0:
                self.num_used -= 1
                if fences[block_id]:
                    self.num_in_flight += 1
                else:
                    free.append(block_id)

    def settle(self, block_ids: Sequence[int]) -> None:
        """Drops one fence of each; ids may repeat. ValueError for a block without one."""
        refs, fences, free = self._refs, self._fences, self._free
        for block_id in block_ids:
            if fences[block_id] < 1:
                raise ValueError(f"Got {block_id = } but expected a fenced block")
            fences[block_id] -= 1
            if fences[block_id] == 0 and refs[block_id] == 0:
                self.num_in_flight -= 1
                free.append(block_id)

    def num_refs(self, block_id: int) -> int:
        """References to the block."""
        return self._refs[block_id]

    def num_fences(self, block_id: int) -> int:
        """Fences that hold the block."""
        return self._fences[block_id]

    def free_ids(self) -> list[int]:
        """The free list in eviction order, promised blocks included; for checks."""
        return list(self._free)
