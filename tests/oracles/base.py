"""What all oracle executors share: the session, the mirror of lanes, the order of a plan, and slowness as chosen.

Single-threaded and non-blocking: `poll` does what is due now. `run` polls until told to stop, in a thread or process.
A plan runs in two halves: `begin` applies its state operations and queues its copies (`copies`), `step` runs the batch
when the copies that it depends on have happened. Other copies go on behind it, as late as `lateness` or `Pace` says.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagemill.columns import pack, unpack
from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.framing import PROTOCOL, Channel
from pagemill.links import PeerLink, SendOutcome
from tests.oracles.copies import BlockCopy, CopyQueue, copies_of

KEPT_RESULTS = 4
MAX_VIOLATIONS = 100
FINGERPRINT = "oracle-model"


@dataclass
class Geometry:
    """What the hello says."""

    block_size: int = 8
    num_blocks: int = 64
    max_rows: int = 64
    max_tokens: int = 256
    num_lanes: int = 192
    max_model_len: int = 512
    vocab_size: int = 1000
    fingerprint: str = FINGERPRINT
    kv_dtype: str = "none"
    num_host_blocks: int = 0
    bytes_per_block: int = 1
    swap_out_bytes_per_s: float = 0.0
    swap_in_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


@dataclass
class Pace:
    """How long a step and a copied block take, in seconds, beside the `step_s` of every step."""

    token_s: float = 0.0
    row_s: float = 0.0
    copy_block_s: float | None = None
    """None: copies take no time but are `lateness` steps late."""


@dataclass
class Lane:
    """Mirror of one sequence: `position` positions of `tokens` are computed."""

    lane: int
    generation: int
    tokens: list[int]
    num_prompt: int
    blocks: list[int]
    position: int
    seed: int
    choice: int
    stop_ids: frozenset[int]
    min_tokens: int
    touched_step: int
    """Last plan that admitted it, gave it blocks or ran it."""
    num_cached_blocks: int = 0
    """Leading blocks that had content when it was admitted."""
    chain: list[int] = field(default_factory=list)
    """For oracles that check blocks: the digest that each position must have."""
    is_broken: bool = False
    """A row of it failed: the scheduler may not know yet and run it once more."""

    def forbidden(self) -> frozenset[int]:
        """Ids that may not be chosen next."""
        return self.stop_ids if len(self.tokens) - self.num_prompt < self.min_tokens else frozenset()


@dataclass
class Reply:
    """What a step gave, before it is a message. `runs[i]` are the ids of row i; empty: none."""

    runs: list[list[int]] = field(default_factory=list)
    errors: dict[int, pb.RowErrorCode] = field(default_factory=dict)
    failed: bool = False


class OracleExecutor:
    """Base class; subclasses say what a row gives (`next_ids`) and may watch operations."""

    def __init__(
        self,
        link: PeerLink,
        geometry: Geometry | None = None,
        *,
        delay_in_s: float = 0.0,
        delay_out_s: float = 0.0,
        step_s: float = 0.0,
        pace: Pace | None = None,
        heartbeat_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = link
        self.geometry = geometry or Geometry()
        self.delay_in_s, self.delay_out_s, self.step_s = delay_in_s, delay_out_s, step_s
        self.pace = pace or Pace()
        self.clock = clock
        self.copies = CopyQueue(self.perform)
        self.lateness: Callable[[int], int] = lambda step_id: 0
        """Steps by which the copies of a plan are late, unless something must wait for them. 0: done with the step."""
        self.waits_for_copies = True
        """False: the fence between copies and the batch is missing, as a control that tests see it."""
        self.fault: Callable[[Lane], pb.RowErrorCode | None] = lambda lane: None
        """Whether a row of this lane fails now, leaving garbage where it wrote."""
        self.channel: Channel[pb.ExecutorEnvelope] = Channel(pb.ExecutorEnvelope)
        self.lanes: dict[int, Lane] = {}
        self.generations: dict[int, int] = {}
        self.last_batch: list[int] = []
        self.violations: list[str] = []
        self.rejected: str | None = None
        self.left = False
        self.silent = False
        """A hung main loop: frames are not read and nothing is sent."""
        self.num_steps = 0
        self.num_sessions = 0
        self.max_plans_waiting = 0
        self._heartbeat_s = heartbeat_s
        self._incarnation = secrets.token_hex(8)
        self._expected_step = 0
        self._nacked = 0
        self._results: deque[tuple[int, pb.StepResult]] = deque(maxlen=KEPT_RESULTS)
        self._inbound: deque[tuple[float, bytes]] = deque()
        self._work: deque[pb.ExecutorEnvelope] = deque()
        self._order = itertools.count()
        self._outbound: list[tuple[float, int, dict[str, object]]] = []
        self._busy_until = 0.0
        self._busy_since = 0.0
        self._done: tuple[pb.ExecutorEnvelope, float] | None = None
        self._begun = 0
        self.num_digests = 0
        """Plans whose digest was compared."""
        self._odd_digest: int | None = None
        self._needed: BlockCopy | None = None
        self._next_heartbeat = 0.0
        self._last_heard = clock()
        self._lease_s = 2.0
        self._said_hello = False

    # Running

    def run(self, stop: threading.Event) -> None:
        """Poll until `stop`, a rejection or the scheduler's goodbye."""
        while not (stop.is_set() or self.rejected or self.left):
            if not self.poll():
                frame = self.link.recv(0.002 if self.delay_in_s or self.delay_out_s or self.step_s else 0.02)
                if frame is not None:
                    self._inbound.append((self.clock() + self.delay_in_s, frame))

    def start_thread(self) -> tuple[threading.Thread, threading.Event]:
        """`run` in a daemon thread, and the event that ends it."""
        stop = threading.Event()
        thread = threading.Thread(target=self.run, args=(stop,), daemon=True)
        thread.start()
        return thread, stop

    def poll(self) -> bool:
        """Do what is due now; whether anything was."""
        if self.silent:
            return False
        now = self.clock()
        busy = self._receive(now)
        busy |= self._compute(now)
        if not self._said_hello or now - self._last_heard > self._lease_s:
            self._say_hello(now)
        elif now >= self._next_heartbeat and self.channel.epoch:
            self._heartbeat(now)
        return self._send_due(now) or busy

    def _receive(self, now: float) -> bool:
        while (frame := self.link.recv()) is not None:
            self._inbound.append((now + self.delay_in_s, frame))
        busy = False
        while self._inbound and self._inbound[0][0] <= now:
            _, frame = self._inbound.popleft()
            envelope = self.channel.unpack(frame)
            if envelope is not None:
                self._last_heard = now
                self._handle(envelope, now)
            busy = True
        return busy

    def _handle(self, envelope: pb.ExecutorEnvelope, now: float) -> None:
        body = envelope.WhichOneof("body")
        if body == "session_start":
            self._start(envelope, now)
        elif body == "reject":
            self.rejected = envelope.reject.reason
        elif body == "goodbye":
            self.left = True
        elif body == "plan" and envelope.epoch == self.channel.epoch:
            self._on_plan(envelope)

    def _start(self, envelope: pb.ExecutorEnvelope, now: float) -> None:
        self.channel.open(envelope.epoch)
        self.channel.received_seq = envelope.seq
        self.new_session()
        self._work.clear()
        self._results.clear()
        self._outbound.clear()
        self._done = None
        self._expected_step = envelope.session_start.first_step_id
        self._nacked = 0
        self._lease_s = envelope.session_start.lease_ms / 1000
        self._next_heartbeat = now

    def new_session(self) -> None:
        """All lanes are void, and nothing of earlier plans happens any more."""
        self.lanes.clear()
        self.generations.clear()
        self.on_session_over()
        self.copies.clear()
        self.last_batch = []
        self.num_sessions += 1
        self.on_session()

    def _on_plan(self, envelope: pb.ExecutorEnvelope) -> None:
        step_id = envelope.plan.step_id
        if step_id < self._expected_step:
            for kept_id, result in self._results:
                if kept_id == step_id:
                    for copy in self.results_to_send(result):
                        self._queue(result=copy)
        elif step_id > self._expected_step:
            if self._nacked != self._expected_step:  # one for each gap
                self._nacked = self._expected_step
                self._queue(nack=pb.Nack(last_step_id=self._expected_step - 1))
        else:
            self._expected_step += 1
            self._work.append(envelope)
            self.max_plans_waiting = max(self.max_plans_waiting, len(self._work) + (self._done is not None))

    def _compute(self, now: float) -> bool:
        busy = False
        while self._work or self._done:
            if self._done is None:
                envelope = self._work.popleft()
                self._busy_since = max(now, self._busy_until)
                ready_at = self.begin(envelope, self._busy_since)
                self._busy_until = ready_at + self._step_time(envelope.plan)
                self._done = (envelope, self._busy_until)
            envelope, done_at = self._done
            if done_at > now:
                return busy
            self._done = None
            busy = True
            self._finish(envelope)
        return busy

    def _step_time(self, plan: pb.StepPlan) -> float:
        rows, counts = self._rows(plan)
        return self.step_s + self.pace.token_s * sum(counts) + self.pace.row_s * len(rows)

    def _finish(self, envelope: pb.ExecutorEnvelope) -> None:
        self.num_steps += 1
        result = self.step(envelope)
        self._results.append((result.step_id, result))
        for copy in self.results_to_send(result):
            self._queue(result=copy)

    def _queue(self, **body: object) -> None:
        heapq.heappush(self._outbound, (self.clock() + self.delay_out_s, next(self._order), body))

    def _send_due(self, now: float) -> bool:
        busy = False
        while self._outbound and self._outbound[0][0] <= now:
            _, order, body = heapq.heappop(self._outbound)
            frame = self.channel.pack(**body)
            if "result" in body:
                self.on_result_sent(body["result"], self.channel.sent_seq)  # type: ignore[arg-type]
            if self.link.send(frame) is SendOutcome.FULL:
                self.channel.sent_seq -= 1
                heapq.heappush(self._outbound, (now, order, body))
                return busy
            busy = True
        return busy

    def hello(self) -> pb.ExecutorHello:
        """What it says about itself."""
        geometry = self.geometry
        return pb.ExecutorHello(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            version="0",
            incarnation=self._incarnation,
            host="test",
            device="oracle",
            world_size=1,
            model_fingerprint=geometry.fingerprint,
            dtype="none",
            kv_dtype=geometry.kv_dtype,
            block_size=geometry.block_size,
            num_device_blocks=geometry.num_blocks,
            num_host_blocks=geometry.num_host_blocks,
            bytes_per_block=geometry.bytes_per_block,
            swap_out_bytes_per_s=geometry.swap_out_bytes_per_s,
            swap_in_bytes_per_s=geometry.swap_in_bytes_per_s,
            prefill_tokens_per_s=geometry.prefill_tokens_per_s,
            max_rows=geometry.max_rows,
            max_tokens=geometry.max_tokens,
            num_lanes=geometry.num_lanes,
            max_model_len=geometry.max_model_len,
            vocab_size=geometry.vocab_size,
        )

    def _say_hello(self, now: float) -> None:
        if self.link.send(self.channel.pack(hello=self.hello())) is SendOutcome.SENT:
            self._said_hello = True
            self._last_heard = now

    def _heartbeat(self, now: float) -> None:
        self._next_heartbeat = now + self._heartbeat_s
        running = self._done is not None
        state = pb.EXECUTOR_STATE_RUNNING if running else pb.EXECUTOR_STATE_IDLE
        since_ms = max(0, round((now - self._busy_since) * 1000)) if running else 0
        last = self._results[-1][0] if self._results else 0
        self._queue(heartbeat=pb.Heartbeat(state=state, last_step_id=last, since_ms=min(since_ms, 2**31)))

    # One step

    def begin(self, envelope: pb.ExecutorEnvelope, now: float) -> float:
        """The first half of a plan: state operations in their order; when the batch may start at the earliest."""
        plan = envelope.plan
        self._begun = plan.step_id
        self._odd_digest = None
        if plan.HasField("state_digest"):
            self.num_digests += 1
            digest = self.digest()
            if digest is not None and digest != plan.state_digest:
                self.violation(f"step {plan.step_id} expects lanes of digest {plan.state_digest:#x}, not {digest:#x}")
                self._odd_digest = digest
                return now
        for lane in unpack(plan.release_lanes):
            self._release(lane, plan.step_id)
        self._rewind(plan)
        for copy in self._queue_copies(plan, now):
            self.on_copy_planned(copy, envelope)
        for admit in plan.admit:
            self._admit(admit, envelope)
        self._append(plan, envelope)
        self._needed = self._needed_copy(plan)
        is_timed = self.pace.copy_block_s is not None and self._needed is not None and self.waits_for_copies
        return max(now, self._needed.due) if is_timed and self._needed is not None else now

    def digest(self) -> int | None:
        """CRC-32 of all lanes (docs/wire.md); None while one is broken."""
        if any(lane.is_broken for lane in self.lanes.values()):
            return None
        numbers: list[int] = []
        for lane in sorted(self.lanes.values(), key=lambda lane: lane.lane):
            numbers += [lane.lane, lane.generation, lane.position, len(lane.blocks), *lane.blocks]
        return zlib.crc32(pack(numbers))

    def step(self, envelope: pb.ExecutorEnvelope) -> pb.StepResult:
        """The second half, behind `begin` or with it: the batch, and the result."""
        plan = envelope.plan
        if self._begun != plan.step_id:
            self.begin(envelope, self.clock())
        if self._odd_digest is not None:
            return pb.StepResult(step_id=plan.step_id, status=pb.STEP_STATUS_FAILED, state_digest=self._odd_digest)
        if self.waits_for_copies:
            self.copies.finish_through(self._needed)
        reply = self._batch(plan)
        self.copies.finish_due(self.clock() if self.pace.copy_block_s is not None else plan.step_id)
        result = self._encode(plan, reply)
        result.finished_copy_steps.extend(self.copies.take_finished())
        return result

    def _rewind(self, plan: pb.StepPlan) -> None:
        columns = (plan.rewind_lanes, plan.rewind_num_tokens, plan.rewind_num_blocks)
        for lane_id, num_tokens, num_blocks in zip(*map(unpack, columns), strict=True):
            lane = self.lanes.get(lane_id)
            fits = lane is not None and num_tokens <= lane.position and num_blocks <= len(lane.blocks)
            if lane is None or not fits or num_tokens > num_blocks * self.geometry.block_size:
                self.violation(f"step {plan.step_id} rewinds lane {lane_id} to {num_tokens} tokens, which does not fit")
                continue
            lane.position = num_tokens
            lane.touched_step = plan.step_id
            dropped, lane.blocks = lane.blocks[num_blocks:], lane.blocks[:num_blocks]
            self.on_unmap(lane, dropped)

    def _queue_copies(self, plan: pb.StepPlan, now: float) -> list[BlockCopy]:
        """The plan's copies, in the queue; the first one's source must be read before the next one is planned."""
        if not (plan.swap_out_src or plan.copy_src or plan.swap_in_src):
            return []
        try:
            copies = copies_of(plan)
        except ValueError as error:
            self.violation(f"step {plan.step_id}: copy columns of unequal length: {error}")
            return []
        if self.pace.copy_block_s is None:
            self.copies.add(copies, plan.step_id + self.lateness(plan.step_id))
        else:
            pending = self.copies.pending
            begin = max(now, pending[-1].due) if pending else now
            self.copies.add(copies, begin + len(copies) * self.pace.copy_block_s)
        return copies

    def _append(self, plan: pb.StepPlan, envelope: pb.ExecutorEnvelope) -> None:
        for lane_id, block in zip(unpack(plan.append_lanes), unpack(plan.append_block_ids), strict=True):
            lane = self.lanes.get(lane_id)
            if lane is None:
                self.violation(f"step {plan.step_id} appends to lane {lane_id}, which is free")
                continue
            lane.blocks.append(block)
            lane.touched_step = plan.step_id
            self.on_map(lane, len(lane.blocks) - 1, envelope)

    def _needed_copy(self, plan: pb.StepPlan) -> BlockCopy | None:
        """The last pending copy that the batch waits for; None when it need not wait.

        Its rows' lanes must have what was copied in for them, and a source that a row writes must have been read. An
        executor promises no more: writing a block that an unfinished copy of others still targets is the scheduler's
        mistake, and shows as one. A plan without rows answers only when every copy has happened.
        """
        pending = self.copies.pending
        if not pending:
            return None
        rows, counts = self._rows(plan)
        if not rows:
            return pending[-1]
        size = self.geometry.block_size
        read: set[int] = set()
        written: set[int] = set()
        for lane_id, count in zip(rows, counts, strict=True):
            lane = self.lanes.get(lane_id)
            if lane is not None:
                read.update(lane.blocks[: lane.num_cached_blocks])
                written.update(lane.blocks[lane.position // size : (lane.position + count - 1) // size + 1])
        for copy in reversed(pending):
            if copy.device_target in read or copy.device_source in written:
                return copy
        return None

    def _rows(self, plan: pb.StepPlan) -> tuple[list[int], list[int]]:
        """Lanes and token counts of the batch."""
        if plan.repeat_decode:
            return self.last_batch, [1] * len(self.last_batch)
        rows = unpack(plan.row_lanes)
        return rows, unpack(plan.row_num_tokens) if plan.row_num_tokens else [1] * len(rows)

    def violation(self, text: str) -> None:
        """Remember that the other side broke a rule; no more than tests can read."""
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(text)

    def _release(self, lane: int, step_id: int) -> None:
        gone = self.lanes.pop(lane, None)
        if gone is None:
            self.violation(f"step {step_id} releases lane {lane}, which is free")
        else:
            self.on_unmap(gone, gone.blocks)
            self.on_release(gone, step_id)

    def _admit(self, admit: pb.Admit, envelope: pb.ExecutorEnvelope) -> None:
        if admit.lane in self.lanes:
            self.violation(f"step {envelope.plan.step_id} admits lane {admit.lane}, which is in use")
        if admit.generation <= self.generations.get(admit.lane, -1):
            self.violation(f"lane {admit.lane} gets generation {admit.generation} again")
        self.generations[admit.lane] = admit.generation
        sampling = admit.sampling
        lane = Lane(
            lane=admit.lane,
            generation=admit.generation,
            tokens=unpack(admit.token_ids),
            num_prompt=admit.num_prompt_tokens,
            blocks=unpack(admit.block_ids),
            position=admit.num_cached_tokens,
            seed=sampling.seed,
            choice=admit.choice_index,
            stop_ids=frozenset(unpack(sampling.stop_token_ids)),
            min_tokens=sampling.min_tokens,
            touched_step=envelope.plan.step_id,
            num_cached_blocks=-(-admit.num_cached_tokens // self.geometry.block_size),
        )
        if lane.position >= len(lane.tokens) or lane.num_cached_blocks > len(lane.blocks):
            self.violation(
                f"step {envelope.plan.step_id} admits lane {admit.lane} with {len(lane.tokens)} tokens, "
                f"{lane.position} cached ones and {len(lane.blocks)} blocks"
            )
        self.lanes[admit.lane] = lane
        self.on_admit(lane, envelope)
        self.on_map(lane, 0, envelope)

    def _batch(self, plan: pb.StepPlan) -> Reply:
        rows, counts = self._rows(plan)
        self.last_batch = rows
        if sum(counts) > self.geometry.max_tokens or len(rows) > self.geometry.max_rows:
            self.violation(f"step {plan.step_id} exceeds the limits of the hello")
        self.before_batch(rows, plan.step_id)
        reply = Reply()
        for row, (lane_id, count) in enumerate(zip(rows, counts, strict=True)):
            lane = self.lanes.get(lane_id)
            slots = 0 if lane is None else len(lane.blocks) * self.geometry.block_size
            if (
                lane is None
                or lane.is_broken
                or not 1 <= count <= len(lane.tokens) - lane.position
                or lane.position + count > slots
            ):
                if lane is None or not lane.is_broken:
                    self.violation(f"step {plan.step_id}: row {row} does not fit lane {lane_id}")
                reply.errors[row] = pb.ROW_ERROR_CODE_BAD_ROW
                reply.runs.append([])
                continue
            lane.touched_step = plan.step_id
            reply.runs.append(self._row(lane, row, count, reply))
        return reply

    def _row(self, lane: Lane, row: int, count: int, reply: Reply) -> list[int]:
        code = self.fault(lane)
        if code is not None:
            self.spoil(lane, lane.position, count)
            reply.errors[row] = code
            lane.is_broken = True
            return []
        self.write(lane, lane.position, count)
        lane.position += count
        if lane.position < len(lane.tokens):
            return []
        found = self.next_ids(lane)
        if isinstance(found, pb.RowError):
            reply.errors[row] = found.code
            lane.is_broken = True
            return []
        for token_id in found[:-1]:  # a run of several: all but the last are computed with it
            lane.tokens.append(token_id)
            self.write(lane, lane.position, 1)
            lane.position += 1
        lane.tokens += found[-1:]
        return found

    def _encode(self, plan: pb.StepPlan, reply: Reply) -> pb.StepResult:
        if reply.failed:
            return pb.StepResult(step_id=plan.step_id, status=pb.STEP_STATUS_FAILED)
        runs = [run or [-1] for run in reply.runs]
        counts = [len(run) for run in runs]
        return pb.StepResult(
            step_id=plan.step_id,
            status=pb.STEP_STATUS_ROW_ERRORS if reply.errors else pb.STEP_STATUS_OK,
            token_ids=pack([token_id for run in runs for token_id in run]),
            num_tokens=pack(counts) if any(count != 1 for count in counts) else b"",
            row_errors=[pb.RowError(row=row, code=code) for row, code in reply.errors.items()],
            execute_us=round(self._step_time(plan) * 1e6),
        )

    # For subclasses

    def next_ids(self, lane: Lane) -> list[int] | pb.RowError:
        """What a row gives that has reached the end of its lane's tokens; at least one id, or an error."""
        raise NotImplementedError

    def write(self, lane: Lane, start: int, count: int) -> None:
        """Positions [start, start + count) of the lane are computed."""

    def spoil(self, lane: Lane, start: int, count: int) -> None:
        """Positions [start, start + count) of the lane hold garbage: its row failed."""

    def on_session_over(self) -> None:
        """All lanes are gone, and copies that have not happened never will."""

    def on_session(self) -> None:
        """A session begins, with nothing in memory."""

    def on_admit(self, lane: Lane, envelope: pb.ExecutorEnvelope) -> None:
        """A lane was taken; its leading `lane.position` positions are computed already."""

    def on_map(self, lane: Lane, first: int, envelope: pb.ExecutorEnvelope) -> None:
        """Blocks from index `first` on came into a lane's table."""

    def on_unmap(self, lane: Lane, blocks: list[int]) -> None:
        """Blocks left a lane's table."""

    def on_release(self, lane: Lane, step_id: int) -> None:
        """A lane was given back."""

    def on_copy_planned(self, copy: BlockCopy, envelope: pb.ExecutorEnvelope) -> None:
        """A copy is in the queue, behind all that came before it in its plan."""

    def perform(self, copy: BlockCopy) -> None:
        """A copy happens now."""

    def before_batch(self, rows: list[int], step_id: int) -> None:
        """All copies that the rows wait for have happened, and no row has run."""

    def on_result_sent(self, result: pb.StepResult, seq: int) -> None:
        """A result leaves under this number."""

    def results_to_send(self, result: pb.StepResult) -> list[pb.StepResult]:
        """What to send for a result: itself."""
        return [result]
