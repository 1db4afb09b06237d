from __future__ import annotations

import os
import select
import signal
import threading

import pytest

from pagemill.wake import WakePipe


def _readable_within(wake: WakePipe, timeout_ms: int) -> bool:
    poll = select.poll()  # not select(): its descriptors end at 1023
    poll.register(wake.fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def is_readable(wake: WakePipe) -> bool:
    return _readable_within(wake, 0)


def test_it_is_readable_from_set_to_clear_however_often_it_was_set() -> None:
    wake = WakePipe()
    wake.clear()
    assert not is_readable(wake)
    for _ in range(100_000):  # more than a pipe holds
        wake.set()
    assert is_readable(wake)
    while is_readable(wake):
        wake.clear()
    wake.set()
    assert is_readable(wake)
    wake.close()


def test_when_it_is_closed_nobody_elses_descriptor_is_written_to() -> None:
    wake = WakePipe()
    numbers = {wake.fd, wake._write_fd}
    wake.close()
    pipe = os.pipe()  # gets the numbers
    assert numbers == set(pipe)
    wake.set()
    os.set_blocking(pipe[0], False)
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 1)
    for number in pipe:
        os.close(number)


def test_signals_with_a_handler_set_it() -> None:
    wake = WakePipe()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        wake.set_by_signals()
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert _readable_within(wake, 10_000)
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)
        wake.close()
