"""What a program that steps the robot waits for."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from real_robot.control.stepped_source import SteppedSource
from real_robot.safety.commands import Measurement
from tests.real_robot.test_control_thread import wait

REST = Measurement([0.0], 0.0)


def take(source: SteppedSource) -> float | None:
    action = source.action(0, REST, 0)
    return None if action is None else float(action.values[0])


def number(value: float) -> np.ndarray:
    return np.array([value], dtype=np.float32)


def test_put_returns_when_no_more_actions_wait_than_may() -> None:
    source, put = SteppedSource(waiting=1), []
    assert source.put(number(1), 0.0)  # waits, as one may

    def program() -> None:
        put.append(source.put(number(2), 30.0))

    thread = threading.Thread(target=program)
    thread.start()
    wait(lambda: len(source._waiting) == 2)
    assert not put
    assert take(source) == 1
    thread.join(30.0)
    assert put == [True]
    assert [take(source), take(source)] == [2, None]


def test_what_is_not_taken_in_time_is_withdrawn() -> None:
    source = SteppedSource()
    assert not source.put(number(1), 0.01)
    assert take(source) is None


def test_after_a_stop_nothing_waits() -> None:
    source = SteppedSource(waiting=2)
    assert source.put(number(1), 0.0)
    source.clear()
    assert take(source) is None
    assert source.put(number(2), 0.0)
    assert take(source) == 2


@pytest.mark.parametrize("waits_for", ["an action that is not taken", "the end of one that was"])
def test_a_stop_ends_every_wait(waits_for: str) -> None:
    source, ended = SteppedSource(), []

    def program() -> None:
        ended.append(source.put(number(1), 60.0) if "not taken" in waits_for else not source.finish(60.0))

    thread = threading.Thread(target=program)
    thread.start()
    time.sleep(0.05)
    source.clear()
    thread.join(30.0)
    assert ended == [False]
    assert take(source) is None
