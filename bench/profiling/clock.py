"""Where one thread's time goes, exactly: at any moment one label is current, and every nanosecond is its own.

`timed` wraps a function so that its label is current while it runs; what it calls under another label is taken out
again. Outside all of them REST is current: the interpreter, small tensor operations, whatever nobody labelled.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

REST = "rest"
NO_THREAD = -1


@dataclass(slots=True)
class LabelClock:
    """`nanoseconds` and `calls` per label since `begin`. Only the thread that called `begin` is watched."""

    nanoseconds: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    current: str = REST
    since: int = 0
    thread: int = NO_THREAD

    def begin(self) -> None:
        """Forget everything and watch this thread from now on."""
        self.nanoseconds, self.calls, self.current = {}, {}, REST
        self.thread = threading.get_ident()
        self.since = time.perf_counter_ns()

    def end(self) -> None:
        """Watch nothing."""
        self.switch(REST)
        self.thread = NO_THREAD

    def switch(self, label: str) -> str:
        """Make `label` current; returns the one before."""
        before, now = self.current, time.perf_counter_ns()
        self.nanoseconds[before] = self.nanoseconds.get(before, 0) + now - self.since
        self.current, self.since = label, now
        return before


def timed(function: Callable[..., Any], label: str, clock: LabelClock) -> Callable[..., Any]:
    """`function` under `label`. It is called so in tracebacks too, and therefore in flame graphs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if clock.thread != threading.get_ident():
            return function(*args, **kwargs)
        before = clock.switch(label)
        try:
            return function(*args, **kwargs)
        finally:
            clock.switch(before)
            clock.calls[label] = clock.calls.get(label, 0) + 1

    named = FunctionType(
        call.__code__.replace(co_name=label, co_qualname=label), globals(), label, None, call.__closure__
    )
    named.__kwdefaults__ = call.__kwdefaults__
    return functools.update_wrapper(named, function, assigned=(), updated=())


@dataclass(frozen=True, slots=True)
class CallCost:
    """Nanoseconds of one call that are not the kernel's own.

    `arguments`: what ctypes takes to convert them, counted under the label but the interpreter's. `timer_inside` and
    `timer_outside`: what the wrapper itself adds under the label and outside of it.
    """

    arguments: float = 0.0
    timer_inside: float = 0.0
    timer_outside: float = 0.0


def measure_cost(nothing: Callable[..., Any], args: tuple[Any, ...], *, repeats: int = 20_000) -> CallCost:
    """The cost of calling `nothing`, a function of the same signature that does nothing, with and without a timer."""
    clock = LabelClock()
    wrapped = timed(nothing, "nothing", clock)
    bare = _best_ns(nothing, args, repeats)
    clock.begin()
    best_outer, best_inner = float("inf"), float("inf")
    for _ in range(5):
        clock.nanoseconds["nothing"] = 0
        outer = _ns_per_call(wrapped, args, repeats // 5)
        if outer < best_outer:
            best_outer, best_inner = outer, clock.nanoseconds["nothing"] / (repeats // 5)
    return CallCost(bare, max(0.0, best_inner - bare), max(0.0, best_outer - max(best_inner, bare)))


def _best_ns(function: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> float:
    empty = min(_ns_per_call(_nothing, (), repeats // 5) for _ in range(5))
    return max(0.0, min(_ns_per_call(function, args, repeats // 5) for _ in range(5)) - empty / 2)


def _ns_per_call(function: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(repeats):
        function(*args)
    return (time.perf_counter_ns() - begin) / repeats


def _nothing() -> None:
    """For the cost of the loop around a call."""
