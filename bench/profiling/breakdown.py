"""From the records of steps to a table of where their time went. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.profiling.clock import REST, CallCost

GEMM, ATTENTION, OTHER, SAMPLING = "GEMM", "attention", "other kernels", "sampling"
PYTHON, IDLE = "Python", "idle"
KERNELS = (GEMM, ATTENTION, OTHER, SAMPLING)
ROWS = (*KERNELS, PYTHON, IDLE)

Step = Mapping[str, Any]
"""As `profiler` writes it: "begin", "end" in seconds, "idle_ns" before it, "rows", "tokens"; "ns", "calls" by label."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Means over `num_steps` consecutive steps; milliseconds by row, their sum the time from step to step."""

    num_steps: int
    mean_rows: float
    mean_tokens: float
    milliseconds: Mapping[str, float]
    timers_ms: float
    """What the timers cost a step; measured apart, taken out of the rows."""
    labels: Mapping[str, float]
    """Milliseconds a step of each label that is not Python."""

    @property
    def period_ms(self) -> float:
        """From the beginning of a step to that of the next, without the timers."""
        return sum(self.milliseconds.values())

    @property
    def busy_ms(self) -> float:
        """The step itself."""
        return self.period_ms - self.milliseconds[IDLE]

    def not_kernels(self, beside_ms: float = 0.0) -> float:
        """Share of the period that computes nothing: Python and waiting for the next plan.

        `beside_ms`: what others spend on a step while it runs, as if it were in the step's way; the waiting is part of
        it.
        """
        outside = max(beside_ms, self.milliseconds[IDLE])
        return (self.milliseconds[PYTHON] + outside) / (self.busy_ms + outside)


def row_of(label: str) -> str:
    """The row of the table that a label belongs to; a kernel that is not known yet is an "other" one."""
    if label == REST:
        return PYTHON
    if any(part in label for part in ("linear", "gemm", "quantised")):  # the last: products with 8 and 4 bit weights
        return GEMM
    if "attend" in label or "attention" in label:
        return ATTENTION
    if label in ("argmax_rows", "choose") or "sample" in label:
        return SAMPLING
    return OTHER


def within(steps: Sequence[Step], begin: float, end: float) -> list[Step]:
    """The steps that lie in the window whole; seconds on the clock of the records."""
    return [step for step in steps if step["begin"] >= begin and step["end"] <= end]


def breakdown(steps: Sequence[Step], costs: Mapping[str, CallCost], timer: CallCost) -> Breakdown:
    """The mean step. `timer`: what a timer costs around what is no ctypes function. Raises ValueError without steps."""
    if not steps:
        raise ValueError("no step of this load lies in the window: measure for longer")
    rows, labels, timers = dict.fromkeys(ROWS, 0.0), dict[str, float](), 0.0
    for step in steps:
        rest = float(step["ns"].get(REST, 0))
        for label, ns in step["ns"].items():
            if label == REST:
                continue
            calls, cost = step["calls"].get(label, 0), costs.get(label, timer)
            arguments = cost.arguments if label in costs else 0.0
            own = max(0.0, ns - calls * (arguments + cost.timer_inside))
            rest += calls * (arguments - cost.timer_outside)
            timers += calls * (cost.timer_inside + cost.timer_outside)
            rows[row_of(label)] += own
            labels[label] = labels.get(label, 0.0) + own
        rows[PYTHON] += max(0.0, rest)
        rows[IDLE] += step["idle_ns"]
    n = len(steps)
    return Breakdown(
        num_steps=n,
        mean_rows=sum(step["rows"] for step in steps) / n,
        mean_tokens=sum(step["tokens"] for step in steps) / n,
        milliseconds={row: ns / n / 1e6 for row, ns in rows.items()},
        timers_ms=timers / n / 1e6,
        labels={label: ns / n / 1e6 for label, ns in sorted(labels.items(), key=lambda item: -item[1])},
    )


def table(name: str, found: Breakdown, beside: Mapping[str, float]) -> str:
    """Lines for the terminal. `beside`: milliseconds a step of other threads and processes."""
    period = found.period_ms
    head = (
        f"{name}: {found.num_steps} steps of {found.mean_rows:.1f} rows and {found.mean_tokens:.1f} tokens, "
        f"{period:.2f} ms from step to step"
    )
    lines = [head, *(_line(row, ms, period) for row, ms in found.milliseconds.items())]
    lines += ["  beside it, while steps run:", *(_line(row, ms, period) for row, ms in beside.items())]
    lines.append(f"  (the timers' own {found.timers_ms:.3f} ms a step are taken out)")
    return "\n".join(lines)


def _line(row: str, milliseconds: float, period: float) -> str:
    return f"  {row:<28} {milliseconds:>9.3f} ms {milliseconds / period:>8.2%}"
