"""The profiler's own arithmetic: every nanosecond has one label, and what timers and ctypes cost is nobody's kernel."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

from bench.profiling import clock as module
from bench.profiling.breakdown import ATTENTION, GEMM, IDLE, OTHER, PYTHON, ROWS, SAMPLING, breakdown, row_of, within
from bench.profiling.clock import REST, CallCost, LabelClock, measure_cost, timed

FREE = CallCost()


class FakeTime:
    """A clock that stands still but for `pass_by`."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def pass_by(self, ns: int) -> None:
        self.now += ns


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(module, "time", time)
    return time


def test_time_of_a_nested_label_is_taken_out_of_the_outer_one(fake: FakeTime) -> None:
    clock = LabelClock()
    inner = timed(fake.pass_by, "inner", clock)

    def work() -> None:
        fake.pass_by(5)
        inner(70)
        fake.pass_by(5)

    outer = timed(work, "outer", clock)
    clock.begin()
    fake.pass_by(1)
    outer()
    inner(20)
    fake.pass_by(2)
    clock.end()
    assert clock.nanoseconds == {REST: 3, "outer": 10, "inner": 90}
    assert clock.calls == {"outer": 1, "inner": 2}


def test_a_call_that_raises_leaves_the_label_it_found(fake: FakeTime) -> None:
    clock = LabelClock()

    def fails() -> None:
        fake.pass_by(7)
        raise KeyError

    clock.begin()
    with pytest.raises(KeyError):
        timed(fails, "fails", clock)()
    fake.pass_by(3)
    clock.end()
    assert clock.nanoseconds == {"fails": 7, REST: 3}


def test_other_threads_and_times_outside_of_begin_and_end_do_not_count(fake: FakeTime) -> None:
    clock = LabelClock()
    call = timed(fake.pass_by, "label", clock)
    call(100)
    clock.begin()
    other = threading.Thread(target=call, args=(10,))
    other.start()
    other.join()
    clock.end()
    call(100)
    assert "label" not in clock.nanoseconds
    assert clock.calls == {}


def test_a_timed_function_passes_everything_on_and_is_named_like_its_label() -> None:
    def function(*args: int, **kwargs: int) -> tuple[Any, ...]:
        return args, kwargs

    call = timed(function, "pm_attend", LabelClock())
    assert call(1, 2, three=3) == ((1, 2), {"three": 3})
    assert call.__code__.co_name == "pm_attend"


def test_calling_costs_are_measured_apart_from_the_function() -> None:
    cost = measure_cost(ctypes.CDLL(None).abs, (1,), repeats=2_000)
    assert 0 <= cost.arguments < 50_000
    assert cost.timer_inside >= 0
    assert cost.timer_outside > 0


def step(ns: dict[str, int], calls: dict[str, int] | None = None, **changes: float) -> dict[str, Any]:
    values = {"begin": 0.0, "end": 1.0, "idle_ns": 0, "rows": 1, "tokens": 1, "ns": ns, "calls": calls or {}}
    return values | changes


def test_rows_add_up_to_the_time_from_step_to_step() -> None:
    ns = {REST: 1_000_000, "pm_linear": 6_000_000, "pm_attend": 2_000_000, "argmax_rows": 500_000}
    found = breakdown([step(ns, idle_ns=500_000), step(ns, idle_ns=1_500_000)], {}, FREE)
    assert found.milliseconds == {GEMM: 6.0, ATTENTION: 2.0, OTHER: 0.0, SAMPLING: 0.5, PYTHON: 1.0, IDLE: 1.0}
    assert found.period_ms == 10.5
    assert found.busy_ms == 9.5
    assert found.not_kernels() == pytest.approx(2 / 10.5)


def test_work_beside_the_step_counts_as_if_it_were_in_its_way_and_waiting_is_part_of_it() -> None:
    found = breakdown([step({REST: 1_000_000, "pm_linear": 8_000_000}, idle_ns=1_000_000)], {}, FREE)
    assert found.not_kernels(0.5) == found.not_kernels() == pytest.approx(2 / 10)
    assert found.not_kernels(3.0) == pytest.approx(4 / 12)


def test_converting_arguments_is_pythons_and_the_timers_are_nobodys() -> None:
    costs = {"pm_linear": CallCost(arguments=1_000, timer_inside=100, timer_outside=200)}
    found = breakdown([step({REST: 50_000, "pm_linear": 100_000}, {"pm_linear": 10})], costs, FREE)
    assert found.milliseconds[GEMM] == pytest.approx((100_000 - 10 * 1_100) / 1e6)
    assert found.milliseconds[PYTHON] == pytest.approx((50_000 + 10 * 1_000 - 10 * 200) / 1e6)
    assert found.timers_ms == pytest.approx(10 * 300 / 1e6)


def test_a_label_that_is_no_ctypes_function_has_only_the_timers_cost() -> None:
    timer = CallCost(arguments=400, timer_inside=100, timer_outside=0)
    found = breakdown([step({REST: 0, "torch_linear": 10_000}, {"torch_linear": 2})], {}, timer)
    assert found.milliseconds[GEMM] == pytest.approx((10_000 - 200) / 1e6)
    assert found.milliseconds[PYTHON] == 0


@pytest.mark.parametrize(
    ("label", "row"),
    [
        ("pm_linear", GEMM),
        ("pm_linear_int8", GEMM),
        ("onednn_linear", GEMM),
        ("pm_quantised", GEMM),
        ("pm_attend", ATTENTION),
        ("pm_plan_attention", ATTENTION),
        ("torch_attend", ATTENTION),
        ("argmax_rows", SAMPLING),
        ("pm_sample_top_k", SAMPLING),
        ("pm_rope_store", OTHER),
        ("pm_kernel_of_next_year", OTHER),
        (REST, PYTHON),
    ],
)
def test_every_label_has_a_row(label: str, row: str) -> None:
    assert row_of(label) == row
    assert row in ROWS


def test_only_whole_steps_of_the_window_count() -> None:
    times = [(0.0, 1.1), (1.2, 2.0), (2.1, 3.0), (2.9, 3.2)]
    steps = [step({}, begin=begin, end=end) for begin, end in times]
    assert [found["begin"] for found in within(steps, 1.0, 3.0)] == [1.2, 2.1]


def test_an_empty_window_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="measure for longer"):
        breakdown([], {}, FREE)


def test_every_kernel_of_the_library_gets_a_timer_and_its_cost() -> None:
    import torch  # noqa: PLC0415

    from bench.profiling.profiler import UNTIMED, Profiler  # noqa: PLC0415
    from executor_svc.models.layers import RmsNorm  # noqa: PLC0415
    from executor_svc.native.library import Call, CallKind, NativeError, Step, load  # noqa: PLC0415

    try:
        library = load()
    except NativeError as error:
        pytest.skip(str(error))
    profiler = Profiler()
    wrapped = profiler._timed_library(library)
    timed_names = {label.removeprefix("pm_") for label in profiler.costs}
    kernels: dict[str, Callable[..., Any]] = {
        name: getattr(library, name) for name in library.__slots__ if getattr(getattr(library, name), "argtypes", None)
    }
    expected = {name for name in kernels if name not in UNTIMED and not name.startswith("_")} - {"run"}
    assert timed_names == expected | {f"run_{kind.name.lower()}" for kind in CallKind}
    assert {"linear", "attend", "rms_norm"} <= timed_names
    x, weight = torch.randn(3, 32), torch.ones(32)
    profiler.clock.begin()
    result = RmsNorm(weight, 1e-6, wrapped)(x)
    profiler.clock.end()
    assert profiler.clock.calls == {"pm_rms_norm": 1}
    expected_result = RmsNorm(weight, 1e-6, library)(x)
    assert torch.equal(result, expected_result)
    # Many kernels in one call are called one at a time.
    out, again = torch.zeros(3, 32), torch.zeros(3, 32)
    pairs = [RmsNorm(weight, 1e-6, wrapped).kernel_call(x, where) for where in (out, again)]
    calls = (Call * 2)(*(Call(ctypes.addressof(arguments), kind) for kind, arguments in pairs))
    profiler.clock.begin()
    assert wrapped.run(calls, 2, ctypes.byref(Step(3))) == 0
    profiler.clock.end()
    assert profiler.clock.calls == {"pm_run_norm": 2}
    assert torch.equal(out, expected_result)
    assert torch.equal(again, expected_result)
