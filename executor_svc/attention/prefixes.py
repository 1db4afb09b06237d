"""Which rows of a batch begin with the same blocks, and which of those prefixes are worth attending to together.

Rows that share a prefix do so because the scheduler gave them the same block ids; content is never compared. Prefixes
form a tree (everyone's system prompt, below it the documents some have in common), and each row can use one of them:
`find_prefixes` takes those that save most. Numpy and plain Python, once per step and not per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prefix:
    """At least two rows whose block tables begin with the same `num_blocks` blocks, at least one."""

    rows: list[int]
    num_blocks: int


def find_prefixes(tables: Int32s, num_whole: Int64s, cost: int) -> list[Prefix]:
    """Disjoint groups of rows with a common prefix, chosen so that many blocks need not be read again.

    The most that can be saved in all small cases tried; no proof that it is in every one.

    `tables`: (num_rows, width) block ids. `num_whole`: (num_rows,) blocks at the head of each table that may be shared,
    at most width. `cost`: what a group costs, in blocks; one of n rows saves n - 1 times its prefix, less this.
    """
    eligible = np.flatnonzero(num_whole > 0)
    first = tables[eligible, 0]
    if np.unique(first).size == eligible.size:
        return []  # the usual case, in 10 µs
    num_whole = num_whole[eligible]
    width = int(num_whole.max())
    # What may not be shared is made different from every block, so that rows with much in common become neighbours.
    usable = np.where(np.arange(width) < num_whole[:, None], tables[eligible, :width], np.int32(-1))
    order = np.argsort(_as_bytes(usable), kind="stable")
    equal = usable[order[1:]] == usable[order[:-1]]
    equal &= usable[order[1:]] >= 0
    common = np.where(equal.all(axis=1), width, equal.argmin(axis=1))
    rows = eligible[order]
    return [Prefix(sorted(rows[members].tolist()), depth) for members, depth in _best(common.tolist(), cost)]


def _as_bytes(table: Int32s) -> NDArray[Any]:
    """Each row as one value whose order keeps rows with a common beginning together; any such order will do."""
    return np.ascontiguousarray(table).view(np.dtype((np.void, table.shape[1] * table.itemsize)))[:, 0]


@dataclass(slots=True)
class _Node:
    """Neighbours from `start` on that have `depth` blocks in common, and what is chosen among the prefixes below."""

    depth: int
    start: int
    chosen: list[tuple[list[int], int]] = field(default_factory=list)
    """Rows and depth of each."""

    def close(self, end: int, cost: int) -> None:
        """The node's last row is `end` - 1: let the rows that are better off here share this prefix, if that pays."""
        kept = [(rows, depth) for rows, depth in self.chosen if _saved(rows, depth, cost) >= len(rows) * self.depth]
        away = {row for rows, _ in kept for row in rows}
        here = [row for row in range(self.start, end) if row not in away]
        choice = [*kept, (here, self.depth)]
        if sum(_saved(*c, cost) for c in choice) > sum(_saved(*c, cost) for c in self.chosen):
            self.chosen = choice


def _saved(rows: list[int], depth: int, cost: int) -> int:
    return (len(rows) - 1) * depth - cost


def _best(common: list[int], cost: int) -> list[tuple[list[int], int]]:
    """Rows and depth of the prefixes to use; common[i]: what sorted rows i and i + 1 have in common.

    One pass with a stack: the nodes on it are the prefixes that the current row still has.
    """
    stack = [_Node(0, 0)]
    for i, depth in enumerate([*common, 0]):
        opened = _Node(depth, i)
        while stack[-1].depth > depth:
            node = stack.pop()
            node.close(i + 1, cost)
            opened.start = node.start
            (stack[-1] if stack[-1].depth >= depth else opened).chosen += node.chosen
        if stack[-1].depth < depth:
            stack.append(opened)
    return stack[0].chosen
