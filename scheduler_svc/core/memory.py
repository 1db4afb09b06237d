"""`KvMemory`: both tiers of one executor, what is kept in them for reuse, and what moves between them.

    device   used by tables ── last reference ──► cached under its key ── allocate ──► used again
                  ▲                                     │ on-evict (or write-through, when published)
                  │ swap in (a match, a resume)         ▼
    host     cached under its key  ◄──────────── swap out ──── the blocks of a sequence that makes room

Content found in a tier is always that of the tokens asked for: keys name whole prefixes, and a block gets its key only
when the result or the copy that filled it has been reported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Ids

from cache_svc.blocks.pool import BlockPool, Evicted
from cache_svc.blocks.residency import ResidencySampler
from scheduler_svc.core.copies import Copies, Transfer
from scheduler_svc.core.limits import StepLimits
from scheduler_svc.core.params import HostCache
from scheduler_svc.core.prefix import PrefixIndex
from scheduler_svc.core.sequence import Sequence, Stash

KEPT_SHARE = 0.05
"""Most of a step's time that copying kept blocks to the host tier may take; evicted ones beyond that are forgotten.

They are copied when somebody takes them, so the batch that writes them waits for the copies. Those of write-through
stay where they are, and what is beyond the limit is copied in later plans.
"""


class KvMemory:
    """The pools, the prefix index and the copies of one executor."""

    __slots__ = (
        "_behind",
        "_keeps_evicted",
        "_most_kept",
        "_residency",
        "_writes_through",
        "copies",
        "device",
        "host",
        "now",
        "prefix",
    )

    def __init__(self, limits: StepLimits, residency: ResidencySampler | None = None) -> None:
        self.device = BlockPool(limits.num_blocks, limits.most_per_salt(limits.num_blocks))
        num_host_blocks = limits.num_host_blocks
        self.host = BlockPool(num_host_blocks, limits.most_per_salt(num_host_blocks)) if num_host_blocks else None
        self.copies = Copies(self.device, self.host)
        self.now = 0.0
        """Seconds, of the verb that is at work; only the sampler of residency looks at it."""
        self._residency = residency
        self._behind: OrderedDict[bytes, None] = OrderedDict()
        """Keys on the device that write-through has had no time or room to copy, oldest first."""
        self.prefix = PrefixIndex(
            self.device, None, limits.block_size, (limits.model_fingerprint, limits.kv_dtype), is_on=limits.prefix_cache
        )
        self.reprice(limits)

    def reprice(self, limits: StepLimits) -> None:
        """Decides by `limits.costs` whether blocks are kept in the host tier, how many a plan, and looked up there."""
        costs = limits.costs
        is_kept = self.host is not None and limits.prefix_cache and costs.does_swap_in_pay
        self._most_kept = limits.num_blocks_in(KEPT_SHARE) if is_kept else 0
        self._keeps_evicted = is_kept and limits.host_cache is HostCache.ON_EVICT
        self._writes_through = is_kept and limits.host_cache is HostCache.WRITE_THROUGH and costs.are_known
        if self._writes_through:
            self._most_kept = max(1, self._most_kept)  # or it would never catch up
        self.prefix.host = self.host if is_kept and limits.host_cache is not HostCache.OFF else None
        if not self._writes_through:
            self._behind.clear()

    @property
    def num_behind(self) -> int:
        """Blocks that write-through has still to copy."""
        return len(self._behind)

    def allocate(self, num_blocks: int, *, reserved: bool = False, owner: bytes = b"") -> list[int] | None:
        """As `BlockPool.allocate` on the device; content that must go for it may move to the host tier."""
        evicted: list[Evicted] = []
        block_ids = self.device.allocate(num_blocks, reserved=reserved, evicted=evicted, owner=owner)
        for block_id, key, evicted_owner in evicted:
            if self._residency is not None:
                self._residency.evicted(block_id, self.now)
            if self._keeps_evicted or key in self._behind:
                self._keep(block_id, key, evicted_owner)
                self._behind.pop(key, None)
        return block_ids

    def publish(self, seq: Sequence, num_positions: int) -> None:
        """The results of the sequence's positions up to there are in."""
        for block_id, key in self.prefix.publish(seq, num_positions):
            if self._residency is not None:
                self._residency.published(block_id, self.now)
            if self._writes_through and not self._keep(block_id, key, seq.spec.cache_salt):
                self._behind[key] = None

    def catch_up(self) -> None:
        """Queues copies that write-through owes, as far as the next plan has time left; to be called before it closes.

        Last of all in a plan, so that nobody has to do without a block that is being copied.
        """
        while self._behind:
            key = next(iter(self._behind))
            block_id = self.device.lookup(key)
            assert block_id is not None, "who loses its key is behind no more"
            is_promised = self.device.num_cached_in([block_id]) > self.device.num_allocatable
            if is_promised or not self._keep(block_id, key, self.device.owner_of(block_id)):
                return
            del self._behind[key]

    def use_again(self, block_ids: list[int]) -> None:
        """A sequence starts on blocks that are there."""
        self.device.retain(block_ids)
        if self._residency is not None:
            for block_id in block_ids:
                self._residency.hit(block_id, self.now)

    def stash(self, seq: Sequence) -> Stash | None:
        """Queues copies of all that the sequence has planned to the host tier; None when that has no room.

        None, too, when nothing is planned. Blocks that the host tier has already are shared, not copied.
        """
        assert seq.table is not None
        if self.host is None or not seq.num_planned:
            return None
        block_ids = seq.table.block_ids[: seq.table.num_blocks(seq.num_planned)]
        keys = [self.device.key_of(block_id) for block_id in block_ids]
        there = [None if key is None else self.host.lookup(key) for key in keys]
        kept = [host_id for host_id in there if host_id is not None]
        self.host.retain(kept)
        new = self.host.allocate(len(block_ids) - len(kept), owner=seq.spec.cache_salt)
        if new is None:
            self.host.release(kept)
            return None
        fresh = iter(new)
        host_ids: list[int] = []
        for block_id, key, kept_id in zip(block_ids, keys, there, strict=True):
            host_ids.append(next(fresh) if kept_id is None else kept_id)
            if kept_id is None:
                self.copies.swap_out(block_id, host_ids[-1], key)
        transfer = self.copies.queued if new else Transfer(is_done=True)
        return Stash(host_ids, seq.num_planned, len(new), transfer)

    def drop_stash(self, stash: Stash) -> None:
        """The sequence will not come back for it."""
        assert self.host is not None
        self.host.release(stash.host_ids)

    def distrust(self, keys: Ids[bytes]) -> None:
        """Forgets what is known under the keys in both tiers: something about the content is wrong."""
        for key in keys:
            self.copies.forget(key)
            self._behind.pop(key, None)
            for pool in (self.device, self.host):
                block_id = None if pool is None else pool.lookup(key)
                if pool is not None and block_id is not None:
                    pool.unpublish(block_id)

    def flush(self) -> int:
        """Forgets everything that is kept for reuse; returns how many blocks."""
        if self._residency is not None:
            self._residency.flush_samples()
        self.copies.forget()
        self._behind.clear()
        return self.device.flush() + (0 if self.host is None else self.host.flush())

    def _keep(self, block_id: int, key: bytes, owner: bytes) -> bool:
        """Queues a copy to the host tier, unless that has the content; False if the plan has no time or it no room."""
        host, copies = self.host, self.copies
        assert host is not None
        if host.lookup(key) is not None:
            return True
        if len(copies.queued.swap_outs) >= self._most_kept:
            return False
        host_ids = host.allocate(1, owner=owner)
        if host_ids is None:
            return False
        copies.swap_out(block_id, host_ids[0], key)
        host.release(host_ids)  # the copy's own reference holds it from here
        return True
