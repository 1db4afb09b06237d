"""`Shares`: whose cached blocks go first, so that one owner's many do not drive out everybody else's few.

An owner may hold all that nobody else wants. It is only when something must be evicted that it counts who holds more
than a share, used blocks and cached ones: then the least recently used cached block of those goes, and not the least
recently used of all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Shares:
    """Blocks by owner, of a pool of `num_blocks` that are all free; an owner's share is `most` of them."""

    __slots__ = ("_cached", "_num_held", "_num_uses", "_over", "_owners", "most")

    def __init__(self, num_blocks: int, most: int) -> None:
        if most < 1:
            raise ValueError(f"Got {most = } but expected at least 1")
        self.most = most
        self._owners = [b""] * num_blocks
        self._num_held: dict[bytes, int] = {}
        """Of each owner that has any: blocks that are not free."""
        self._over: dict[bytes, None] = {}
        """Owners that hold more than their share: fewer than `num_blocks / most`."""
        self._cached: dict[bytes, OrderedDict[int, int]] = {}
        """Of each owner that has any: cached blocks, least recently used first, and when that was."""
        self._num_uses = 0

    @property
    def num_owners(self) -> int:
        """Owners of blocks that are not free. With a single one, no block goes before its time."""
        return len(self._num_held)

    def owner_of(self, block_id: int) -> bytes:
        """Who holds the block, or held it last."""
        return self._owners[block_id]

    def charge(self, num_blocks: int, owner: bytes) -> None:
        """So many blocks are going to be the owner's: it counts before others lose theirs for it."""
        if num_blocks:
            num_held = self._num_held[owner] = self._num_held.get(owner, 0) + num_blocks
            if num_held > self.most:
                self._over[owner] = None

    def taken(self, block_ids: list[int], owner: bytes) -> None:
        """These free blocks are the owner's, which was charged for them."""
        for block_id in block_ids:
            self._owners[block_id] = owner

    def freed(self, block_id: int) -> None:
        """The block is nobody's. An owner without any is forgotten, so that names do not pile up."""
        owner = self._owners[block_id]
        num_held = self._num_held[owner] = self._num_held[owner] - 1
        if num_held == self.most:
            del self._over[owner]
        if not num_held:
            del self._num_held[owner]

    def evicted(self, block_id: int) -> bytes:
        """A cached block is nobody's: whose it was."""
        self.uncached(block_id)
        self.freed(block_id)
        return self._owners[block_id]

    def cached(self, block_id: int) -> None:
        """The block is cached, used just now."""
        self._num_uses += 1
        owner = self._owners[block_id]
        blocks = self._cached.get(owner)
        if blocks is None:
            blocks = self._cached[owner] = OrderedDict()
        blocks[block_id] = self._num_uses

    def uncached(self, block_id: int) -> None:
        """The block is used again, or about to be free."""
        owner = self._owners[block_id]
        blocks = self._cached[owner]
        del blocks[block_id]
        if not blocks:
            del self._cached[owner]

    def first(self) -> int | None:
        """The least recently used of the blocks cached for those who hold too much; None where there is none."""
        first, when = None, 0
        for owner in self._over:
            blocks = self._cached.get(owner)
            if blocks is not None:
                block_id, used = next(iter(blocks.items()))
                if first is None or used < when:
                    first, when = block_id, used
        return first

    def check(self, held: Iterable[int], cached: Iterable[int]) -> list[str]:
        """What is wrong, one line each, where those blocks are not free and these cached, least recently used first."""
        num_held: dict[bytes, int] = {}
        for block_id in held:
            owner = self._owners[block_id]
            num_held[owner] = num_held.get(owner, 0) + 1
        by_owner: dict[bytes, list[int]] = {}
        for block_id in cached:
            by_owner.setdefault(self._owners[block_id], []).append(block_id)
        over = {owner for owner, count in num_held.items() if count > self.most}
        found = {owner: list(blocks) for owner, blocks in self._cached.items()}
        return [
            f"{what} by owner: {kept}, {expected} explained"
            for what, kept, expected in (
                ("held", self._num_held, num_held),
                ("cached", found, by_owner),
                ("too much", set(self._over), over),
            )
            if kept != expected
        ]
