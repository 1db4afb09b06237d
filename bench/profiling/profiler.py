"""Timers around what an executor's step calls. The names the product looks up are replaced, in this process only.

Kernels of the compiled library are labelled `pm_NAME`, whatever functions it has; operators of torch by the table in
`install`. What a step does outside of all these is the interpreter and small tensor operations.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import executor_svc.runner
import executor_svc.step
from bench.profiling.clock import CallCost, LabelClock, measure_cost, timed
from executor_svc.attention import sdpa
from executor_svc.compute import ComputeThread, Work
from executor_svc.native import library as native

UNTIMED = {"path", "num_threads", "pack_linear"}
"""Fields of the library that no step spends time in."""


class Profiler:
    """Replaces what a step calls, and keeps one record per step."""

    def __init__(self) -> None:
        self.clock = LabelClock()
        self.steps: list[dict[str, Any]] = []
        self.costs: dict[str, CallCost] = {}

    def install(self) -> None:
        """Put the timers in place, before the model is loaded."""
        runner: Any = executor_svc.runner
        step: Any = executor_svc.step
        operators: Any = torch.ops.mkldnn
        load = runner.load_library
        runner.load_library = lambda: self._timed_library(load())
        functional = torch.nn.functional
        for name, label in (("linear", "torch_linear"), ("rms_norm", "torch_rms_norm"), ("silu", "torch_silu")):
            setattr(functional, name, timed(getattr(functional, name), label, self.clock))
        operators._linear_pointwise = _Packet(operators._linear_pointwise, "onednn_linear", self.clock)
        sdpa.SdpaStep.attend = timed(sdpa.SdpaStep.attend, "torch_attend", self.clock)  # type: ignore[method-assign]
        step.argmax_rows = timed(step.argmax_rows, "argmax_rows", self.clock)
        step.Sampler.choose = timed(step.Sampler.choose, "choose", self.clock)
        self._wrap_steps()

    def write(self, path: Path) -> None:
        """Everything that was recorded, as JSON."""
        costs = {label: dataclasses.asdict(cost) for label, cost in self.costs.items()}
        plain = dataclasses.asdict(measure_cost(int, ()))
        path.write_text(json.dumps({"steps": self.steps, "costs": costs, "timer": plain}))

    def _timed_library(self, library: native.Library) -> native.Library:
        """The same kernels with timers, whatever functions this version has."""
        dll = ctypes.CDLL(str(library.path))
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(library):
            function = getattr(library, field.name)
            argtypes = getattr(function, "argtypes", None)
            if field.name in UNTIMED or field.name.startswith("_") or not argtypes:
                continue
            label = f"pm_{field.name}"
            # A function that ignores its arguments, called as if it had these: all that is left is ctypes.
            nothing = ctypes.CFUNCTYPE(function.restype, *argtypes)(("pm_abi", dll))
            cost = measure_cost(nothing, tuple(_sample(kind) for kind in argtypes))
            if field.name == "run":
                labels = {kind: f"{label}_{kind.name.lower()}" for kind in native.CallKind}
                by_kind = {kind: timed(function, name, self.clock) for kind, name in labels.items()}
                changes[field.name] = functools.partial(_one_by_one, by_kind)
                self.costs.update(dict.fromkeys(labels.values(), cost))
            else:
                changes[field.name] = timed(function, label, self.clock)
                self.costs[label] = cost
        return dataclasses.replace(library, **changes)

    def _wrap_steps(self) -> None:
        run: Any = ComputeThread._run
        last_end = [time.perf_counter_ns()]

        def run_timed(thread: ComputeThread, work: Work) -> None:
            begin = time.monotonic()
            self.clock.begin()
            idle_ns = self.clock.since - last_end[0]
            run(thread, work)
            self.clock.end()
            last_end[0] = self.clock.since
            self.steps.append(
                {
                    "begin": begin,
                    "end": time.monotonic(),
                    "idle_ns": idle_ns,
                    "rows": work.num_rows,
                    "tokens": work.num_tokens,
                    "ns": self.clock.nanoseconds,
                    "calls": self.clock.calls,
                }
            )

        setattr(ComputeThread, "_run", run_timed)  # noqa: B010 (what mypy would not let pass)


def _one_by_one(by_kind: Mapping[native.CallKind, Callable[..., int]], calls: Any, num_calls: int, step: Any) -> int:
    """`Library.run`, a call at a time, each under its own label: the interpreter's part is a little larger so."""
    for call in calls[:num_calls]:
        done = by_kind[call.kind](ctypes.byref(call), 1, step)
        if done != 0:
            return done
    return 0


class _Packet:
    """An operator of torch with one overload that is looked up on it."""

    def __init__(self, packet: Any, label: str, clock: LabelClock) -> None:
        self._call = timed(packet, label, clock)
        self.binary = timed(packet.binary, label, clock)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


def _sample(kind: Any) -> Any:
    """An argument of this type, converted the way the product's own are."""
    if kind is ctypes.c_void_p:
        return 1 << 32
    return 1.0 if kind in (ctypes.c_float, ctypes.c_double) else b"x" if kind is ctypes.c_char_p else 1
