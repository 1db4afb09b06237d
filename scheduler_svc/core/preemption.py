"""Who makes room. Recompute is the only way yet: a victim loses its blocks and starts again from its tokens.

Rules, strongest first:
* A sequence never makes room for one of lower priority.
* Preempted `MAX_PREEMPTIONS` times, it is not preempted again. For that to be safe it must never need to grow: it is
  admitted only with every block it may ever use reserved (`Admission`). So whoever needs to grow is always a
  candidate itself, and the total number of preemptions is bounded: no load can make the scheduler thrash for ever.
* A sequence whose last row is in flight is left alone: its blocks come back without losing anything.
* Not the same victim twice in a row, where another of its priority exists.
* The one that arrived last, so that age protects; of equals the one with the least computed.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.params import SeqId
from scheduler_svc.core.sequence import Sequence

MAX_PREEMPTIONS = 2
"""Per sequence; the promise made to users is at most two."""


def is_immune(seq: Sequence) -> bool:
    """Whether the sequence has made room often enough."""
    return seq.num_preemptions >= MAX_PREEMPTIONS


def is_finishing(seq: Sequence) -> bool:
    """Whether all rows up to its last token are planned."""
    return seq.num_planned >= seq.position_limit


def choose_victim(running: Iterable[Sequence], below: int, last_victim: SeqId | None) -> Sequence | None:
    """The running sequence of priority less than `below` to preempt next; None when there is none."""
    candidates = [s for s in running if s.priority < below and not is_immune(s) and not is_finishing(s)]
    if not candidates:
        return None
    lowest = min(s.priority for s in candidates)
    candidates = [s for s in candidates if s.priority == lowest]
    others = [s for s in candidates if s.seq_id != last_victim]
    return max(others or candidates, key=_cheapness)


def _cheapness(seq: Sequence) -> tuple[float, int, int]:
    return (seq.arrival, -seq.num_planned, seq.seq_id)
