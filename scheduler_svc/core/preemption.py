"""Who makes room, and what becomes of its blocks.

Who, strongest rule first:
* A sequence never makes room for one of lower priority.
* Preempted `MAX_PREEMPTIONS` times, it is not preempted again. For that to be safe it must never need to grow: it is
  admitted only with every block it may ever use reserved (`Admission`). So whoever needs to grow is always a
  candidate itself, and the total number of preemptions is bounded: no load can make the scheduler thrash for ever.
* A sequence whose last row is in flight is left alone: its blocks come back without losing anything.
* Not the same victim twice in a row, where another of its priority exists.
* The one that arrived last, so that age protects; of equals the one with the least computed.

What, by the costs that the executor measured (`choose_action`):
* SWAP copies all it has computed to the host tier, and back when it resumes.
* TAIL and RECOMPUTE let go of its blocks. With the prefix cache they stay findable until somebody takes them, the last
  block of the sequence first: so only as many tail blocks are lost as are needed, and only those are computed again
  (or fetched, when eviction moved them to the host tier). It is called RECOMPUTE when all of them are needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf

from scheduler_svc.core.costs import BlockCosts
from scheduler_svc.core.limits import StepLimits
from scheduler_svc.core.params import HostCache, PreemptionMode, SeqId
from scheduler_svc.core.sequence import Sequence

MAX_PREEMPTIONS = 2
"""Per sequence; the promise made to users is at most two."""


class Action(Enum):
    """What becomes of a victim's blocks."""

    SWAP = "swap"
    RECOMPUTE = "recompute"
    TAIL = "tail"


class Reason(Enum):
    """What a victim makes room for."""

    MEMORY = "memory"
    """Running sequences that grow."""
    PRIORITY = "priority"
    """A waiting sequence of higher priority."""


@dataclass(frozen=True, slots=True)
class Victim:
    """The figures of a sequence that is to make room, in blocks."""

    num_blocks: int
    """Blocks with computed positions."""
    num_freed: int
    """Blocks that nobody else uses."""
    num_to_copy: int
    """Blocks with computed positions that the host tier does not have."""


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


def forecast_s(limits: StepLimits, victim: Victim, num_needed: int, tail_share: float) -> dict[Action, float]:
    """Seconds that each action costs; infinite where a rate is unknown or there is no host tier.

    `tail_share` is the part of its blocks that a sequence usually has lost when it resumes (`costs.TailLosses`).
    """
    costs = limits.costs
    swap_s = inf
    if limits.num_host_blocks:
        swap_s = _times(victim.num_to_copy, costs.swap_out_s) + _times(victim.num_blocks, costs.swap_in_s)
    forecast = {Action.SWAP: swap_s}
    if limits.prefix_cache and num_needed < victim.num_freed:
        # The block that is not full has no key: it is computed again in any case.
        num_lost = max(num_needed, round(tail_share * victim.num_blocks))
        forecast[Action.TAIL] = _times(num_lost, _bring_back_s(limits)) + costs.recompute_s
    else:
        forecast[Action.RECOMPUTE] = _times(victim.num_blocks, costs.recompute_s)
    return forecast


def choose_action(mode: PreemptionMode, forecast: dict[Action, float]) -> Action:
    """The cheapest action that the operator allows; without a rate to judge by, letting go."""
    letting_go = next(action for action in forecast if action is not Action.SWAP)
    if mode is PreemptionMode.SWAP:
        return Action.SWAP
    if mode is PreemptionMode.AUTO and forecast[Action.SWAP] < forecast[letting_go]:
        return Action.SWAP
    return letting_go


def _bring_back_s(limits: StepLimits) -> float:
    """Seconds for a full block that was let go and then taken by somebody."""
    costs: BlockCosts = limits.costs
    if limits.num_host_blocks and limits.host_cache is not HostCache.OFF:
        return min(costs.recompute_s, costs.swap_out_s + costs.swap_in_s)
    return costs.recompute_s


def _times(count: int, seconds: float) -> float:
    return count * seconds if count else 0.0


def _cheapness(seq: Sequence) -> tuple[float, int, int]:
    return (seq.arrival, -seq.num_planned, seq.seq_id)
