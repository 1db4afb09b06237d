"""Runs the commands of a transcript and prints step plans and events so that a person can follow them.

A transcript is a list of blocks: commands, a line of dashes, what they printed, an empty line. `#` starts a comment.

    config KEY=VALUE ...        makes a scheduler (fields of SchedulerConfig); clears everything
    executor KEY=VALUE ...      attaches an executor (fields of ExecutorLimits; the rest has defaults)
    detach                      the executor is gone
    submit NAME prompt=N max_tokens=N [stop=ID] [priority=N] [deadline=S] [queue_deadline=S] [group=N] [emitted=N]
    preempt NAME ACTION         has it give up its blocks: swap, recompute or tail
    cancel NAME
    advance SECONDS             lets time pass and calls expire
    schedule                    makes one plan
    apply [NAME=ID ...]         gives the oldest plan's result back; tokens are 100, 101, ... unless given
    apply failed | apply error=NAME
    run N                       N times: plan as deep as allowed, then apply one
    stats                       queue, running, blocks

Plans name sequences instead of lanes: `a:6` is a row of 6 tokens, `a` one of a single token, `a+3` block 3 appended to
a's table. A row in brackets samples no token.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from scheduler_svc.core.events import Event, FinishedEvent
from scheduler_svc.core.params import ExecutorLimits, SchedulerConfig, SeqId, SequenceSpec
from scheduler_svc.core.plan import NO_TOKEN, RowErrorCode, StepPlan, StepResult, StepStatus
from scheduler_svc.core.preemption import Action
from scheduler_svc.core.scheduler import Scheduler

_EXECUTOR = {
    "block_size": 4,
    "num_device_blocks": 16,
    "max_rows": 8,
    "max_tokens": 64,
    "num_lanes": 24,
    "max_model_len": 64,
}


PLAIN = SchedulerConfig(prefix_cache=False, growth_reserve=0.0)
"""Where a transcript is not about caching and reserving: prompts of a transcript are prefixes of each other."""


class _Lane:
    def __init__(self, name: str, num_tokens: int, position: int) -> None:
        self.name = name
        self.num_tokens = num_tokens
        self.position = position


class Interpreter:
    """State between the blocks of one transcript."""

    def __init__(self) -> None:
        self.reset(PLAIN)

    def reset(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.names: dict[SeqId, str] = {}
        self.num_outputs: dict[str, int] = {}
        self.lanes: dict[int, _Lane] = {}
        self.batch: list[int] = []
        self.inflight: deque[tuple[StepPlan, list[str], list[bool]]] = deque()
        self.now = 0.0

    def run_block(self, commands: list[str]) -> list[str]:
        """What the commands print."""
        lines: list[str] = []
        for command in commands:
            verb, *arguments = command.split()
            lines += getattr(self, f"do_{verb}")(*arguments)
            lines += [f"BROKEN: {problem}" for problem in self.scheduler.check_invariants()]
        return lines or ["ok"]

    def do_config(self, *arguments: str) -> list[str]:
        config = PLAIN
        for key, text in (argument.split("=") for argument in arguments):
            kind = type(getattr(config, key))
            config = dataclasses.replace(config, **{key: kind(int(text)) if kind is bool else kind(text)})
        self.reset(config)
        return []

    def do_executor(self, *arguments: str) -> list[str]:
        given = dict(argument.split("=") for argument in arguments)
        values = _EXECUTOR | {key: float(text) if key.endswith("_per_s") else int(text) for key, text in given.items()}
        self._forget()
        limits = ExecutorLimits(**values)  # type: ignore[arg-type]
        return self._events(self.scheduler.attach_executor(limits, self.now))

    def do_detach(self) -> list[str]:
        self._forget()
        return self._events(self.scheduler.detach_executor(self.now))

    def do_submit(self, name: str, *arguments: str) -> list[str]:
        values = dict(argument.split("=") for argument in arguments)
        seq_id = SeqId(len(self.names) + 1)
        self.names[seq_id] = name
        self.num_outputs[name] = int(values.get("emitted", 0))
        spec = SequenceSpec(
            seq_id,
            prompt_ids=list(range(1, int(values["prompt"]) + 1)),
            max_tokens=int(values["max_tokens"]),
            stop_token_ids=frozenset({int(values["stop"])} if "stop" in values else ()),
            priority=int(values.get("priority", 0)),
            emitted_ids=[100 + index for index in range(self.num_outputs[name])],
            arrival=self.now,
            deadline=self._later(values.get("deadline")),
            queue_deadline=self._later(values.get("queue_deadline")),
            group=int(values.get("group", 0)),
        )
        refusal = self.scheduler.submit(spec, self.now)
        return [f"{name} refused: {refusal.reason.name}: {refusal.message}"] if refusal else []

    def do_preempt(self, name: str, action: str) -> list[str]:
        seq_id = next(seq_id for seq_id, other in self.names.items() if other == name)
        assert self.scheduler.preempt(seq_id, Action(action))
        return []

    def do_cancel(self, name: str) -> list[str]:
        seq_id = next(seq_id for seq_id, other in self.names.items() if other == name)
        return self._events(self.scheduler.cancel(seq_id, self.now))

    def do_advance(self, seconds: str) -> list[str]:
        self.now += float(seconds)
        return self._events(self.scheduler.expire(self.now))

    def do_schedule(self) -> list[str]:
        plan = self.scheduler.schedule(self.now)
        return ["no plan"] if plan is None else [self._mirror(plan)]

    def do_apply(self, *arguments: str) -> list[str]:
        plan, names, samples = self.inflight.popleft()
        if arguments == ("failed",):
            self._forget()
            return self._events(self.scheduler.apply(StepResult(plan.step_id, [], None, StepStatus.FAILED), self.now))
        given = dict(argument.split("=") for argument in arguments)
        broken = given.pop("error", None)
        errors = {names.index(broken): RowErrorCode.NUMERICAL} if broken else {}
        tokens = [
            self._token(name, given) if sampled and row not in errors else NO_TOKEN
            for row, (name, sampled) in enumerate(zip(names, samples, strict=True))
        ]
        status = StepStatus.ROW_ERRORS if errors else StepStatus.OK
        copied = (plan.step_id,) if plan.swap_out_src or plan.swap_in_src else ()
        result = StepResult(plan.step_id, tokens, None, status, errors, copied)
        events = self.scheduler.apply(result, self.now)
        return [f"result {plan.step_id}", *self._events(events)]

    def do_run(self, count: str) -> list[str]:
        lines: list[str] = []
        for _ in range(int(count)):
            while (plan := self.scheduler.schedule(self.now)) is not None:
                lines.append(self._mirror(plan))
            if self.inflight:
                lines += self.do_apply()
        return lines

    def do_stats(self) -> list[str]:
        s = self.scheduler.stats()
        line = (
            f"queue {s.queue_requests} ({s.queue_tokens} tokens, {s.preempted} preempted), running {s.running}, "
            f"in flight {s.inflight_plans}; blocks: {s.blocks_free} free, {s.blocks_used} used, "
            f"{s.blocks_in_flight} in flight, {s.blocks_reserved} reserved; preemptions {s.num_preemptions_total}"
        )
        if self.scheduler.config.prefix_cache:
            line += (
                f"; {s.blocks_cached} cached, {s.prefix_hit_tokens_total} of {s.prefix_query_tokens_total} tokens hit"
            )
        if s.host_blocks_total:
            line += (
                f"; host: {s.host_blocks_free} free, {s.host_blocks_used} used, {s.host_blocks_cached} cached, "
                f"{s.swapped_out_blocks_total} out, {s.swapped_in_blocks_total} in"
            )
        return [line]

    def _later(self, seconds: str | None) -> float | None:
        return None if seconds is None else self.now + float(seconds)

    def _token(self, name: str, given: dict[str, str]) -> int:
        self.num_outputs[name] += 1
        return int(given.get(name, 99 + self.num_outputs[name]))

    def _forget(self) -> None:
        self.lanes.clear()
        self.batch = []
        self.inflight.clear()

    def _mirror(self, plan: StepPlan) -> str:
        """Applies the plan to the lanes as an executor does, and says it in words."""
        parts = []
        if plan.release_lanes:
            parts.append("release " + " ".join(self.lanes.pop(lane).name for lane in plan.release_lanes))
        for verb in ("swap_out", "swap_in"):
            pairs = zip(getattr(plan, f"{verb}_src"), getattr(plan, f"{verb}_dst"), strict=True)
            words = [f"{src}→{dst}" for src, dst in pairs]
            parts += [f"{verb} " + " ".join(words)] * bool(words)
        for admit in plan.admit:
            # Lanes carry no ids, as on the wire: the sequence is the one that the scheduler says runs there.
            lane_of = {seq.lane: seq.seq_id for seq in self.scheduler._sequences.values()}
            name = self.names[lane_of[admit.lane]]
            self.lanes[admit.lane] = _Lane(name, len(admit.token_ids), admit.num_cached_tokens)
            blocks = " ".join(map(str, admit.block_ids))
            tokens = f"{len(admit.token_ids)} tokens"
            if admit.num_cached_tokens:
                tokens += f", {admit.num_cached_tokens} cached"
            parts.append(f"admit {name} (lane {admit.lane}.{admit.generation}, {tokens}, blocks {blocks})")
        if plan.append_lanes:
            appends = zip(plan.append_lanes, plan.append_block_ids, strict=True)
            parts.append("append " + " ".join(f"{self.lanes[lane].name}+{block_id}" for lane, block_id in appends))
        if not plan.repeat_decode:
            self.batch = plan.row_lanes
        parts.append(self._rows(plan))
        return f"step {plan.step_id}: " + "; ".join(part for part in parts if part)

    def _rows(self, plan: StepPlan) -> str:
        counts = plan.row_num_tokens or [1] * len(self.batch)
        names, samples, words = [], [], []
        for lane_id, count in zip(self.batch, counts, strict=True):
            lane = self.lanes[lane_id]
            lane.position += count
            sampled = lane.position == lane.num_tokens
            lane.num_tokens += sampled
            word = lane.name if count == 1 else f"{lane.name}:{count}"
            names.append(lane.name)
            samples.append(sampled)
            words.append(word if sampled else f"[{word}]")
        self.inflight.append((plan, names, samples))
        if not words:
            return ""
        return ("repeat " if plan.repeat_decode else "rows ") + " ".join(words)

    def _events(self, events: list[Event]) -> list[str]:
        lines = []
        for event in events:
            if isinstance(event, FinishedEvent):
                lines.append(
                    f"  {self.names[event.seq_id]} ends: {event.reason.value}, {event.num_output_tokens} tokens, "
                    f"{event.num_computed_tokens} prefilled, {event.num_preemptions} preemptions"
                )
                continue
            columns = zip(event.seq_ids, event.first_index, event.token_ids, strict=True)
            words = " ".join(f"{self.names[seq_id]}[{index}]={token}" for seq_id, index, token in columns)
            lines.append(f"  tokens to {event.group}: {words}")
        return lines
