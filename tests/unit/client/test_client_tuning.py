"""What `pagemill tune` decides: the sweep, the Pareto set, the rule, the file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pagemill.settings import load
from pagemill_client import tune
from pagemill_client.config import TuneSettings
from pagemill_client.roles import OptionError, split
from pagemill_client.tune import Tuning
from pagemill_client.tuning import (
    FACTORS,
    ITL_SLACK,
    LEAST,
    MOST,
    Candidate,
    Measured,
    Result,
    Rule,
    choose,
    is_different,
    ladder,
    make_rule,
    pareto,
    results,
    sweep,
    table,
)
from scheduler_svc.config import SchedulerSettings

START = Candidate(256, 192, 250, 64, 16)
FAST_ENOUGH = Rule("throughput", max_itl_s=0.1, min_tokens_per_s=0.0)


def result(tokens_per_s: float, itl_p99_s: float, candidate: Candidate = START, num_runs: int = 1) -> Result:
    return Result(candidate, tokens_per_s, itl_p99_s, 1.0, num_runs)


def seqs(number: int) -> Candidate:
    return replace(START, max_num_seqs=number)


# The Pareto set


def test_pareto_keeps_what_nothing_beats_in_both() -> None:
    found = [result(100, 0.10), result(90, 0.05), result(80, 0.06), result(110, 0.30), result(109, 0.30)]
    assert [(r.tokens_per_s, r.itl_p99_s) for r in pareto(found)] == [(110, 0.30), (100, 0.10), (90, 0.05)]


def test_pareto_keeps_equals_and_a_single_one() -> None:
    found = [result(100, 0.1, seqs(1)), result(100, 0.1, seqs(2))]
    assert pareto(found) == found
    assert pareto(found[:1]) == found[:1]
    assert pareto([]) == []


# The rule


@pytest.mark.parametrize(
    ("prefer", "new", "old", "is_better"),
    [
        ("throughput", (110, 0.1), (100, 0.01), True),
        ("throughput", (102, 0.1), (100, 0.1), False),  # within the margin
        ("throughput", (500, 0.11), (100, 0.1), False),  # breaks the bound
        ("throughput", (90, 0.1), (100, 0.11), True),  # keeps it, where the other does not
        ("throughput", (50, 0.2), (100, 0.3), True),  # neither does: the nearer one
        ("latency", (60, 0.05), (100, 0.1), True),
        ("latency", (40, 0.05), (100, 0.1), False),
        ("latency", (60, 0.098), (100, 0.1), False),
        ("latency", (40, 0.3), (30, 0.1), True),  # neither keeps 50: the nearer one
    ],
)
def test_the_bound_comes_first_and_small_differences_do_not_count(
    prefer: str, new: tuple[float, float], old: tuple[float, float], is_better: bool
) -> None:
    rule = Rule("throughput" if prefer == "throughput" else "latency", max_itl_s=0.1, min_tokens_per_s=50)
    assert rule.better(result(*new), result(*old)) is is_better


def test_bounds_that_are_not_given_are_those_of_the_start_with_slack() -> None:
    start = result(100, 0.2)
    assert make_rule("throughput", start, None, None) == Rule("throughput", 0.2 * ITL_SLACK, 100 / ITL_SLACK)
    assert make_rule("latency", start, 50.0, 70.0) == Rule("latency", 0.05, 70.0)


def test_choose_takes_the_best_and_the_start_when_nothing_is_better_than_it() -> None:
    found = [result(100, 0.1), result(120, 0.1, seqs(32)), result(150, 0.2, seqs(128))]
    assert choose(found, START, FAST_ENOUGH).candidate == seqs(32)
    assert choose([found[0], result(101, 0.1, seqs(32))], START, FAST_ENOUGH).candidate == START
    with pytest.raises(ValueError, match="nothing was measured"):
        choose([], START, FAST_ENOUGH)


def test_one_lucky_run_does_not_beat_a_median_of_several() -> None:
    found = [result(100, 0.1, num_runs=3), result(110, 0.1, seqs(32), 3), result(140, 0.1, seqs(128), 1)]
    assert choose(found, START, FAST_ENOUGH).candidate == seqs(32)


def test_results_are_medians_and_failures_do_not_count() -> None:
    runs = [Measured(START, tokens, itl, 1.0) for tokens, itl in ((100, 0.3), (300, 0.1), (200, 0.2))]
    runs += [Measured(seqs(2), error="it failed")]
    assert results(runs) == [result(200, 0.2, num_runs=3)]


# The sweep


def run_sweep(
    speed: Callable[[Candidate], float | None], *, concurrency: int | None = 64, start: Candidate = START
) -> tuple[Result, list[Candidate]]:
    """The best by a made-up service, None for one that does not start, and all that was tried."""
    first = speed(start)
    assert first is not None
    steps, tried = sweep(result(first, 0.05, start), FAST_ENOUGH, concurrency), []
    try:
        candidate = next(steps)
        while True:
            tried.append(candidate)
            tokens = speed(candidate)
            candidate = steps.send(None if tokens is None else result(tokens, 0.05, candidate))
    except StopIteration as end:
        return end.value, tried


def peak(**best: int) -> Callable[[Candidate], float]:
    """Throughput that falls by a tenth with each doubling away from the best values."""

    def speed(candidate: Candidate) -> float:
        values = candidate.options()
        distance = sum(abs((values[name] or 10**6).bit_length() - value.bit_length()) for name, value in best.items())
        return float(1000 * 0.9**distance)

    return speed


def test_the_sweep_climbs_to_the_best_values_in_both_directions() -> None:
    best, tried = run_sweep(peak(max_num_batched_tokens=1024, max_step_ms=125, block_size=64))
    assert best.candidate == Candidate(1024, 192, 125, 64, 64)
    assert len(tried) <= 20
    assert len(set(tried)) == len(tried)
    assert START not in tried
    # What got better upwards is not tried downwards.
    assert min(candidate.max_num_batched_tokens for candidate in tried) > 256


def test_a_service_that_nothing_helps_is_left_as_it_is() -> None:
    best, tried = run_sweep(lambda _: 100.0)
    assert best.candidate == START
    # One step up and one down for each factor; more sequences than requests, and a chunk above the budget, are no step.
    assert len(tried) <= 2 * len(FACTORS)


def test_every_step_changes_one_factor_of_the_best_so_far() -> None:
    speed = peak(max_num_batched_tokens=512, max_num_seqs=32)
    best = START
    _, tried = run_sweep(speed)
    for candidate in tried:
        changed = [name for name in FACTORS if candidate.options()[name] != best.options()[name]]
        assert len(changed) == 1
        if speed(candidate) > speed(best) * 1.03:
            best = candidate


def test_a_candidate_that_fails_ends_its_direction_only() -> None:
    def speed(candidate: Candidate) -> float | None:
        return None if candidate.max_num_batched_tokens > 256 else peak(max_num_batched_tokens=64)(candidate)

    best, tried = run_sweep(speed)
    assert best.candidate.max_num_batched_tokens == 64
    assert sum(candidate.max_num_batched_tokens > 256 for candidate in tried) == 1


@pytest.mark.parametrize(
    ("factor", "upwards", "values"),
    [
        ("max_num_batched_tokens", True, [512, 1024, 2048]),
        ("block_size", False, [8, 4, 2]),
        ("max_step_ms", True, [500, 1000, 2000, 0]),
        ("max_step_ms", False, [125, 62, 31]),
    ],
)
def test_ladders_double_and_halve(factor: str, upwards: bool, values: list[int]) -> None:
    assert list(ladder(factor, START, upwards)) == values


def test_ladders_stay_within_what_makes_sense_and_no_limit_is_the_top() -> None:
    for bounds, upwards in ((LEAST, False), (MOST, True)):
        candidate = Candidate(**bounds)
        assert [list(ladder(f, candidate, upwards)) for f in FACTORS if f != "max_step_ms"] == [[]] * 4
    unlimited = replace(START, max_step_ms=0)
    assert list(ladder("max_step_ms", unlimited, True)) == []
    assert list(ladder("max_step_ms", unlimited, False)) == [1000, 500, 250]


def test_values_beyond_another_bound_make_no_difference() -> None:
    assert not is_different(replace(START, max_num_seqs=128), START, concurrency=64)
    assert is_different(replace(START, max_num_seqs=128), START, concurrency=None)
    assert not is_different(replace(START, max_prefill_chunk=512), replace(START, max_prefill_chunk=256), 64)
    assert is_different(replace(START, max_prefill_chunk=128), START, 64)


def test_the_table_marks_the_pareto_set_and_the_choice_and_names_failures() -> None:
    found = [result(100, 0.1), result(120, 0.3, seqs(32)), result(90, 0.2, seqs(16))]
    lines = table(found, [Measured(seqs(8), error="no memory")], START).splitlines()
    assert [line[:2] for line in lines[1:4]] == [" *", ">*", "  "]
    assert "no memory" in lines[-1]


# The command


def settings(*argv: str) -> TuneSettings:
    return load(TuneSettings, ["--model", "demo", *argv])


def test_own_options_are_told_from_those_of_serve() -> None:
    own, others = split(
        ["--model", "m", "--kv-dtype", "int8", "--overwrite", "--rate=2", "--executor.num-threads=1"],
        ["model", "overwrite", "rate"],
    )
    assert own == ["--model", "m", "--overwrite", "--rate=2"]
    assert others == ["--kv-dtype", "int8", "--executor.num-threads=1"]


def test_ports_are_chosen_by_the_services(tmp_path: Path) -> None:
    for option in ("--port", "--admin-port=7", "--gateway.metrics-port=7777"):
        with pytest.raises(OptionError, match="choose their ports themselves"):
            tune._check(settings("--output", str(tmp_path / "o.yaml")), [option])


def test_a_ladder_from_below_the_least_begins_at_the_least() -> None:
    low = replace(START, max_step_ms=5)
    values = list(ladder("max_step_ms", low, upwards=True))
    assert values[0] >= LEAST["max_step_ms"] > 5
    assert list(ladder("max_step_ms", low, upwards=False)) == []


def test_a_value_beyond_what_the_best_allows_is_not_measured() -> None:
    """A chunk of the whole budget is as good as one of twice the budget."""
    tried: list[int] = []
    steps = sweep(result(100, 0.05), FAST_ENOUGH, None)
    candidate = next(steps)
    try:
        while True:
            tried.append(candidate.max_prefill_chunk)
            better = candidate.max_prefill_chunk > START.max_prefill_chunk and candidate.max_num_batched_tokens == 256
            candidate = steps.send(result(100.0 + better * candidate.max_prefill_chunk, 0.05, candidate))
    except StopIteration:
        pass
    assert max(tried) == 384


@pytest.mark.parametrize("option", ["--max-num-seqs", "--executor.block-size=8", "--scheduler.max-num-batched-tokens"])
def test_an_option_that_is_swept_cannot_be_fixed(option: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="tune sweeps it"):
        tune._check(settings("--output", str(tmp_path / "o.yaml")), [option, "8"])


def test_a_variable_that_would_win_over_every_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_BLOCK_SIZE", "32")
    with pytest.raises(OptionError, match="PAGEMILL_BLOCK_SIZE"):
        tune._check(settings("--output", str(tmp_path / "o.yaml")), [])


def test_a_file_that_exists_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    file.write_text("precious: 1\n")
    with pytest.raises(OptionError, match="--overwrite"):
        tune._check(settings("--output", str(file)), [])
    tune._check(settings("--output", str(file), "--overwrite"), [])
    with pytest.raises(OptionError, match="no such folder"):
        tune._check(settings("--output", str(tmp_path / "none" / "o.yaml")), [])


def test_a_workload_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "demo", "--output", str(tmp_path / "o.yaml"), "--workload", str(tmp_path / "none.json")]
    assert tune.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pagemill tune: --workload: ")


def written(tmp_path: Path, runs: Sequence[Measured], base: dict[str, object]) -> str:
    file = tmp_path / "o.yaml"
    tuning = Tuning(settings("--output", str(file)), ["--kv-dtype", "int8"], base, asyncio.Event(), time.monotonic())
    tuning.runs += runs
    chosen = choose(results(runs), START, FAST_ENOUGH)
    tune._write(tuning, chosen, FAST_ENOUGH, START)
    return file.read_text()


def test_the_file_says_what_and_why_and_the_service_takes_it(tmp_path: Path) -> None:
    chosen = Candidate(512, 256, 0, 32, 32)
    runs = [Measured(START, 100, 0.1, 1.0), Measured(chosen, 130, 0.09, 1.0)]
    text = written(tmp_path, runs, {"watermark": 0.02, "max_num_seqs": 7})
    assert "# chosen: 130.0 tokens/s, p99 ITL 90 ms" in text
    assert "# before: 100.0 tokens/s, p99 ITL 100 ms" in text
    assert f"# use: pagemill serve --model demo --kv-dtype int8 --config {tmp_path / 'o.yaml'}" in text
    scheduler = load(SchedulerSettings, ["--config", str(tmp_path / "o.yaml")])
    assert {name: getattr(scheduler, name, 32) for name in FACTORS} == chosen.options()
    assert scheduler.watermark == 0.02


@pytest.mark.parametrize(
    ("options", "passed_s", "num_runs", "room"),
    [
        (("--budget-s", "100"), 0, 10, True),
        (("--budget-s", "100"), 5, 10, False),  # of ten seconds each
        (("--budget-s", "100"), 85, 1, True),
        (("--budget-s", "100", "--max-runs", "3"), 0, 1, True),
        (("--budget-s", "100", "--max-runs", "3"), 0, 2, False),  # two have been made
    ],
)
def test_runs_that_would_not_fit_the_budget_are_not_begun(
    options: tuple[str, ...], passed_s: float, num_runs: int, room: bool
) -> None:
    tuning = Tuning(settings(*options), [], {}, asyncio.Event(), time.monotonic() - passed_s)
    tuning.runs += [Measured(START)] * 2
    tuning.longest_s = 9.9
    assert tuning.has_room_for(num_runs) is room
    tuning.stop.set()
    assert not tuning.has_room_for(num_runs)
