"""Two arms with a controller each and a mobile base behind one filter, over a real wire; every part is a process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from real_robot.control.loop import Action
from real_robot.robot_file import load_robot
from real_robot.safety.commands import Measurement
from tests.ros.cell import ROOT, Cell

pytestmark = [
    pytest.mark.skipif(
        find_spec("rclpy") is None, reason="this Python has no rclpy; make test-ros runs these in one that has"
    ),
    pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning"),  # of a parser that rclpy imports
]
ROBOT = load_robot(ROOT / "configs/robots/two_arms_on_base.yaml")
STEPS = np.array([1.0, -1.0, -1.0, 1.0, 1.0, 0.0, 0.5], dtype=np.float32)  # every control step


class Steady:
    """One action again and again."""

    def __init__(self) -> None:
        self.wanted: np.ndarray | None = STEPS

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        return None if self.wanted is None else Action(self.wanted, measured.stamp_s)

    def executed(self, tick: int, action: np.ndarray) -> None: ...

    def clear(self) -> None: ...


class Running:
    def __init__(self, cell: Cell, connection: Any, source: Steady) -> None:
        self.cell, self.connection, self.source = cell, connection, source
        self.control = connection.connect(ROBOT.control_loop(source, ROBOT.embodiment(), control_hz=20.0))

    def positions(self) -> np.ndarray:
        measured = self.connection.joints.measure()
        assert measured is not None
        return np.array(measured.positions)

    def lag(self) -> np.ndarray:
        """Measured positions less those that were sent for the same time."""
        time.sleep(0.01)
        with self.control.lock:
            measured = self.connection.joints.measure()
            return np.array(measured.positions) - self.control.loop.filter.sent_position(measured.stamp_s)

    def wait(self, condition: Any, what: str, seconds: float = 30.0) -> None:
        self.cell.wait(condition, seconds, what)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    cell = Cell(tmp_path, domain=20 + os.getpid() % 80)
    with closing(cell), cell.environment():
        from real_robot.ros.connection import RobotConnection

        for name in ("left", "right", "base"):
            cell.spawn(name, [sys.executable, "-m", "tests.ros.robot_part", name])
        connection = RobotConnection(ROBOT)
        with closing(connection):
            running = Running(cell, connection, Steady())
            running.wait(lambda: connection.joints.fresh(0.1), "joint states of all parts")
            running.control.start()
            yield running


def test_every_controller_gets_its_joints_and_the_base_drives_where_its_odometry_says(running: Running) -> None:
    before = running.positions()
    running.wait(lambda: abs(running.positions()[4] - before[4]) > 0.15, "the base's way")
    behind = [running.lag() for _ in range(50)]
    running.source.wanted = None
    running.wait(lambda: running.control.loop.filter.at_rest, "rest")
    time.sleep(0.2)
    moved = running.positions() - before
    assert (np.sign(moved[:5]) == np.sign(STEPS[:5])).all(), moved
    assert moved[6] > 0.05
    # in motion nothing runs ahead by the lead of 100 ms, which are 30 mm of the base and 100 mrad of an arm
    assert np.median(behind, axis=0) == pytest.approx(np.zeros(7), abs=0.02)
    sent = np.array(running.control.loop.filter.positions) - before
    assert moved[:4] == pytest.approx(sent[:4], abs=0.01)
    assert moved[4:] == pytest.approx(sent[4:], abs=0.03)
    assert running.connection.problem() == ""


@pytest.mark.parametrize("part", ["right", "base"])
def test_all_parts_stop_when_one_is_lost(running: Running, part: str) -> None:
    before = running.positions()
    running.wait(lambda: abs(running.positions()[0] - before[0]) > 0.1, "motion")
    running.cell.kill(part)
    running.wait(lambda: running.control.loop.filter.at_rest, "rest", seconds=5.0)
    time.sleep(0.3)
    still = running.positions()
    time.sleep(0.5)
    assert running.positions() == pytest.approx(still, abs=1e-6)
    assert not running.connection.joints.fresh(0.1)


def test_another_publisher_for_any_controller_stops_all(running: Running) -> None:
    from trajectory_msgs.msg import JointTrajectory

    before = running.positions()
    running.wait(lambda: abs(running.positions()[0] - before[0]) > 0.1, "motion")
    topic = "/right/joint_trajectory_controller/joint_trajectory"
    running.connection.node.create_publisher(JointTrajectory, topic, 1)
    running.wait(lambda: running.control.loop.filter.stopped, "the stop")
    assert running.control.loop.filter.stopped == f"1 other publishers on {topic}: only one node may move the arm"
    running.wait(lambda: running.control.loop.filter.at_rest, "rest", seconds=5.0)
