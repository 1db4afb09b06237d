"""How many prompt tokens a step may have so that it ends in time, by what steps of one executor have taken.

A step's time is that of its decode rows and so much for each prompt token:

    seconds = decode_s(rows) + prompt_token_s * tokens

Dividing tokens by seconds instead would be wrong: the smaller a step, the dearer each of its tokens looks, and a budget
solved from that shrinks the next step, and so on down to the smallest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from scheduler_svc.core.params import ExecutorLimits

LEAST_PROMPT_TOKENS = 16
"""Prompt tokens that a step may have however long it takes, so that prompts always get on."""
FIRST_SHARE = 0.25
"""Of the tokens that there is room for, the least as long as nothing is known of decode rows' time: what is learned
from a smaller step is its fixed cost."""
FIRST_TIMES = 4
"""For the same while, how many times the limit such a step may take."""
LEAST_SHARE = 1.0
"""Of the time of a step's decode rows, what prompts have at least. Where decode rows alone take most of the limit, on a
busy machine or with a large model, shorter steps would come little sooner and be mostly fixed cost."""
NUM_MIXED = 16
"""Plans in a row with both decode rows and prompts that were cut; the next has no prompts. What decode rows take shows
in no other way while prompts keep coming, and without it a machine that has become slower makes prompts look dear."""


@dataclass(frozen=True, slots=True)
class StepPace:
    """The longest that a step should take, and what it is made of. All in seconds; 0: no limit, or not known."""

    max_step_s: float
    prompt_token_s: float
    decode_step_s: tuple[float, ...] = ()
    """As in `ExecutorLimits`."""

    def decode_s(self, num_rows: int) -> float:
        """What a step of so many decode rows takes; by that of fewer rows where no such step is known, 0 without any.

        A step without decode rows is counted as one with one: both read all weights once.
        """
        known = self.decode_step_s[: max(1, num_rows).bit_length()]
        return next((seconds for seconds in reversed(known) if seconds), 0.0)

    def num_prompt_tokens(self, num_decodes: int, most: int) -> int:
        """How many of `most` prompt tokens fit into a step with that many decode rows; at least `LEAST_PROMPT_TOKENS`
        of them."""
        if not self.max_step_s or not self.prompt_token_s:
            return most
        decode_s = self.decode_s(num_decodes)
        left_s = max(self.max_step_s - decode_s, LEAST_SHARE * decode_s)
        least = LEAST_PROMPT_TOKENS
        if not decode_s:
            first = min(ceil(FIRST_SHARE * most), int(FIRST_TIMES * self.max_step_s / self.prompt_token_s))
            least = max(least, first)
        return min(most, max(least, int(left_s / self.prompt_token_s)))


def step_pace(max_step_ms: int, executor: ExecutorLimits) -> StepPace:
    """The pace on that executor."""
    rate = executor.prefill_tokens_per_s
    return StepPace(max_step_ms / 1000, 1 / rate if rate > 0 else 0.0, executor.decode_step_s)
