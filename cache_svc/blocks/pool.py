"""`BlockPool`: who holds which block of one tier of one executor, and which blocks hold known content.

                          release (last reference), settle (last fence)
              allocate    without a key          with a key
    free ──────► used ────────► free               used ────────► cached ──┐
      ▲            │ release(fenced=True)            ▲                     │ allocate: the least recently used
      │            └──► in flight ──► settle         └──── retain ─────────┤ loses its key and is used
      └──────────────────────────────── unpublish, flush ──────────────────┘

A block may be shared (`retain`), and several fences may hold it at once. `publish` says that a block which is used or
in flight holds the content named by a key (`hashing`); the block can be found under its key for as long as it has one.
When neither a reference nor a fence is left, a block with a key is *cached*: kept for reuse, and taken back by
`allocate` when nothing is free; first those whose owners have more than their share (`shares`). A second tier is a
second instance.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from cache_svc.blocks.shares import Shares


class Evicted(NamedTuple):
    """Content that had to go."""

    block_id: int
    key: bytes
    owner: bytes
    """Empty where no shares are counted."""


class BlockPool:
    """Reference counts, keys and eviction order of `num_blocks` blocks with ids from 0.

    Invariant: free + used + cached + in flight + reserved = total, and a key belongs to at most one block. Reserved
    blocks are a number, not ids: they are carved out of the free ones first, then out of the cached ones.

    Blocks are given out in the order in which they were given back, those without content first, so content stays as
    long as it can. What one call gives back goes from the last id to the first: of a table the tail is evicted before
    the head, which more requests share and without which the tail cannot be found.
    """

    __slots__ = (
        "_cached",
        "_fences",
        "_free",
        "_index",
        "_keys",
        "_refs",
        "num_blocks",
        "num_evictions",
        "num_in_flight",
        "num_reserved",
        "num_share_evictions",
        "num_used",
        "shares",
    )

    def __init__(self, num_blocks: int, most_per_owner: int | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"Got {num_blocks = } but expected at least 1")
        self.num_blocks = num_blocks
        self.num_used = 0
        """Blocks with at least one reference."""
        self.num_in_flight = 0
        """Blocks without a reference that a step or copy in flight may still touch."""
        self.num_reserved = 0
        """Free or cached blocks that are promised: only `allocate(reserved=True)` takes them."""
        self.num_evictions = 0
        """Cached blocks that `allocate` has taken, since the start."""
        self.num_share_evictions = 0
        """Those of them that went before their time, because their owners held more than `most_per_owner`."""
        self.shares = None if most_per_owner is None else Shares(num_blocks, most_per_owner)
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        # A set of ids, least recently used first. Not a plain dict, which takes longer and longer to find its first
        # entry when the front is deleted again and again.
        self._refs = [0] * num_blocks
        self._fences = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without reference, fence, key or promise."""
        return max(0, len(self._free) - self.num_reserved)

    @property
    def num_cached(self) -> int:
        """Blocks without reference, fence or promise whose content is known."""
        return len(self._cached) - max(0, self.num_reserved - len(self._free))

    @property
    def num_allocatable(self) -> int:
        """The largest `n` for which `allocate(n)` gives blocks now: free and cached, less reserved."""
        return len(self._free) + len(self._cached) - self.num_reserved

    def allocate(
        self, num_blocks: int, *, reserved: bool = False, evicted: list[Evicted] | None = None, owner: bytes = b""
    ) -> list[int] | None:
        """Takes blocks with one reference each, all or nothing; None when there are not enough.

        Free ones first, then the least recently used cached ones, those of owners beyond their share before others;
        each of them loses its key, and is appended to `evicted` in that order. `owner` is who they count for until they
        are free. With `reserved` they come out of an earlier `reserve`, which cannot fail: ValueError past the promise.
        """
        free = self._free
        if reserved:
            self.unreserve(num_blocks)
        elif num_blocks > len(free) + len(self._cached) - self.num_reserved:
            return None
        elif num_blocks < 0:
            raise ValueError(f"Got {num_blocks = } but expected at least 0")
        if self.shares is not None:
            self.shares.charge(num_blocks, owner)
        num_free = len(free)
        popleft = free.popleft
        block_ids = [popleft() for _ in range(num_blocks if num_blocks < num_free else num_free)]
        if num_blocks > num_free:
            block_ids += self._evict(num_blocks - num_free, evicted)
        refs = self._refs
        for block_id in block_ids:
            refs[block_id] = 1
        self.num_used += num_blocks
        if self.shares is not None:
            self.shares.taken(block_ids, owner)
        return block_ids

    def reserve(self, num_blocks: int) -> bool:
        """Promises blocks to a later `allocate(reserved=True)`; False, changing nothing, if there are too few."""
        if num_blocks < 0:
            raise ValueError(f"Got {num_blocks = } but expected at least 0")
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
        """Adds a reference to each; a block in flight or cached becomes used.

        ValueError, changing nothing, for a free block, and when more cached ones would be taken than are allocatable:
        that would break a promise. To start on a prefix that was found: compare `num_cached_in` plus the blocks to
        allocate with `num_allocatable`, then retain, then allocate, which might evict what is not retained yet.
        """
        refs, fences, keys = self._refs, self._fences, self._keys
        idle = {block_id for block_id in block_ids if refs[block_id] == 0 and fences[block_id] == 0}
        if any(keys[block_id] is None for block_id in idle):
            raise ValueError(f"Got {block_ids = } but expected blocks that are used, in flight or cached")
        if len(idle) > self.num_allocatable:
            raise ValueError(
                f"Got {len(idle)} cached blocks but expected at most {self.num_allocatable}, less reserved"
            )
        for block_id in block_ids:
            if refs[block_id] == 0:
                if fences[block_id]:
                    self.num_in_flight -= 1
                else:
                    self._uncache(block_id)
                self.num_used += 1
            refs[block_id] += 1

    def release(self, block_ids: Sequence[int], *, fenced: bool = False) -> None:
        """Drops a reference of each; ids must differ. ValueError, changing nothing, for one without a reference.

        A block without any reference left is cached or free at once, or with `fenced` in flight until `settle`.
        """
        refs, fences = self._refs, self._fences
        if block_ids and min(map(refs.__getitem__, block_ids)) < 1:
            raise ValueError(f"Got {block_ids = } but expected blocks with a reference")
        for block_id in reversed(block_ids):
            num_refs = refs[block_id] = refs[block_id] - 1
            if fenced:
                fences[block_id] += 1
            if num_refs == 0:
                self.num_used -= 1
                if fences[block_id]:
                    self.num_in_flight += 1
                else:
                    self._let_go(block_id)

    def settle(self, block_ids: Sequence[int]) -> None:
        """Drops one fence of each; ids may repeat. ValueError for a block without one.

        Give tables whole and head first, one after another: as in `release`, tails come before heads, also when
        several tables share a head. What settles together counts as used at the same time.
        """
        refs, fences = self._refs, self._fences
        for block_id in reversed(block_ids):
            if fences[block_id] < 1:
                raise ValueError(f"Got {block_id = } but expected a fenced block")
            fences[block_id] -= 1
            if fences[block_id] == 0 and refs[block_id] == 0:
                self.num_in_flight -= 1
                self._let_go(block_id)

    def publish(self, block_id: int, key: bytes) -> bool:
        """The block's content is known under `key` from now on; False, changing nothing, if another block has the key.

        True also when it has that key already. ValueError for a free block, and for one with another key: its content
        would have to be given up first (`unpublish`).
        """
        present = self._keys[block_id]
        if present is not None:
            if present != key:
                raise ValueError(f"Got {block_id = } with another key but expected one without")
            return True
        if self._refs[block_id] == 0 and self._fences[block_id] == 0:
            raise ValueError(f"Got {block_id = }, which is free, but expected one that is used or in flight")
        if self._index.setdefault(key, block_id) != block_id:
            return False
        self._keys[block_id] = key
        return True

    def unpublish(self, block_id: int) -> None:
        """The block's content is not to be trusted: it loses its key, and if it was cached, it is free. Else no-op."""
        key = self._keys[block_id]
        if key is None:
            return
        self._keys[block_id] = None
        del self._index[key]
        if self._refs[block_id] == 0 and self._fences[block_id] == 0:
            self._uncache(block_id)
            self._let_go(block_id)

    def flush(self) -> int:
        """Forgets every key, so that cached blocks are free; how many keys there were. Counts as no eviction."""
        num_keys = len(self._index)
        for block_id in self._index.values():
            self._keys[block_id] = None
        self._index.clear()
        for block_id in list(self._cached):
            self._uncache(block_id)
            self._let_go(block_id)
        return num_keys

    def lookup(self, key: bytes) -> int | None:
        """The block with this content, used, in flight or cached; None if there is none. Does not count as a use.

        One in flight may still be written by the step that holds it; who reads it must come after that step.
        """
        return self._index.get(key)

    def key_of(self, block_id: int) -> bytes | None:
        """The key that the block's content is known under; None without."""
        return self._keys[block_id]

    def owner_of(self, block_id: int) -> bytes:
        """Who holds the block, or held it last; empty where no shares are counted."""
        return b"" if self.shares is None else self.shares.owner_of(block_id)

    def num_refs(self, block_id: int) -> int:
        """References to the block."""
        return self._refs[block_id]

    def num_fences(self, block_id: int) -> int:
        """Fences that hold the block."""
        return self._fences[block_id]

    def num_cached_in(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are cached, which is by how much `retain` lowers `num_allocatable`."""
        cached = self._cached
        return len({block_id for block_id in block_ids if block_id in cached})

    def free_ids(self) -> list[int]:
        """The free list in the order of allocation, promised blocks included; for checks."""
        return list(self._free)

    def cached_ids(self) -> list[int]:
        """The cached blocks, least recently used first, promised blocks included; for checks."""
        return list(self._cached)

    def ref_counts(self) -> list[int]:
        """`num_refs` of every block; for checks."""
        return self._refs.copy()

    def fence_counts(self) -> list[int]:
        """`num_fences` of every block; for checks."""
        return self._fences.copy()

    def block_keys(self) -> list[bytes | None]:
        """`key_of` every block; for checks."""
        return self._keys.copy()

    def index(self) -> dict[bytes, int]:
        """Where `lookup` finds which key; for checks and inventories."""
        return self._index.copy()

    def _let_go(self, block_id: int) -> None:
        """Nobody refers to the block any more: it is cached if its content is known, or free."""
        shares = self.shares
        if self._keys[block_id] is None:
            self._free.append(block_id)
            if shares is not None:
                shares.freed(block_id)
        else:
            self._cached[block_id] = None
            if shares is not None:
                shares.cached(block_id)

    def _uncache(self, block_id: int) -> None:
        del self._cached[block_id]
        if self.shares is not None:
            self.shares.uncached(block_id)

    def _next_to_go(self) -> int:
        """The cached block to evict next."""
        oldest, shares = next(iter(self._cached)), self.shares
        if shares is None or shares.num_owners < 2:
            return oldest
        first = shares.first()
        if first is None or first == oldest:
            return oldest
        self.num_share_evictions += 1
        return first

    def _evict(self, num_blocks: int, evicted: list[Evicted] | None) -> list[int]:
        """Takes the cached blocks that are to go, which must be there, out of the cache."""
        cached, keys, index, shares = self._cached, self._keys, self._index, self.shares
        block_ids = []
        for _ in range(num_blocks):
            block_id = self._next_to_go()
            key = keys[block_id]
            assert key is not None
            del cached[block_id], index[key]
            keys[block_id] = None
            block_ids.append(block_id)
            owner = b"" if shares is None else shares.evicted(block_id)
            if evicted is not None:
                evicted.append(Evicted(block_id, key, owner))
        self.num_evictions += num_blocks
        return block_ids
