"""What a bench run is summed up to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pagemill_client.load import Record

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """A request meets it with its first token and its mean inter-token time, both in seconds."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """One run. Times in seconds; distributions as {"mean", "p50", "p90", "p99", "max"}, empty without a sample.

    `wall_s` reaches from the first request's start to the last one's end. `goodput_rps`: requests per second that
    finished within the SLO. Failed requests count in `errors` and in no latency.
    """

    num_requests: int
    num_finished: int
    errors: dict[str, int]
    wall_s: float
    prompt_tokens: int
    generated_tokens: int
    generated_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_s: dict[str, float]
    itl_s: dict[str, float]
    e2e_s: dict[str, float]
    slo_share: float
    goodput_rps: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between the two nearest ranks. `values` must be sorted and not empty."""
    position = (len(values) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def summarize(records: Sequence[Record], slo: Slo) -> Report:
    """The report of one run."""
    finished = [record for record in records if record.error is None and record.arrivals]
    start = min(record.sent_at for record in records)
    wall_s = max(max(record.ended_at for record in records) - start, 1e-9)
    generated = sum(record.num_tokens for record in records)
    prompts = sum(record.num_prompt_tokens for record in finished)
    good = sum(_meets(record, slo) for record in finished)
    return Report(
        num_requests=len(records),
        num_finished=len(finished),
        errors=dict(Counter(record.error or "NO_TOKENS" for record in records if record not in finished)),
        wall_s=wall_s,
        prompt_tokens=prompts,
        generated_tokens=generated,
        generated_tokens_per_s=generated / wall_s,
        total_tokens_per_s=(prompts + generated) / wall_s,
        requests_per_s=len(finished) / wall_s,
        ttft_s=_distribution([record.arrivals[0][0] - record.sent_at for record in finished]),
        itl_s=_distribution([gap for record in finished for gap in inter_token_times(record)]),
        e2e_s=_distribution([record.ended_at - record.sent_at for record in finished]),
        slo_share=good / len(records),
        goodput_rps=good / wall_s,
    )


def inter_token_times(record: Record) -> list[float]:
    """Seconds between tokens; tokens that came in one message share the time since the message before."""
    gaps: list[float] = []
    for (before, _), (now, n) in zip(record.arrivals, record.arrivals[1:], strict=False):
        gaps += [(now - before) / n] * n
    return gaps


def table(rows: Mapping[str, Report]) -> str:
    """Reports under one another, one row per run."""
    head = ("run", "done", "errors", "tok/s", "req/s", "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "e2e p50", "p99 s",
            "SLO", "goodput/s")  # fmt: skip
    cells = [head, *(_row(name, report) for name, report in rows.items())]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    reasons = [f"{name}: {reason} {n} times" for name, r in rows.items() for reason, n in sorted(r.errors.items())]
    return "\n".join([*lines, *reasons])


def _row(name: str, r: Report) -> tuple[str, ...]:
    def ms(values: Mapping[str, float], key: str) -> str:
        return f"{values[key] * 1e3:.1f}" if values else "-"

    def seconds(values: Mapping[str, float], key: str) -> str:
        return f"{values[key]:.2f}" if values else "-"

    return (
        name, str(r.num_finished), str(sum(r.errors.values())), f"{r.generated_tokens_per_s:.1f}",
        f"{r.requests_per_s:.2f}", ms(r.ttft_s, "p50"), ms(r.ttft_s, "p99"), ms(r.itl_s, "p50"), ms(r.itl_s, "p99"),
        seconds(r.e2e_s, "p50"), seconds(r.e2e_s, "p99"), f"{r.slo_share:.0%}", f"{r.goodput_rps:.2f}",
    )  # fmt: skip


def _meets(record: Record, slo: Slo) -> bool:
    (first, n_first), last = record.arrivals[0], record.arrivals[-1][0]
    itl_s = (last - first) / max(1, record.num_tokens - n_first)
    return first - record.sent_at <= slo.ttft_s and itl_s <= slo.itl_s


def _distribution(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    summary = {f"p{q}": percentile(ordered, q) for q in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **summary, "max": ordered[-1]}
