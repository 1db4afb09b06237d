"""From recorded turns to a table, a plot, and their place in a document. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from bench.peers.sides import PAGEMILL
from pagemill_client.load import Record, Request
from pagemill_client.report import Slo, summarize

BEGIN, END = "<!-- peers: begin, written by make bench-peers -->", "<!-- peers: end -->"
SLO = Slo(ttft_s=1.0, itl_s=0.05)
DISTURBED = 0.1
"""CPUs that others kept busy, from which on a turn is not to be trusted."""

Turn = Mapping[str, Any]
"""A line of the results: "workload", "side", "turn", "metrics", "other_cpus", "about", "machine"."""

HEADLINES = {
    "W1": ("decode_tokens_per_s", "one stream, 128 → 128 tokens: decoded tokens/s"),
    "W2": ("tokens_per_s", "64 requests at once, 32 to 512 → 32 to 128 tokens: generated tokens/s, prefill included"),
    "W3": ("prefill_tokens_per_s", "one prompt of 2,048: prompt tokens/s"),
    "W4": ("tokens_per_s", "32 requests that share 1,024 tokens, cold: generated tokens/s, prefill included"),
    "W5": ("slo_share", "40 Poisson arrivals: share with TTFT ≤ 1 s and mean ITL ≤ 50 ms"),
}


def measure(workload: str, requests: Sequence[Request], found: Sequence[Record]) -> dict[str, float]:
    """The numbers of a turn. Raises RuntimeError if a request failed."""
    report = summarize(found, SLO)
    if report.errors:
        raise RuntimeError(f"requests failed: {report.errors}")
    metrics = {"wall_s": report.wall_s, "tokens_per_s": report.generated_tokens_per_s, "requests": len(requests)}
    if workload == "W1":
        (first, count), (last, _) = found[0].arrivals[0], found[0].arrivals[-1]
        metrics["decode_tokens_per_s"] = (found[0].num_tokens - count) / (last - first)
    if workload == "W3":
        metrics["prefill_tokens_per_s"] = len(requests[0].ids) / report.ttft_s["p50"]
    if workload.startswith("W5"):
        metrics |= {"slo_share": report.slo_share}
        for name, values in (("ttft", report.ttft_s), ("itl", report.itl_s)):
            metrics |= {f"{name}_{q}_ms": values[q] * 1e3 for q in ("p50", "p99")}
    return metrics


@dataclass(frozen=True, slots=True)
class Stat:
    """Of the headline of a workload, over a side's turns."""

    median: float
    low: float
    high: float
    num_turns: int
    num_disturbed: int
    metrics: Mapping[str, float]
    """Medians of all metrics."""

    def words(self) -> str:
        digits = 2 if self.high < 10 else 1
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def headline(workload: str) -> tuple[str, str]:
    """Name of the metric that is compared, more is better, and what it is."""
    name, text = HEADLINES[workload[:2]]
    return name, text.replace("40 Poisson arrivals", f"40 Poisson arrivals, {workload[3:]} a second")


def stats(turns: Iterable[Turn]) -> dict[str, dict[str, Stat]]:
    """By workload and side, both in the order of the first turn."""
    grouped: dict[str, dict[str, list[Turn]]] = {}
    for turn in turns:
        grouped.setdefault(turn["workload"], {}).setdefault(turn["side"], []).append(turn)
    return {
        workload: {side: _stat(headline(workload)[0], its) for side, its in sides.items()}
        for workload, sides in sorted(grouped.items())
    }


def _stat(name: str, turns: Sequence[Turn]) -> Stat:
    values = [turn["metrics"][name] for turn in turns]
    metrics = {key: statistics.median(turn["metrics"][key] for turn in turns) for key in turns[0]["metrics"]}
    disturbed = sum(turn["other_cpus"] > DISTURBED for turn in turns)
    return Stat(statistics.median(values), min(values), max(values), len(turns), disturbed, metrics)


def markdown(turns: Sequence[Turn], plot: str) -> str:
    """The section of the document; `plot` is the link to the picture."""
    last = turns[-1]["machine"]
    dates = sorted({turn["machine"]["date"][:10] for turn in turns})
    where = f"{last['num_cpus']} CPUs ({last['cpu']}), {last['memory_gib']} GiB, Python {last['python']}"
    lines = [f"{where}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.", "", f"![{plot}]({plot})", ""]
    lines += ["| workload | side | median (least to most) | turns | Pagemill ÷ this |", "|---|---|---|---|---|"]
    found = stats(turns)
    for workload, sides in found.items():
        ours = sides.get(PAGEMILL)
        for side, stat in sides.items():
            ratio = "" if ours is None or side == PAGEMILL or not stat.median else f"{ours.median / stat.median:.2f} x"
            cells = (_describe(workload, stat), side, stat.words(), _turns(stat), ratio)
            lines.append(f"| {' | '.join(cells)} |")
    lines += _online(found)
    lines += ["", "| side | versions | weights | keys and values | threads | how |", "|---|---|---|---|---|---|"]
    for side, about in {turn["side"]: turn["about"] for turn in turns}.items():
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        row = (side, versions, about["weights"], about["kv"], str(about["threads"]), about["how"])
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _describe(workload: str, stat: Stat) -> str:
    few = {"W2": 64, "W4": 32}.get(workload, 0)
    subset = f" ({stat.metrics['requests']:.0f} of the requests)" if 0 < stat.metrics["requests"] < few else ""
    return f"{workload}: {headline(workload)[1]}{subset}"


def _turns(stat: Stat) -> str:
    return f"{stat.num_turns}" + (f", {stat.num_disturbed} in company" if stat.num_disturbed else "")


def _online(found: Mapping[str, Mapping[str, Stat]]) -> list[str]:
    """Latencies of the workloads with arrivals, medians over the turns."""
    names = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    rows = [
        f"| {workload} | {side} | {' | '.join(f'{stat.metrics[name]:,.0f}' for name in names)} |"
        for workload, sides in found.items()
        if workload.startswith("W5")
        for side, stat in sides.items()
    ]
    head = ["", "| workload | side | TTFT p50 | p99 ms | ITL p50 | p99 ms |", "|---|---|---|---|---|---|"]
    return [*head, *rows] if rows else []


def insert(document: str, section: str) -> str:
    """The document with the section between its marks. Raises ValueError if they are not there."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


_COLOURS = {PAGEMILL: "#1f6feb"}
_OTHER = "#8b949e"
_BAR, _GAP, _LEFT, _WIDTH = 18, 14, 150, 460


def svg(turns: Sequence[Turn]) -> str:
    """Bars of each side's median over Pagemill's (1 is equal, longer is better), with the spread as a line."""
    found = {name: sides for name, sides in stats(turns).items() if sides.get(PAGEMILL) and sides[PAGEMILL].median}
    widest = max((s.high / sides[PAGEMILL].median for sides in found.values() for s in sides.values()), default=1.0)
    scale, y, parts = _WIDTH / max(1.0, widest), 30, list[str]()
    for workload, sides in found.items():
        parts.append(
            f'<text x="8" y="{y}" font-weight="bold">{escape(workload)}: {escape(headline(workload)[1])}</text>'
        )
        y += 8
        for side, stat in sides.items():
            low, mid, high = (value / sides[PAGEMILL].median * scale for value in (stat.low, stat.median, stat.high))
            middle = y + _BAR / 2
            parts += [
                f'<text x="{_LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(side)}</text>',
                f'<rect x="{_LEFT}" y="{y}" width="{mid:.1f}" height="{_BAR}" fill="{_COLOURS.get(side, _OTHER)}"/>',
                f'<path d="M{_LEFT + low:.1f} {middle}H{_LEFT + high:.1f}" stroke="#000"/>',
                f'<text x="{_LEFT + max(mid, high) + 6:.1f}" y="{middle + 4:.1f}">{escape(stat.words())}</text>',
            ]
            y += _BAR + 4
        y += _GAP + 12
    one = _LEFT + scale
    parts.append(f'<path d="M{one:.1f} 20V{y - _GAP}" stroke="#1f6feb" stroke-dasharray="3 3"/>')
    size = f'width="{_LEFT + _WIDTH + 190}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])
