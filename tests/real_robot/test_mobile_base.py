"""A mobile base as joints, and what a robot file with several controllers may say."""

from __future__ import annotations

from math import cos, inf, isfinite, nan, pi, sin
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from real_robot.control.loop import Action
from real_robot.control.mobile_base import BaseOdometry, body_velocity, check_base, yaw_of
from real_robot.robot_file import load_robot
from real_robot.safety.commands import Measurement

FILE = Path(__file__).parents[2] / "configs/robots/two_arms_on_base.yaml"


@given(yaw=st.floats(-7, 7), forward=st.floats(-1, 1), left=st.floats(-1, 1), turning=st.floats(-1, 1))
def test_a_velocity_is_turned_into_the_frame_of_the_base(
    yaw: float, forward: float, left: float, turning: float
) -> None:
    world = (cos(yaw) * forward - sin(yaw) * left, sin(yaw) * forward + cos(yaw) * left, turning)
    assert body_velocity((3.0, -2.0, yaw), world) == pytest.approx((forward, left, turning), abs=1e-12)


def test_a_base_that_does_not_drive_sideways_has_its_speed_and_turn() -> None:
    assert body_velocity((3.0, 0.4), (0.2, -0.1)) == (0.2, 0.0, -0.1)


@given(turns=st.floats(-3, 3), radius=st.floats(0.1, 2))
def test_odometry_counts_whole_turns_and_the_way_along_a_circle(turns: float, radius: float) -> None:
    holonomic, differential = BaseOdometry(3), BaseOdometry(2)
    for i in range(201):
        angle = 2 * pi * turns * i / 200
        yaw = yaw_of(0.0, 0.0, sin(angle / 2), cos(angle / 2))  # within a turn
        pose = radius * sin(angle), radius * (1 - cos(angle)), yaw
        where, along = holonomic.positions(*pose), differential.positions(*pose)
    assert where == pytest.approx([*pose[:2], angle], abs=1e-9)
    assert along == pytest.approx([radius * angle, angle], rel=1e-2, abs=1e-9)


@pytest.mark.parametrize("bad", [(nan, 0.0, 0.0), (0.0, inf, 0.0), (0.0, 0.0, nan)])
@pytest.mark.parametrize("joints", [2, 3])
def test_a_pose_that_is_not_finite_is_passed_on_and_not_kept(bad: tuple[float, float, float], joints: int) -> None:
    odometry = BaseOdometry(joints)
    odometry.positions(0.0, 0.0, 0.0)
    assert not all(map(isfinite, odometry.positions(*bad)))
    assert all(map(isfinite, odometry.positions(0.1, 0.0, 0.0)))


def test_other_joints_are_no_base() -> None:
    check_base(["d", "yaw"], ["m", "rad"])
    with pytest.raises(ValueError, match=r"got x \[m\], y \[m\]"):
        check_base(["x", "y"], ["m", "m"])


def test_the_joints_are_divided_among_the_controllers() -> None:
    robot = load_robot(FILE)
    assert [list(one.joints) for one in robot.controllers] == [
        ["left_shoulder", "left_elbow"],
        ["right_shoulder", "right_elbow"],
        ["base_x", "base_y", "base_yaw"],
    ]
    assert robot.lead_s == 0.1


def change(document: dict[str, Any], place: tuple[Any, ...], value: object) -> None:
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


RIGHT, BASE = ("ros", "more_controllers", 0), ("ros", "more_controllers", 1)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((*RIGHT, "joints"), ["right_sholder"], r"more_controllers\[0\].joints: 'right_sholder' is not one of"),
        ((*RIGHT, "joints"), ["base_x"], r"more_controllers\[1\].joints: 'base_x' has a controller already"),
        ((*RIGHT, "command"), "/base/cmd_vel", "is that of another controller"),
        ((*RIGHT, "command_type"), "twist_stamped", "twist_stamped is for the first arm"),
        ((*RIGHT, "odometry"), "/odom", "moves joints, which have joint_states"),
        ((*BASE, "joints"), ["base_x", "base_y"], "a base has the joints"),
        ((*BASE, "odometry"), "/odom", "odometry or joint_states, not both"),
        ((*BASE, "speed"), 1, r"more_controllers\[1\].speed: 'speed' is not one of"),
        (("ros", "more_controllers"), "/base/cmd_vel", "expected a list of controllers"),
        (("limits", "command_lead"), "40 ms", "40 ms are too few.*set it to 50 ms"),
    ],
)
def test_errors_are_named(tmp_path: Path, place: tuple[Any, ...], value: object, message: str) -> None:
    document = yaml.safe_load(FILE.read_text())
    change(document, place, value)
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError, match=message):
        load_robot(path)


class Drives:
    """The base to the front, until it was sent half a metre."""

    def __init__(self) -> None:
        self.on = True

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        return Action(np.array([0, 0, 0, 0, 1, 0, 0], np.float32), measured.stamp_s) if self.on else None

    def executed(self, tick: int, action: np.ndarray) -> None: ...

    def clear(self) -> None: ...


def test_a_base_that_slips_holds_and_the_next_start_forgets_its_slip() -> None:
    """It drives 3 % less than it is told, and nothing holds it at a position."""
    robot, source, measured, sent = load_robot(FILE), Drives(), [0.0] * 7, [0.0] * 7
    loop = robot.control_loop(source, robot.embodiment(), control_hz=20.0)
    loop.start(measured, 0.0)
    for tick in range(1, 1000):
        now_s = tick / 100
        last, sent = sent, loop.filter.sent_position(now_s)
        measured = [*sent[:4], measured[4] + 0.97 * (sent[4] - last[4]), *sent[5:]]
        source.on = source.on and sent[4] < 0.5
        loop.tick(Measurement(measured, now_s), now_s)
    assert loop.filter.stopped is None
    assert loop.filter.at_rest
    assert 0.01 < sent[4] - measured[4] < 0.02
    loop.pause()
    loop.tick(Measurement(measured, 10.0), 10.0)
    loop.resume(Measurement(measured, 11.0), 11.0)
    assert loop.filter.positions == pytest.approx(measured)


def test_a_tolerance_of_a_base_that_the_file_gives_counts(tmp_path: Path) -> None:
    document = yaml.safe_load(FILE.read_text())
    document["limits"]["joints"]["base_yaw"]["hold_tolerance"] = "0.1 rad"
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(document))
    tolerances = {axis.name: axis.hold_tolerance for axis in load_robot(path).limits.axes}
    assert (tolerances["base_x"], tolerances["base_yaw"], tolerances["left_elbow"]) == (0.3, 0.1, 0.02)
