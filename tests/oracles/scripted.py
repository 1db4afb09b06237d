"""The scripted oracle: prescribed ids for prompts, and faults of every kind on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagemill.engine.v1 import executor_pb2 as pb
from pagemill.links import PeerLink
from tests.oracles.base import Lane, OracleExecutor


@dataclass
class Script:
    """What one prompt gives."""

    ids: list[int] = field(default_factory=list)
    """Output ids by index; behind them `filler`."""
    run: int = 1
    """Ids per row."""
    filler: int = 7
    errors: dict[int, pb.RowErrorCode] = field(default_factory=dict)
    """Output index → error of its row, such as NaN logits (NUMERICAL)."""


class ScriptedExecutor(OracleExecutor):
    """`scripts` by prompt. `change_result` may drop, double, hold or replace results; `fail_steps` fail whole."""

    def __init__(self, link: PeerLink, *args: Any, scripts: dict[tuple[int, ...], Script] | None = None, **kw: Any):
        super().__init__(link, *args, **kw)
        self.scripts = scripts or {}
        self.fail_steps: set[int] = set()
        """Plans to fail, counted from 1 over the life of this executor."""
        self.change_result: Callable[[pb.StepResult], list[pb.StepResult]] = lambda result: [result]
        self.drop_plans: set[int] = set()
        """Step ids to lose on their way, once each."""

    def next_ids(self, lane: Lane) -> list[int] | pb.RowError:
        script = self.scripts.get(tuple(lane.tokens[: lane.num_prompt]), Script())
        index = len(lane.tokens) - lane.num_prompt
        if index in script.errors:
            return pb.RowError(code=script.errors[index])
        run = script.run if len(lane.blocks) * self.geometry.block_size >= len(lane.tokens) + script.run else 1
        return [script.ids[i] if i < len(script.ids) else script.filler for i in range(index, index + run)]

    def step(self, envelope: pb.ExecutorEnvelope) -> pb.StepResult:
        result = super().step(envelope)
        if self.num_steps in self.fail_steps:
            return pb.StepResult(step_id=result.step_id, status=pb.STEP_STATUS_FAILED)
        return result

    def _on_plan(self, envelope: pb.ExecutorEnvelope) -> None:
        if envelope.plan.step_id in self.drop_plans:
            self.drop_plans.discard(envelope.plan.step_id)
            return
        super()._on_plan(envelope)

    def results_to_send(self, result: pb.StepResult) -> list[pb.StepResult]:
        return self.change_result(result)
