from __future__ import annotations

import random

import pytest

from pagemill_client.load import Record, Request, poisson, random_requests
from pagemill_client.report import Slo, inter_token_times, percentile, summarize, table


def record(sent_at: float, *arrivals: tuple[float, int], error: str | None = None) -> Record:
    return Record(10, sent_at, list(arrivals), arrivals[-1][0] if arrivals else sent_at, error)


def test_percentiles_interpolate() -> None:
    assert percentile([1.0], 99) == 1.0
    assert percentile([0.0, 10.0], 50) == 5.0
    assert percentile([0.0, 1.0, 2.0, 3.0], 100) == 3.0


def test_tokens_of_one_message_share_its_time() -> None:
    assert inter_token_times(record(0, (1.0, 1), (2.0, 1), (4.0, 4))) == [1.0, 0.5, 0.5, 0.5, 0.5]


def test_a_run_is_summed_up_by_hand() -> None:
    records = [
        record(0.0, (0.5, 1), (0.6, 1), (0.7, 1)),  # meets both objectives
        record(0.0, (2.0, 1), (2.1, 1)),  # first token too late
        record(1.0, (1.1, 1), (2.1, 1), (4.0, 1)),  # tokens too slow
        record(1.0, (1.2, 2), error="INTERNAL"),
        record(1.0),
    ]
    report = summarize(records, Slo(ttft_s=1.0, itl_s=0.2))
    assert report.wall_s == 4.0
    assert report.generated_tokens == 10
    assert report.generated_tokens_per_s == 2.5
    assert report.num_finished == 3
    assert report.prompt_tokens == 30
    assert report.errors == {"INTERNAL": 1, "NO_TOKENS": 1}
    assert report.goodput_rps == 0.25
    assert report.slo_share == 0.2
    assert report.ttft_s["p50"] == 0.5
    assert report.e2e_s["max"] == 3.0
    assert "INTERNAL 1 times" in table({"run": report})


def test_a_run_without_a_success_still_gives_a_report() -> None:
    report = summarize([record(0.0, error="UNAVAILABLE")], Slo(1, 1))
    assert report.ttft_s == {}
    assert "UNAVAILABLE" in table({"run": report})


def test_poisson_arrivals_have_the_rate_and_repeat_with_the_seed() -> None:
    requests = [Request((1,), 1)] * 4000
    timed = poisson(requests, 8.0, random.Random(3))
    last = timed[-1].at
    assert timed[0].at == 0.0
    assert last is not None
    assert last == pytest.approx(500, rel=0.1)
    assert timed == poisson(requests, 8.0, random.Random(3))


def test_random_requests_keep_to_their_ranges() -> None:
    made = random_requests(200, (3, 5), (1, 2), 7, random.Random(0))
    assert {len(request.ids) for request in made} == {3, 4, 5}
    assert {request.n_out for request in made} == {1, 2}
    assert {i for request in made for i in request.ids} == set(range(7))
