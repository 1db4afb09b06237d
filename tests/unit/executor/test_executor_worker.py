from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
import torch

from executor_svc.batch import Batch
from executor_svc.service import _beating
from executor_svc.worker import Exit, Worker, WorkerOptions
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.framing import Channel
from pagemill.links import PeerId
from pagemill.loopback import LoopbackHub
from tests.unit.executor.executor_fakes import Bench, DigestRunner, admit, column, greedy_continuation, ids_of
from tests.unit.executor.executor_scheduler import DEADLINE_S, RunningWorker, until

PROMPT = [5, 6, 7, 8, 9, 10]


class GatedRunner(DigestRunner):
    """Steps wait until the test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def forward(self, batch: Batch) -> torch.Tensor:
        self.entered.release()
        assert self.gate.acquire(timeout=DEADLINE_S)
        return super().forward(batch)

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=DEADLINE_S)


def first_plan(step_id: int = 1, lane: int = 0, generation: int = 1) -> pb.StepPlan:
    return pb.StepPlan(
        step_id=step_id,
        admit=[admit(lane, PROMPT, [0, 1, 2, 3], generation=generation)],
        row_lanes=column(lane),
        row_num_tokens=column(len(PROMPT)),
    )


def decode_plan(step_id: int) -> pb.StepPlan:
    return pb.StepPlan(step_id=step_id, repeat_decode=True)


def test_hello_session_plans_results() -> None:
    with RunningWorker() as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1000, first_step_id=41)
        tokens = ids_of(scheduler.step(first_plan(41)).token_ids)
        for step_id in range(42, 48):
            tokens += ids_of(scheduler.step(decode_plan(step_id)).token_ids)
        assert tokens == greedy_continuation(PROMPT, 7)


def test_plans_sent_ahead_feed_on_each_other() -> None:
    with RunningWorker() as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1, depth=4)
        for plan in (first_plan(1), *(decode_plan(i) for i in range(2, 6))):
            scheduler.send(plan=plan)
        results = [scheduler.receive("result").result for _ in range(5)]
        assert [result.step_id for result in results] == [1, 2, 3, 4, 5]
        assert [ids_of(result.token_ids)[0] for result in results] == greedy_continuation(PROMPT, 5)


def test_heartbeats_go_on_while_a_step_runs_and_say_so() -> None:
    runner = GatedRunner()
    with RunningWorker(Bench(runner)) as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1)
        scheduler.receive("heartbeat")
        assert scheduler.heartbeats[-1].state == pb.EXECUTOR_STATE_IDLE
        scheduler.send(plan=first_plan())
        runner.wait_entered()
        beats = [scheduler.receive("heartbeat").heartbeat for _ in range(4)][1:]
        assert {beat.state for beat in beats} == {pb.EXECUTOR_STATE_RUNNING}
        assert {beat.last_step_id for beat in beats} == {0}
        assert beats[0].since_ms < beats[-1].since_ms
        runner.gate.release()
        assert scheduler.receive("result").result.step_id == 1
        scheduler.heartbeats.clear()
        beat = scheduler.receive("heartbeat").heartbeat
        assert (beat.state, beat.last_step_id) == (pb.EXECUTOR_STATE_IDLE, 1)


def test_a_duplicate_gets_its_stored_result_again() -> None:
    with RunningWorker() as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1)
        results = [scheduler.step(first_plan(1)), *(scheduler.step(decode_plan(i)) for i in range(2, 7))]
        forwards = running.bench.runner.num_forwards
        for i in (6, 3, 4):  # the last four
            assert scheduler.step(decode_plan(i)).SerializeToString() == results[i - 1].SerializeToString()
        scheduler.send(plan=decode_plan(2))  # forgotten: nothing comes
        again = scheduler.step(decode_plan(7))
        assert again.step_id == 7
        assert running.bench.runner.num_forwards == forwards + 1
        assert running.stale("plan_duplicate") == 4


def test_a_duplicate_of_a_running_plan_runs_once() -> None:
    runner = GatedRunner()
    with RunningWorker(Bench(runner)) as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1)
        scheduler.send(plan=first_plan())
        runner.wait_entered()
        scheduler.send(plan=first_plan())
        until(lambda: running.stale("plan_duplicate") == 1)
        runner.gate.release()
        assert scheduler.receive("result").result.step_id == 1
        runner.gate.release()
        assert scheduler.step(decode_plan(2)).step_id == 2
        assert runner.num_forwards == 2


def test_a_gap_is_named_and_the_missing_plan_repairs_it() -> None:
    with RunningWorker() as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1)
        scheduler.step(first_plan(1))
        scheduler.send(plan=decode_plan(3))
        assert scheduler.receive("nack").nack.last_step_id == 1
        assert scheduler.step(decode_plan(2)).step_id == 2
        assert scheduler.step(decode_plan(3)).step_id == 3


def test_more_plans_than_the_pipeline_are_a_gap_not_a_queue() -> None:
    runner = GatedRunner()
    with RunningWorker(Bench(runner)) as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1, depth=1)
        scheduler.send(plan=first_plan(1))
        runner.wait_entered()
        for i in range(2, 12):
            scheduler.send(plan=decode_plan(i))
        accepted = scheduler.receive("nack").nack.last_step_id
        assert accepted < 11
        for _ in range(20):
            runner.gate.release()
        assert [scheduler.receive("result").result.step_id for _ in range(accepted)] == list(range(1, accepted + 1))


def test_a_newer_session_drops_lanes_and_an_older_epoch_is_ignored() -> None:
    with RunningWorker() as running:
        scheduler = running.scheduler
        scheduler.start(epoch=10)
        scheduler.step(first_plan(1))
        old = scheduler.channel.pack(plan=decode_plan(2))
        scheduler.accept(epoch=11, first_step_id=1)
        scheduler.send_frame(old)
        result = scheduler.step(first_plan(1))  # the same lane and generation: the lane is free again
        assert ids_of(result.token_ids) == greedy_continuation(PROMPT, 1)
        odd = decode_plan(2)
        odd.state_digest = 1
        failed = scheduler.step(odd)
        assert (failed.status, failed.HasField("state_digest")) == (pb.STEP_STATUS_FAILED, True)
        assert running.stale("stale_epoch") == 1


def test_plans_of_a_dead_session_are_skipped() -> None:
    runner = GatedRunner()
    with RunningWorker(Bench(runner)) as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1)
        scheduler.send(plan=first_plan(1))
        runner.wait_entered()
        scheduler.send(plan=decode_plan(2))
        scheduler.accept(epoch=2)
        scheduler.send(plan=first_plan(1))
        until(lambda: running.worker._session is not None and running.worker._session.window.num_running == 1)
        for _ in range(2):
            runner.gate.release()
        result = scheduler.receive("result")
        assert (result.epoch, result.result.step_id) == (2, 1)
        assert runner.num_forwards == 2
        assert running.stale("result_of_old_epoch") == 1


def test_a_silent_scheduler_is_left_and_greeted_again() -> None:
    with RunningWorker() as running:
        scheduler = running.scheduler
        scheduler.start(epoch=7, lease_ms=300)
        scheduler.step(first_plan(1))
        hello = scheduler.receive("hello")
        assert hello.epoch == 7  # so that a scheduler whose clock went back starts above it
        scheduler.accept(epoch=8)
        result = scheduler.step(first_plan(1))
        assert ids_of(result.token_ids) == greedy_continuation(PROMPT, 1)


def test_heartbeats_of_the_scheduler_keep_the_session() -> None:
    with RunningWorker() as running:
        scheduler = running.scheduler
        scheduler.start(epoch=7, lease_ms=400)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            scheduler.send(heartbeat=pb.Heartbeat())
            scheduler.receive("heartbeat")
        assert scheduler.others == []  # no second hello


def test_no_answer_to_a_hello_brings_another() -> None:
    with RunningWorker() as running:
        first = running.scheduler.receive("hello")
        second = running.scheduler.receive("hello")
        assert second.hello == first.hello


def test_a_rejected_executor_exits_with_a_failure() -> None:
    with RunningWorker() as running:
        running.scheduler.receive("hello")
        running.scheduler.send(reject=pb.Reject(reason="model fingerprint differs"))
        assert running.join() is Exit.FAILED


def test_a_rejected_executor_may_stay() -> None:
    options = WorkerOptions(exit_after_reject=False)
    with RunningWorker(options=options) as running:
        running.scheduler.receive("hello")
        running.scheduler.send(reject=pb.Reject(reason="too many executors"))
        running.scheduler.start(epoch=1)
        running.scheduler.receive("heartbeat")


def test_an_unknown_protocol_is_a_failure() -> None:
    with RunningWorker() as running:
        scheduler = running.scheduler
        scheduler.receive("hello")
        scheduler.channel.open(5)
        scheduler.send(session_start=pb.SessionStart(chosen_protocol=2))
        assert running.join() is Exit.FAILED


def test_goodbye_of_the_scheduler_drops_the_session() -> None:
    with RunningWorker() as running:
        running.scheduler.start(epoch=1)
        running.scheduler.send(goodbye=pb.Goodbye(reason="drained"))
        assert running.scheduler.start(epoch=2).incarnation == "1"


def test_stop_finishes_the_running_step_and_takes_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other, however late the loop comes to see that it shall stop."""
    check_end = Worker._check_end

    def late(worker: Worker) -> None:
        time.sleep(0.05)
        check_end(worker)

    monkeypatch.setattr(Worker, "_check_end", late)
    runner = GatedRunner()
    with RunningWorker(Bench(runner)) as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1)
        scheduler.send(plan=first_plan(1))
        scheduler.send(plan=decode_plan(2))
        runner.wait_entered()
        until(lambda: running.worker._compute.num_queued == 1)
        running.worker.stop()
        runner.gate.release()
        assert scheduler.receive("result").result.step_id == 1
        assert scheduler.receive("goodbye", "result").WhichOneof("body") == "goodbye"
        assert running.join() is Exit.STOPPED
        assert runner.num_forwards == 1


def test_a_plan_that_waited_beyond_its_deadline_fails() -> None:
    runner = GatedRunner()
    with RunningWorker(Bench(runner)) as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1)
        scheduler.send(plan=first_plan(1))
        runner.wait_entered()
        late = decode_plan(2)
        late.deadline_ms = 1
        scheduler.send(plan=late)
        until(lambda: running.worker._compute.num_queued == 1)
        arrived = time.monotonic()
        until(lambda: time.monotonic() - arrived > 0.01)
        runner.gate.release()
        assert scheduler.receive("result").result.status == pb.STEP_STATUS_OK
        assert scheduler.receive("result").result.status == pb.STEP_STATUS_FAILED
        assert runner.num_forwards == 1


@pytest.mark.parametrize(
    "frame", [b"", b"garbage", b"\xff" * 100, pb.ExecutorEnvelope(protocol=1, epoch=9).SerializeToString()]
)
def test_garbage_is_counted_and_nothing_else(frame: bytes) -> None:
    with RunningWorker() as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1)
        scheduler.send_frame(frame)
        assert scheduler.step(first_plan(1)).status == pb.STEP_STATUS_OK
        assert running.stale("malformed") == 1


def test_messages_that_make_no_sense_here_are_counted() -> None:
    with RunningWorker() as running:
        scheduler = running.scheduler
        scheduler.start(epoch=1)
        scheduler.send(result=pb.StepResult(step_id=1))
        scheduler.send(nack=pb.Nack(last_step_id=3))
        scheduler.send(reject=pb.Reject(reason="late"))
        assert scheduler.step(first_plan(1)).status == pb.STEP_STATUS_OK
        assert [running.stale(kind) for kind in ("unexpected_result", "unexpected_nack", "reject")] == [1, 1, 1]


def test_heartbeats_tell_that_a_model_is_loading() -> None:
    hub = LoopbackHub()
    link = hub.connect(PeerId(b"executor/test/1"))
    work: Future[str] = Future()
    loaded: list[str] = []
    state = pb.EXECUTOR_STATE_LOADING
    thread = threading.Thread(target=lambda: loaded.append(_beating(link, state, work)), daemon=True)
    thread.start()
    frames: list[bytes] = []

    def two_came() -> bool:
        if (item := hub.recv()) is not None:
            frames.append(item[1])
        return len(frames) == 2

    until(two_came)
    work.set_result("model")
    thread.join(DEADLINE_S)
    assert loaded == ["model"]
    for frame in frames:
        envelope = Channel(pb.ExecutorEnvelope).unpack(frame)
        assert envelope is not None
        assert (envelope.epoch, envelope.heartbeat.state) == (0, state)
    link.close()
    hub.close()
