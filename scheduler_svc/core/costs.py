"""What moving or recomputing a block costs on one executor, from its rates: what it reported, or has shown since.

An unknown rate makes its way of doing things infinitely dear, so it is never chosen on a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from scheduler_svc.core.params import ExecutorLimits

OVERLAP = 0.4
"""What a second of copying costs a busy executor, in seconds of computing: most of it runs beside a batch.

The break-even of `bench/overload.py` lies at copies 2.5 to 3 times as long as the prefill that they save.
"""


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Seconds of an executor's time per block; copies weigh what they take away from computing."""

    recompute_s: float
    swap_out_s: float
    swap_in_s: float

    @property
    def does_swap_in_pay(self) -> bool:
        """Whether a block is had sooner from the host tier than by computing its tokens again."""
        return self.swap_in_s < self.recompute_s

    @property
    def are_known(self) -> bool:
        """Whether all rates are."""
        return max(self.recompute_s, self.swap_out_s, self.swap_in_s) < inf


def block_costs(executor: ExecutorLimits) -> BlockCosts:
    """The costs on that executor."""
    return BlockCosts(
        recompute_s=_seconds(executor.block_size, executor.prefill_tokens_per_s),
        swap_out_s=OVERLAP * _seconds(executor.bytes_per_block, executor.swap_out_bytes_per_s),
        swap_in_s=OVERLAP * _seconds(executor.bytes_per_block, executor.swap_in_bytes_per_s),
    )


def _seconds(amount: int, per_second: float) -> float:
    return amount / per_second if amount > 0 and 0 < per_second < inf else inf


_LEARNING_RATE = 0.1


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a preemption was expected to cost, for comparison with what it did cost."""

    best_s: float
    """Seconds by the cheapest way, the chosen one or another."""
    spent_s: float
    """Seconds that the chosen way cost at once: copies to the host tier."""
    let_go: bool
    """Whether the chosen way was to let go of the blocks and see what is left of them."""

    def regret_s(self, costs: BlockCosts, num_recomputed_blocks: float, num_swapped_in: int) -> float:
        """Seconds beyond the cheapest forecast, now that the sequence is back; 0 where a rate is unknown."""
        actual_s = self.spent_s
        if num_recomputed_blocks:
            actual_s += num_recomputed_blocks * costs.recompute_s
        if num_swapped_in:
            actual_s += num_swapped_in * costs.swap_in_s
        return max(0.0, actual_s - self.best_s) if actual_s < inf else 0.0


class TailLosses:
    """Which part of what a sequence lets go of is gone when it resumes: all, until experience says less.

    How much is needed now says little about it: those who run go on growing until the sequence has its turn. And when
    memory runs out many make room before the first of them is back, so the first guess decides about all of them.
    """

    __slots__ = ("share",)

    def __init__(self) -> None:
        self.share = 1.0

    def resumed(self, num_lost: int, num_recomputed: int) -> None:
        """A sequence that let go of `num_lost` computed positions has to compute so many of them again."""
        if num_lost:
            self.share += _LEARNING_RATE * (num_recomputed / num_lost - self.share)
