"""The rows of a batch, sorted into groups that are gathered and computed together.

A `Part` is either the rows of one shared prefix (`prefixes`) or all rows without one. Within it a `RowGroup` holds rows
that are computed at once: decode rows of about the same length, or chunks of exactly the same lengths. Of rows with a
prefix, a group covers only what follows the prefix. Groups are made once per step, their masks when a layer asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np
import torch
from torch.nn import functional

from executor_svc.attention.prefixes import Prefix, find_prefixes
from executor_svc.batch import Batch
from executor_svc.kv.layout import KvBlocks

MAX_GATHER_BYTES = 32 << 20
"""Keys and values gathered at once, so that memory does not grow with rows times context. One row may need more."""
PREFIX_COST = 2048
"""A prefix of n rows is attended to together if n - 1 times its positions exceed this.

A part of its own costs some 25 more calls per layer, as much as reading this many positions. Measured in bfloat16, one
thread: still slower with 2 rows of 1,024 and 32 of 32, equal at 32 of 64, 1.7 x faster with 8 of 512.
"""


@dataclass(slots=True)
class RowGroup:
    """Rows that are gathered together."""

    span: slice
    """Where the rows' tokens are among those of the part."""
    num_rows: int
    query_len: int
    """Tokens per row."""
    lens: list[int]
    """Per row, the positions of its context that follow the prefix."""
    padded_len: int
    """Positions gathered per row: a multiple of the block size."""
    index: torch.Tensor
    """What `KvBlocks.gather` takes."""
    hidden: torch.Tensor | None
    """(rows, padded_len) bool: positions beyond the context. None: the gather holds no such positions."""
    stale: torch.Tensor | None
    """The same positions as rows of the gathered values, (rows * kv_heads * padded_len, head_dim); None as above."""
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)
    """Masks by (window, first query), made when the first layer asks."""

    def decode_hidden(self, window: int | None) -> torch.Tensor | None:
        """Of rows with one token: (rows, padded_len) bool, the positions that it does not see; None: it sees all."""
        if window is None or max(self.lens) <= window:
            return self.hidden
        if (window, 0) not in self.masks:
            device = self.index.device
            first = torch.tensor(self.lens, device=device)[:, None] - window
            outside = torch.arange(self.padded_len, device=device) < first
            self.masks[window, 0] = outside if self.hidden is None else outside | self.hidden
        return self.masks[window, 0]

    def chunk_mask(self, start: int, end: int, repeats: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask of the queries start to end, causal at the bottom right, once per query head of a KV head.

        (repeats * (end - start), positions that the last of them sees); the rows of a group do not differ in it.
        """
        if (window, start) not in self.masks:
            before = self.lens[0] - self.query_len
            device = self.index.device
            key_pos = torch.arange(before + end, device=device)
            query_pos = torch.arange(before + start, before + end, device=device)[:, None]
            hidden = key_pos > query_pos
            if window is not None:
                hidden |= key_pos <= query_pos - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            self.masks[window, start] = mask.masked_fill_(hidden, -math.inf).repeat(repeats, 1)
        return self.masks[window, start]


@dataclass(slots=True)
class Part:
    """Rows that share a prefix, or all that share none."""

    tokens: torch.Tensor | slice
    """Where the part's tokens are in the flat batch, group after group."""
    groups: list[RowGroup]
    shared: torch.Tensor | None
    """What `KvBlocks.gather` takes for the blocks of the prefix; None: there is none."""


def without_prefixes(batch: Batch, blocks: KvBlocks) -> list[Part]:
    """The whole batch as one part."""
    return [_make_part(batch, blocks, list(range(len(batch.query_lens))), 0)]


def by_prefix(batch: Batch, blocks: KvBlocks) -> list[Part]:
    """A part for each prefix worth it, and one of the other rows.

    Only whole blocks before a row's first new position are its to share: every new token sees all of them, so that no
    mask is needed, and at least one position of each row follows.
    """
    size = blocks.geometry.block_size
    before = np.array(batch.context_lens) - np.array(batch.query_lens)
    found = find_prefixes(batch.block_tables.cpu().numpy(), before // size, -(-PREFIX_COST // size))
    return parts_of(batch, blocks, found)


def parts_of(batch: Batch, blocks: KvBlocks, prefixes: list[Prefix]) -> list[Part]:
    """As `by_prefix`, of these prefixes."""
    if not prefixes:
        return without_prefixes(batch, blocks)
    parts = [_make_part(batch, blocks, prefix.rows, prefix.num_blocks) for prefix in prefixes]
    taken = set(chain.from_iterable(prefix.rows for prefix in prefixes))
    rest = [row for row in range(len(batch.query_lens)) if row not in taken]
    return [*parts, _make_part(batch, blocks, rest, 0)] if rest else parts


def _make_part(batch: Batch, blocks: KvBlocks, rows: list[int], num_shared: int) -> Part:
    """Of these rows, whose first `num_shared` blocks are the same."""
    shared_len = num_shared * blocks.geometry.block_size
    ends = list(accumulate(batch.query_lens))
    groups: list[RowGroup] = []
    order: list[int] = []
    for members, length in _alike(batch, blocks, rows, shared_len):
        group = _make_group(batch, blocks, members, num_shared, length)
        group.span = slice(len(order), len(order) + group.num_rows * group.query_len)
        groups.append(group)
        order += chain.from_iterable(range(ends[row] - batch.query_lens[row], ends[row]) for row in members)
    device = batch.block_tables.device
    consecutive = order == list(range(order[0], order[0] + len(order)))
    tokens = slice(order[0], order[-1] + 1) if consecutive else torch.tensor(order, device=device)
    shared = blocks.gather_index(batch.block_tables[rows[:1], :num_shared].long()) if num_shared else None
    return Part(tokens, groups, shared)


def _alike(batch: Batch, blocks: KvBlocks, rows: list[int], shared_len: int) -> list[tuple[list[int], int]]:
    """Rows to gather together, and the length to which they are padded."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        query_len, length = batch.query_lens[row], batch.context_lens[row] - shared_len
        assert length >= query_len, "a row's new positions lie in blocks of its own"
        buckets.setdefault((query_len, _bucket(length) if query_len == 1 else length), []).append(row)
    alike = []
    for (_, length), members in buckets.items():
        most = max(1, MAX_GATHER_BYTES // blocks.gathered_bytes(length))
        for first in range(0, len(members), most):
            chosen = members[first : first + most]
            lone = len(chosen) == 1  # needs no common length
            alike.append((chosen, batch.context_lens[chosen[0]] - shared_len if lone else length))
    return alike


def _bucket(length: int) -> int:
    """The length to which decode rows of about this one are padded: steps of 64, of 128, of a quarter from 1,024 on.

    Lengths must recur: oneDNN compiles a matrix product for each new shape (0.3 to 1.3 ms, measured).
    """
    step = 64 if length <= 64 else max(128, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _make_group(batch: Batch, blocks: KvBlocks, rows: list[int], num_shared: int, length: int) -> RowGroup:
    """Of these rows, padded to `length` positions after the prefix; its tokens are the part's first."""
    g = blocks.geometry
    lens = [batch.context_lens[row] - num_shared * g.block_size for row in rows]
    num_blocks = -(-length // g.block_size)
    padded_len = num_blocks * g.block_size
    device = batch.block_tables.device
    tables = batch.block_tables[rows, num_shared : num_shared + num_blocks].long()
    if tables.shape[1] < num_blocks:  # the table is as wide as the batch needs, the bucket may be wider
        tables = functional.pad(tables, (0, num_blocks - tables.shape[1]))
    hidden = stale = None
    if min(lens) < padded_len:
        hidden = torch.arange(padded_len, device=device) >= torch.tensor(lens, device=device)[:, None]
        stale = hidden[:, None].expand(-1, g.num_kv_heads, -1).flatten().nonzero()[:, 0]
    query_len = batch.query_lens[rows[0]]
    span = slice(0, len(rows) * query_len)
    return RowGroup(span, len(rows), query_len, lens, padded_len, blocks.gather_index(tables), hidden, stale)
