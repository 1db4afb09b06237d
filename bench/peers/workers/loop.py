"""What every peer's process does around its engine. The standard library only: it runs in the peer's own environment.

Reads lines {"requests": [[ids, n_out, at or null], …]} from standard input; a request is handed to the engine when it
is due. Answers {"sent": […], "arrivals": [[[time, tokens], …], …]}, seconds from the turn's start. The first line
written is {"about": {…}}, once the model is loaded. Whatever else libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO


@dataclass(frozen=True)
class Job:
    """A request of the turn: continue `ids` by exactly `n_out` tokens, greedily."""

    index: int
    ids: Sequence[int]
    n_out: int


Arrival = tuple[int, float, int]
"""Index of the request, when (time.perf_counter), how many tokens."""


class Engine(Protocol):
    """A peer. Its tokens need not be looked at, only counted; end-of-sequence does not end a request."""

    def add(self, job: Job) -> None:
        """Queue a request; nothing runs before the next `step`."""

    def step(self) -> list[Arrival]:
        """Run the engine's smallest unit of work and return what has arrived."""

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""


def main(load: Callable[[dict[str, Any]], tuple[Engine, dict[str, Any]]]) -> None:
    """The whole process. `load` takes the options of argv[1] (JSON) and gives the engine, and what to say about it."""
    answers = _own_stdout()
    engine, about = load(json.loads(sys.argv[1]))
    _write(answers, {"about": about})
    for line in sys.stdin:
        _write(answers, turn(engine, json.loads(line)["requests"]))


def turn(
    engine: Engine,
    requests: Sequence[tuple[Sequence[int], int, float | None]],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Run the requests to their ends."""
    start = clock()
    waiting = sorted(
        (Job(index, ids, n_out) for index, (ids, n_out, _) in enumerate(requests)),
        key=lambda job: (requests[job.index][2] or 0.0, job.index),
    )
    sent = [requests[index][2] or 0.0 for index in range(len(requests))]
    arrivals: list[list[tuple[float, int]]] = [[] for _ in requests]
    while waiting or engine.busy:
        while waiting and sent[waiting[0].index] <= clock() - start:
            engine.add(waiting.pop(0))
        if not engine.busy:
            sleep(max(0.0, sent[waiting[0].index] - (clock() - start)))
            continue
        for index, at, count in engine.step():
            arrivals[index].append((at - start, count))
    return {"sent": sent, "arrivals": arrivals}


def _own_stdout() -> TextIO:
    """Where answers go; what is printed to standard output from now on goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _write(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
