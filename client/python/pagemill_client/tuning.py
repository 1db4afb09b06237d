"""What `pagemill tune` decides: which settings to try next, which are worth a look, which one to keep. Pure.

The sweep climbs one factor at a time from the settings it starts with: doubling while that is better, else halving,
then on to the next factor with the best so far. Five factors with five values each would be 3,125 services in a full
grid; this is about fifteen, so that each may run long enough to be believed. It relies on two things that hold here: a
factor has one best value, not several, and but for the token budget and the cap on chunks, which follow one another in
the order, the factors hardly depend on each other. Successive halving would drop candidates after short runs, and short
runs have no p99.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias

MARGIN = 0.03
"""A candidate replaces the best only if it is better by this share: equal runs differ by about as much."""
ITL_SLACK = 1.05
"""By default p99 ITL may be this times that of the start: a quantile of equal runs differs by about as much."""
MAX_CLIMB = 3
"""Steps in one direction of a factor."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Values of the options that are swept."""

    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_step_ms: int
    max_num_seqs: int
    block_size: int

    def options(self) -> dict[str, int]:
        """By option name."""
        return asdict(self)

    def words(self) -> str:
        """For the terminal."""
        return ", ".join(f"{name} {value}" for name, value in self.options().items())

    def difference(self, other: Candidate) -> str:
        """What is not as in `other`, in words."""
        theirs = other.options()
        return ", ".join(f"{name} {value}" for name, value in self.options().items() if value != theirs[name])


FACTORS = tuple(Candidate.__dataclass_fields__)
"""In the order of the sweep: what matters most for throughput and pauses comes first."""

LEAST = {"max_num_batched_tokens": 16, "max_prefill_chunk": 16, "max_step_ms": 20, "max_num_seqs": 1, "block_size": 1}
MOST = {"max_num_batched_tokens": 65_536, "max_prefill_chunk": 65_536, "max_step_ms": 60_000, "max_num_seqs": 4_096,
        "block_size": 1_024}  # fmt: skip
"""Beyond these nothing is tried, though more may be allowed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a candidate. Times in seconds. `error`: why it does not count; None if it does."""

    candidate: Candidate
    tokens_per_s: float = 0.0
    itl_p99_s: float = 0.0
    ttft_p99_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over the runs of a candidate that count."""

    candidate: Candidate
    tokens_per_s: float
    itl_p99_s: float
    ttft_p99_s: float
    num_runs: int


Prefer: TypeAlias = Literal["throughput", "latency"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Which of two results is better. "throughput": more tokens per second with a p99 ITL of at most `max_itl_s`.
    "latency": a lower p99 ITL with at least `min_tokens_per_s`. What keeps its bound beats what does not.
    """

    prefer: Prefer
    max_itl_s: float
    min_tokens_per_s: float

    def keeps(self, result: Result) -> bool:
        """Whether the bound holds."""
        if self.prefer == "throughput":
            return result.itl_p99_s <= self.max_itl_s
        return result.tokens_per_s >= self.min_tokens_per_s

    def better(self, new: Result, old: Result, margin: float = MARGIN) -> bool:
        """Whether `new` is better than `old` by more than the margin."""
        if self.keeps(new) != self.keeps(old):
            return self.keeps(new)
        if self.keeps(new) == (self.prefer == "throughput"):
            return new.tokens_per_s > old.tokens_per_s * (1 + margin)
        return new.itl_p99_s < old.itl_p99_s * (1 - margin)

    def words(self) -> str:
        """For the file and the terminal."""
        if self.prefer == "throughput":
            return f"most tokens/s with a p99 ITL of at most {self.max_itl_s * 1e3:.0f} ms"
        return f"least p99 ITL with at least {self.min_tokens_per_s:.1f} tokens/s"


def make_rule(prefer: Prefer, start: Result, max_itl_ms: float | None, min_tokens_per_s: float | None) -> Rule:
    """The rule; a bound that is not given is what the start has, less the slack."""
    itl_s = start.itl_p99_s * ITL_SLACK if max_itl_ms is None else max_itl_ms / 1e3
    return Rule(prefer, itl_s, start.tokens_per_s / ITL_SLACK if min_tokens_per_s is None else min_tokens_per_s)


def results(runs: Iterable[Measured]) -> list[Result]:
    """One per candidate that ran without an error, in the order of their first runs."""
    by_candidate: dict[Candidate, list[Measured]] = {}
    for run in runs:
        if run.error is None:
            by_candidate.setdefault(run.candidate, []).append(run)
    return [
        Result(
            candidate,
            statistics.median(run.tokens_per_s for run in its),
            statistics.median(run.itl_p99_s for run in its),
            statistics.median(run.ttft_p99_s for run in its),
            len(its),
        )
        for candidate, its in by_candidate.items()
    ]


def pareto(found: Sequence[Result]) -> list[Result]:
    """Those that no other beats in both throughput and p99 ITL, most throughput first; of equals all."""

    def beats(a: Result, b: Result) -> bool:
        no_worse = a.tokens_per_s >= b.tokens_per_s and a.itl_p99_s <= b.itl_p99_s
        return no_worse and (a.tokens_per_s > b.tokens_per_s or a.itl_p99_s < b.itl_p99_s)

    kept = [result for result in found if not any(beats(other, result) for other in found)]
    return sorted(kept, key=lambda result: -result.tokens_per_s)


def choose(found: Sequence[Result], start: Candidate, rule: Rule) -> Result:
    """The best, among those with the most runs: a single lucky run does not beat a median. The start if nothing is
    better than it by more than the margin. Raises ValueError when `found` is empty.
    """
    if not found:
        raise ValueError("nothing was measured")
    most = max(result.num_runs for result in found)
    best = next((result for result in found if result.candidate == start), found[0])
    for result in found:
        if result.num_runs == most and rule.better(result, best):
            best = result
    return best


Sweep: TypeAlias = Generator[Candidate, "Result | None", Result]


def sweep(start: Result, rule: Rule, concurrency: int | None) -> Sweep:
    """Yields what to measure next and is sent the result, None for one that failed; returns the best.

    `concurrency`: requests in flight of the load, None when it has no bound; more sequences than these change nothing.
    """
    best, tried = start, {start.candidate}
    for factor in FACTORS:
        for upwards in (True, False):
            base, improved = best, False
            for value in ladder(factor, base.candidate, upwards):
                candidate = replace(base.candidate, **{factor: value})
                if candidate in tried or not is_different(candidate, best.candidate, concurrency):
                    continue
                tried.add(candidate)
                result = yield candidate
                if result is None or not rule.better(result, best):
                    break
                best, improved = result, True
            if improved:
                break
    return best


def ladder(factor: str, candidate: Candidate, upwards: bool) -> Iterator[int]:
    """Values of a factor from that of the candidate on, each double or half of the one before; for the time of a step
    "no limit" (0) is above all others.
    """
    value = candidate.options()[factor]
    if factor == "max_step_ms" and value == 0:
        yield from () if upwards else (1_000, 500, 250)
        return
    for _ in range(MAX_CLIMB):
        value = max(value * 2, LEAST[factor]) if upwards else value // 2
        if not LEAST[factor] <= value <= MOST[factor]:
            return
        yield value
    if factor == "max_step_ms" and upwards:
        yield 0


def is_different(new: Candidate, old: Candidate, concurrency: int | None) -> bool:
    """Whether the values can make a difference: those beyond another bound cannot."""
    return _effective(new, concurrency) != _effective(old, concurrency)


def _effective(candidate: Candidate, concurrency: int | None) -> Candidate:
    tokens = candidate.max_num_batched_tokens
    seqs = min(candidate.max_num_seqs, tokens, concurrency or candidate.max_num_seqs)
    return replace(candidate, max_prefill_chunk=min(candidate.max_prefill_chunk, tokens), max_num_seqs=seqs)


def table(found: Sequence[Result], runs: Sequence[Measured], chosen: Candidate) -> str:
    """All results, the Pareto set marked with *, the chosen one with >; then what failed."""
    head = ("", *FACTORS, "tok/s", "ITL p99 ms", "TTFT p99 ms", "runs")
    front = {result.candidate for result in pareto(found)}
    rows = [
        (
            (">" if result.candidate == chosen else " ") + ("*" if result.candidate in front else " "),
            *map(str, result.candidate.options().values()),
            f"{result.tokens_per_s:.1f}", f"{result.itl_p99_s * 1e3:.1f}", f"{result.ttft_p99_s * 1e3:.0f}",
            str(result.num_runs),
        )
        for result in sorted(found, key=lambda result: -result.tokens_per_s)
    ]  # fmt: skip
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    failed = [f"failed: {run.candidate.options()}: {run.error}" for run in runs if run.error is not None]
    return "\n".join([*lines, "*: nothing else has both more tokens/s and a lower p99 ITL; >: chosen", *failed])
