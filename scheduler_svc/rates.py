"""What an executor really does per second, learned from its results; its hello gives the figures to begin with.

The hello's figures are from one moment at its start. Another load in that moment, or since, makes them wrong, and with
them every choice between swapping and computing again. Each figure is the median of the last samples (of prefill the
upper quartile), so that single odd steps change nothing; the hello's counts as the first few of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest

from scheduler_svc.core.pace import FIRST_SHARE, LEAST_PROMPT_TOKENS, StepPace
from scheduler_svc.core.params import ExecutorLimits

NUM_SAMPLES = 15
"""Samples that count. Half of them must agree before a figure moves all the way."""
NUM_DECODE_SAMPLES = 7
"""The same of decode steps, which are rare while prompts keep coming."""
PREFILL_QUANTILE = 0.75
"""Which sample of the prefill rate counts, from the slowest up. Where steps differ more from each other than by their
prompts, the median makes prompts look as dear as the noise, hence smaller, hence dearer still by the token."""
NUM_FIRST = 3
"""Samples that the hello's figure stands for; without one, so many are needed before there is a figure."""
LEAST_CHANGE = 0.1
"""Relative change below which the core keeps what it has, so that costs do not flicker."""

PREFILL_SHARE = 0.75
"""Least share of a step's tokens that must be parts of prompts, while nothing is known of its decode rows' time."""
LEAST_PROMPT_SHARE = 0.05
"""Share of a step's time that parts of prompts have at least; decode rows alone may have taken longer another time."""
LEAST_COPY_S = 200e-6
"""Shorter copies are mostly the cost of a call, and the wire counts microseconds."""


class LearnedRate:
    """One figure per second: of the last samples the one at the quantile, by default the median."""

    def __init__(self, first: float, *, num_samples: int = NUM_SAMPLES, quantile: float = 0.5) -> None:
        self._samples = deque([first] * NUM_FIRST if first > 0 else [], num_samples)
        self._quantile = quantile
        self.value = first
        """0: unknown."""

    def add(self, amount: float, seconds: float) -> None:
        """One sample. Amounts and times that are not positive are no samples."""
        if amount > 0 and seconds > 0:
            self._samples.append(amount / seconds)
            if len(self._samples) >= NUM_FIRST:
                self.value = sorted(self._samples)[int(self._quantile * len(self._samples))]


@dataclass(frozen=True, slots=True)
class CopiedBytes:
    """Bytes that the copies of one plan, or of several, move."""

    out: int = 0
    """Device to host."""
    back: int = 0
    """Host to device."""

    @classmethod
    def total(cls, parts: Iterable[CopiedBytes]) -> CopiedBytes:
        """All of them together."""
        known = list(parts)
        return cls(sum(part.out for part in known), sum(part.back for part in known))


class ExecutorRates:
    """The rates of one executor: `limits` has the figures in use."""

    def __init__(self, limits: ExecutorLimits, max_tokens: int) -> None:
        """`max_tokens`: the token budget of a step."""
        self.limits = limits
        self._first_tokens = FIRST_SHARE * min(max_tokens, limits.max_tokens)
        """Least tokens of a step that counts, for the while of `PREFILL_SHARE`."""
        self._prefill = LearnedRate(limits.prefill_tokens_per_s, quantile=PREFILL_QUANTILE)
        self._decodes: list[LearnedRate] = []
        """Steps per second, by the bit length of their number of decode rows."""
        self._out = LearnedRate(limits.swap_out_bytes_per_s)
        self._back = LearnedRate(limits.swap_in_bytes_per_s)

    def step(self, num_rows: int, row_num_tokens: list[int] | None, execute_s: float) -> None:
        """A step without copies beside it took so long. `row_num_tokens`: as in the plan."""
        counts = [count for count in row_num_tokens or () if count > 1]
        num_decodes, num_prompt = num_rows - len(counts), sum(counts)
        num_tokens = num_decodes + num_prompt
        if not num_prompt:
            self._decode_step(num_rows, execute_s)
            return
        decode_s = StepPace(0.0, 0.0, self._decode_step_s()).decode_s(num_decodes)
        if execute_s < decode_s / 2:  # so decode rows take less by now, even if none are seen alone
            self._decode_step(max(1, num_decodes), execute_s / 2)
        if decode_s and num_prompt >= min(LEAST_PROMPT_TOKENS, self._first_tokens):
            self._prefill.add(num_prompt, max(execute_s - decode_s, LEAST_PROMPT_SHARE * execute_s))
        elif not decode_s and num_tokens >= self._first_tokens and num_prompt >= PREFILL_SHARE * num_tokens:
            self._prefill.add(num_tokens, execute_s)

    def _decode_step(self, num_rows: int, execute_s: float) -> None:
        """A step of so many decode rows and nothing else."""
        if num_rows:
            while len(self._decodes) < num_rows.bit_length():
                self._decodes.append(LearnedRate(0.0, num_samples=NUM_DECODE_SAMPLES))
            self._decodes[num_rows.bit_length() - 1].add(1, execute_s)

    def _decode_step_s(self) -> tuple[float, ...]:
        return tuple(1 / rate.value if rate.value else 0.0 for rate in self._decodes)

    def copies(self, done: CopiedBytes, seconds: float) -> None:
        """Copies took so long in all. Those of both directions together cannot be told apart."""
        if seconds < LEAST_COPY_S or (done.out and done.back):
            return
        self._out.add(done.out, seconds)
        self._back.add(done.back, seconds)

    def take_news(self) -> ExecutorLimits | None:
        """The limits with what has been learned; None where no figure has moved enough since the last time."""
        old, prefill, out, back = self.limits, self._prefill.value, self._out.value, self._back.value
        decodes = self._decode_step_s()
        pairs = [
            (old.prefill_tokens_per_s, prefill),
            (old.swap_out_bytes_per_s, out),
            (old.swap_in_bytes_per_s, back),
            *zip_longest(old.decode_step_s, decodes, fillvalue=0.0),
        ]
        if all(abs(new - known) <= LEAST_CHANGE * known for known, new in pairs):
            return None
        self.limits = replace(
            old,
            prefill_tokens_per_s=prefill,
            swap_out_bytes_per_s=out,
            swap_in_bytes_per_s=back,
            decode_step_s=decodes,
        )
        return self.limits
