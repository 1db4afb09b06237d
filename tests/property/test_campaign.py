"""What the suite does about examples that fail slowly."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine

from tests.property.campaign import MAX_SHRINKING_S


def test_the_alarm_of_a_test_ends_it_at_once_and_is_no_failing_example() -> None:
    examples = []

    @given(st.integers())
    def takes_too_long(number: int) -> None:
        examples.append(number)
        signal.raise_signal(signal.SIGALRM)

    with pytest.raises(BaseException, match="ran longer than"):
        takes_too_long()
    assert len(examples) == 1


def test_the_time_for_making_a_failing_example_smaller_is_bounded() -> None:
    assert engine.MAX_SHRINKING_SECONDS == MAX_SHRINKING_S
