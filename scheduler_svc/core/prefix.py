"""Which leading blocks of a sequence are there already, and which another sequence is computing right now.

A block is known by the key of its whole prefix (`cache_svc.blocks.hashing`), so equal keys mean equal content. Keys
are made when they are needed, a block at a time, and kept with the sequence: a prompt that hits nothing costs one
hash, and a long one costs its hashes spread over the plans that compute it.

A key is *published* once the result of the plan that filled the block is in; from the plan that fills it until then
it is *expected*, and a sequence whose next block is expected waits for it instead of computing it a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_svc.blocks.hashing import extend_chain, root_key
from cache_svc.blocks.pool import BlockPool
from scheduler_svc.core.sequence import Sequence

MAX_NEW_KEYS = 1024
"""Keys made for one sequence in one lookup (about a millisecond); a longer match goes on in the next plan."""


@dataclass(slots=True)
class Match:
    """Leading full blocks of a sequence that need no computing."""

    device_ids: list[int | None] = field(default_factory=list)
    """One per block; None: only the host tier has it."""
    host_ids: list[int] = field(default_factory=list)
    """For each None, in order."""
    should_wait: bool = False
    """Whether the block behind them is being computed by another sequence, or is not looked up yet."""
    is_cut: bool = False
    """Whether it is not looked up yet, because that takes more new keys than were allowed."""


class PrefixIndex:
    """Keys of one executor's blocks. `is_on` false: nothing is ever found or published."""

    __slots__ = ("_device", "_expected", "_identity", "_made_for", "block_size", "host", "is_on")

    def __init__(
        self, device: BlockPool, host: BlockPool | None, block_size: int, identity: tuple[str, str], *, is_on: bool
    ) -> None:
        self._device = device
        self.host = host
        """The tier that is looked into where the device has nothing, if any."""
        self.block_size = block_size
        self._identity = identity
        """Model fingerprint and type of keys and values."""
        self._made_for = (*identity, block_size)
        self._expected: dict[bytes, Sequence] = {}
        self.is_on = is_on

    def must_wait(self, seq: Sequence) -> bool:
        """Whether what the last `match` stopped at, or what comes behind it by now, is another one's work in progress.

        It looks only at blocks that have come since, so that many may wait for one long prefix.
        """
        index = seq.prefix.stopped_at
        if index is None:
            return False
        most = (len(seq.token_ids) - 1) // self.block_size
        while index < most:
            key = self._key(seq, index)
            if self._expected.get(key, seq) is not seq:
                seq.prefix.stopped_at = index
                return True
            if self._device.lookup(key) is None:
                break
            index += 1
        seq.prefix.stopped_at = None
        return False

    def match(self, seq: Sequence, max_new_keys: int = MAX_NEW_KEYS) -> Match:
        """What of the sequence is there. At least its last known token is left to compute."""
        found = Match()
        if not self.is_on or not seq.spec.reads_prefix_cache:
            return found
        num_blocks = (len(seq.token_ids) - 1) // self.block_size
        most_keys = len(self._keys(seq)) + max_new_keys
        seq.prefix.stopped_at = None
        lookup, host = self._device.lookup, self.host
        for index in range(num_blocks):
            if index >= most_keys:
                found.should_wait = found.is_cut = True
                break
            key = self._key(seq, index)
            block_id = lookup(key)
            host_id = host.lookup(key) if block_id is None and host is not None else None
            if block_id is None and host_id is None:
                found.should_wait = self._expected.get(key, seq) is not seq
                seq.prefix.stopped_at = index if found.should_wait else None
                break
            found.device_ids.append(block_id)
            if host_id is not None:
                found.host_ids.append(host_id)
        return found

    def expect(self, seq: Sequence, num_positions: int) -> None:
        """The sequence is about to compute its full blocks up to there."""
        if not self.is_on:
            return
        num_blocks = min(num_positions, seq.prefill_len) // self.block_size
        first = max(seq.prefix.num_expected, seq.prefix.num_published)
        expected = self._expected
        for key in self._keys_between(seq, first, num_blocks):
            expected.setdefault(key, seq)
        seq.prefix.num_expected = max(seq.prefix.num_expected, num_blocks)

    def publish(self, seq: Sequence, num_positions: int) -> list[tuple[int, bytes]]:
        """The results of the sequence's positions up to there are in: full blocks become known.

        Returns block and key of those that are new.
        """
        if not self.is_on or num_positions // self.block_size <= seq.prefix.num_published:
            return []
        assert seq.table is not None
        first, end = seq.prefix.num_published, num_positions // self.block_size
        new = []
        expected, key_of, publish = self._expected, self._device.key_of, self._device.publish
        for block_id, key in zip(seq.table.block_ids[first:end], self._keys_between(seq, first, end), strict=True):
            if expected.get(key) is seq:
                del expected[key]
            if key_of(block_id) is None and publish(block_id, key):
                new.append((block_id, key))
        seq.prefix.num_published = end
        return new

    def leave(self, seq: Sequence) -> None:
        """The sequence computes no further: nobody is to wait for it."""
        for key in seq.prefix.keys[seq.prefix.num_published : seq.prefix.num_expected]:
            if self._expected.get(key) is seq:
                del self._expected[key]
        seq.prefix.num_published = seq.prefix.num_expected = 0

    def expected_by(self) -> list[Sequence]:
        """The sequences that others may wait for, once per key; for checks."""
        return list(self._expected.values())

    def _keys(self, seq: Sequence) -> list[bytes]:
        """The sequence's keys so far, which start anew when they were made for another model or size of block."""
        if seq.prefix.made_for != self._made_for:
            seq.prefix.made_for = self._made_for
            seq.prefix.keys = []
        return seq.prefix.keys

    def _key(self, seq: Sequence, index: int) -> bytes:
        keys = self._keys(seq)
        if index >= len(keys):
            self._extend(seq, keys, index + 1)
        return keys[index]

    def _keys_between(self, seq: Sequence, first: int, end: int) -> list[bytes]:
        """The keys of the blocks `first` to `end - 1`, missing ones made in one go; none where `end` is not behind."""
        if first >= end:
            return []
        keys = self._keys(seq)
        if end > len(keys):
            self._extend(seq, keys, end)
        return keys[first:end]

    def _extend(self, seq: Sequence, keys: list[bytes], num_blocks: int) -> None:
        root = keys[0] if keys else root_key(*self._identity, seq.spec.cache_salt, seq.spec.adapter)
        extend_chain(keys, root, seq.token_ids, self.block_size, num_blocks)
