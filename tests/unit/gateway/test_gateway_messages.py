"""What a client sees of an output, and what the clock observes whatever it sees."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill import columns
from pagemill.engine.v1.frontend_pb2 import StreamEnded
from pagemill.engine.v1.sampling_pb2 import Sampling
from pagemill.v1 import inference_pb2 as pb
from scheduler_svc.gateway import messages
from scheduler_svc.gateway.limits import ModelLimits
from scheduler_svc.gateway.messages import OutputClock, delta, finished
from scheduler_svc.gateway.metrics import GatewayMetrics
from scheduler_svc.gateway.output import Ending, EndKind, Output, Piece, StopRules
from scheduler_svc.gateway.streams import LiveStream, Replay
from scheduler_svc.gateway.tokenizer import TextTokenizer
from scheduler_svc.gateway.validation import check_generate
from tests.unit.gateway.tiny_tokenizer import byte_level_tokenizer

TOKENIZER = TextTokenizer(byte_level_tokenizer())


def wanting(text: bool, ids: bool) -> Any:
    request = pb.GenerateRequest(text="x", output=pb.OutputOptions(return_text=text, return_token_ids=ids))
    return check_generate(request, ModelLimits(259, 128))


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("ids", [True, False])
def test_a_delta_has_what_was_asked_for(text: bool, ids: bool) -> None:
    message = delta(Piece(3, [1, 2], "ab"), wanting(text, ids))
    if not text and not ids:
        assert message is None
    else:
        assert message is not None
        assert message.delta.first_index == 3
        assert message.delta.text == ("ab" if text else "")
        assert list(message.delta.token_ids) == ([1, 2] if ids else [])


def test_a_piece_that_shows_nothing_is_no_message() -> None:
    assert delta(Piece(0, [1], ""), wanting(True, False)) is None
    assert delta(Piece(0, [1], ""), wanting(True, True)) is not None


class Time:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> tuple[Time, GatewayMetrics, OutputClock]:
    time, metrics = Time(), GatewayMetrics()
    monkeypatch.setattr(messages, "time", time)
    return time, metrics, OutputClock(metrics, 90.0)


def count_and_sum(histogram: Any) -> tuple[float, float]:
    (metric,) = histogram.collect()
    by_name = {s.name.rpartition("_")[2]: s.value for s in metric.samples if not s.name.endswith("_bucket")}
    return by_name["count"], round(by_name["sum"], 6)


def test_each_token_behind_the_first_delta_counts_once(clock: tuple[Time, GatewayMetrics, OutputClock]) -> None:
    time, metrics, watch = clock
    watch.took(2)
    watch.delta()
    assert count_and_sum(metrics.ttft) == (1, 10.0)
    assert count_and_sum(metrics.inter_token) == (0, 0)
    time.now += 1.5
    watch.took(1)  # a token whose text is held back
    time.now += 1.5
    watch.took(2)
    watch.delta()
    assert count_and_sum(metrics.inter_token) == (3, 3.0)
    time.now += 0.5
    watch.took(1)  # the end-of-sequence id, which has no text
    watch.ended()
    assert count_and_sum(metrics.inter_token) == (4, 3.5)
    assert count_and_sum(metrics.ttft) == (1, 10.0)
    time.now += 2
    watch.finished()
    assert count_and_sum(metrics.e2e) == (1, 15.5)


def test_an_output_that_showed_nothing_has_no_times_between_tokens(
    clock: tuple[Time, GatewayMetrics, OutputClock],
) -> None:
    _, metrics, watch = clock
    watch.took(1)
    watch.ended()
    assert count_and_sum(metrics.inter_token) == (0, 0)
    assert count_and_sum(metrics.ttft) == (0, 0)


@pytest.mark.parametrize(("reported", "shown"), [(0, 0), (6, 6), (7, 6), (100, 6)])
def test_cached_tokens_are_fewer_than_the_prompt_has(reported: int, shown: int) -> None:
    replay = Replay("r", "", 0, columns.pack([1] * 7), 7, Sampling(), 50, 0.0, None, None, b"")
    stream = LiveStream(1, replay, Output(TOKENIZER.new_detokenizer(), StopRules(50)))
    stream.output.end(Ending(EndKind.LENGTH))
    assert finished(stream).usage.cached_tokens == 0  # no bill came
    stream.bill = StreamEnded(stream=1, cached_tokens=reported)
    assert finished(stream).usage.cached_tokens == shown
