"""The safety filter's rules one by one, with numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from real_robot.control.trajectory import cubic
from real_robot.robot_file import load_robot
from real_robot.safety.commands import Command, Measurement, SafeCommand
from real_robot.safety.filter import SafetyFilter
from real_robot.safety.kinematics import EndEffectorPoint
from real_robot.safety.limits import RobotLimits, parse_limits, quantity
from real_robot.safety.stopping import Axis, AxisLimits, along, duration, offset_at
from real_robot.safety.workspace import WorkspaceClearance

ROBOTS = Path(__file__).parents[2] / "configs" / "robots"
READY = [0.0, -math.pi / 4, 0.0, -3 * math.pi / 4, 0.0, math.pi / 2, math.pi / 4]

# One period of 0.1 s: a step of jerk changes the acceleration by 1, the speed by 0.1, the position by 0.01.
AXIS = AxisLimits(
    name="slide", unit="m", position=(-1.0, 1.0), velocity=1.0, acceleration=3.0, jerk=10.0, step_from_measured=0.5
)  # in ticks: 0.1, 0.03, 0.01
LIMITS = RobotLimits(command_hz=10.0, axes=(AXIS,), workspace=None, max_command_age_s=0.25, max_measurement_age_s=0.25)


class Drive:
    """A filter with an arm that follows perfectly."""

    def __init__(self, limits: RobotLimits = LIMITS, start: float = 0.0) -> None:
        self.safety = SafetyFilter(limits)
        self.safety.start([start], 0.0)
        self.hz, self.tick, self.position = limits.command_hz, 0, start

    def __call__(self, target: float | None, **measured: object) -> SafeCommand:
        self.tick += 1
        now = self.tick / self.hz
        command = None if target is None else Command([target], now)
        fields = {"positions": self.safety.sent_position(now), "stamp_s": now, **measured}
        out = self.safety.filter(command, Measurement(**fields), now)  # type: ignore[arg-type]
        (self.position,) = out.positions
        return out

    def settle(self, **measured: object) -> None:
        """Until the arm may move, and has been at rest for a while."""
        for _ in range(self.safety.tick + 8):
            self(self.position, **measured)


def reasons(out: SafeCommand) -> list[str]:
    return [event.reason for event in out.events]


def test_a_stop_by_hand() -> None:
    """At 10 Hz a tick of jerk 10 changes the acceleration by 1, in ticks: J = 0.01, A = 0.03, from u = 0.06 per tick.

    p^2 = J u = 0.0006, p = 0.0245: three ticks to reach it, three to leave it, p = u / 3 = 0.02 in whole ticks.
    """
    stop = Axis(AXIS, 0.1).stop(0.06, 0.0)
    assert stop is not None
    (first, n1, n2, last, n3), lowest, highest, end, distance, fastest = stop
    assert (n1, n2, n3) == (3, 0, 3)
    assert (first, last) == pytest.approx((-0.02 / 3, 0.02 / 3))
    # the speed falls symmetrically from 0.06 to 0 in six ticks
    assert (lowest, highest, end, distance) == pytest.approx((0.0, 0.18, 0.18, 0.18))
    assert fastest == pytest.approx(0.06)


def test_a_stop_while_still_accelerating_by_hand() -> None:
    """From rest with w = 0.01 = J: one tick back to zero adds 0.005 to the speed, which must then be taken away."""
    stop = Axis(AXIS, 0.1).stop(0.0, 0.01)
    assert stop is not None
    (first, n1, n2, last, n3), lowest, highest, end, _, fastest = stop
    # p^2 = w^2 / 2, p = 0.0071: two ticks from 0.01 to -0.0067, one to zero
    assert (n1, n2, n3) == (2, 0, 1)
    peak = 0.01 / 1.5
    assert (first, last) == pytest.approx((-(peak + 0.01) / 2, peak))
    assert fastest == pytest.approx(0.01**2 / (2 * -first))
    assert lowest == 0.0
    assert highest == pytest.approx(end)


def test_a_slow_target_is_followed_a_quarter_of_a_second_behind_without_overshoot_where_it_stops() -> None:
    drive = Drive(replace(LIMITS, command_hz=50.0))
    drive.settle()
    targets = [0.3 * math.sin(0.01 * k) ** 3 for k in range(1, 130)]
    sent = []
    for target in targets + [targets[-1]] * 100:
        out = drive(target)
        assert out.accepted
        sent.append(out.positions[0])
    assert all(behind <= q <= target for q, behind, target in zip(sent[13:], targets, targets[13:], strict=False))
    assert max(sent) <= targets[-1] + 1e-4
    assert sent[-1] == pytest.approx(targets[-1], abs=1e-4)


@pytest.mark.parametrize(("target", "reason"), [(0.45, "velocity"), (1.4, "position"), (0.9, "acceleration")])
def test_clamps_name_the_limit_that_was_broken(target: float, reason: str) -> None:
    drive = Drive()
    drive.settle()
    out = drive(target)
    assert out.accepted
    assert reason in reasons(out)
    assert 0.0 < out.positions[0] <= 0.01  # one period of the largest jerk


def test_a_target_beyond_the_range_is_approached_up_to_the_limit() -> None:
    drive = Drive()
    outs = [drive(1.4) for _ in range(90)]
    assert max(out.positions[0] for out in outs) <= 1.0 + 1e-9
    assert outs[-1].positions[0] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("distance", [0.004, 0.03, 0.2, 0.45])
def test_a_jump_is_followed_without_overshoot(distance: float) -> None:
    drive = Drive(replace(LIMITS, command_hz=50.0))
    path = [drive(distance).positions[0] for _ in range(400)]
    assert max(path) <= distance * 1.02
    assert path[-1] == pytest.approx(distance, abs=1e-6)


@pytest.mark.parametrize(
    ("target", "measured", "reason"),
    [
        (None, {}, "no_command"),
        (math.nan, {}, "not_finite"),
        (math.inf, {}, "not_finite"),
        (0.0, {"positions": [math.nan]}, "not_finite"),
        (0.0, {"positions": [0.6]}, "step_from_measured"),
        (0.0, {"positions": [0.0, 0.0]}, "joint_count"),
        (0.0, {"stamp_s": -0.2}, "measurement_stale"),
        (0.0, {"stamp_s": math.nan}, "measurement_stale"),
        (0.0, {"stamp_s": 99.9}, "measurement_stale"),
    ],
)
def test_rejections(target: float | None, measured: dict[str, object], reason: str) -> None:
    drive = Drive()
    drive.settle()
    out = drive(target, **measured)
    assert reasons(out) == [reason]
    assert not out.accepted
    assert out.positions == (0.0,)


def test_an_arm_that_is_not_where_it_was_sent_latches_the_stop() -> None:
    """Within ``step_from_measured`` while it moves, within ``hold_tolerance`` when it has been at rest."""
    drive = Drive()
    drive.settle()
    assert drive(0.0, positions=[0.019]).accepted
    drive(0.0, positions=[0.021])
    assert drive.safety.stopped == "joint slide is 0.021 m away from where it was sent"
    moving = Drive()
    moving.settle()
    for _ in range(6):
        moving(0.4)
    for _ in range(6):
        assert moving(0.4, positions=[moving.position - 0.3]).accepted


def test_a_rejected_command_brakes_along_the_stop_path() -> None:
    drive = Drive()
    for k in range(1, 40):
        drive(0.002 * k)
    promised = [point.positions for point in drive.safety.path()][-1]
    for _ in range(12):
        out = drive(math.nan)
    assert out.positions == pytest.approx(promised)
    assert drive.safety.at_rest


def test_a_stale_command_is_rejected() -> None:
    drive = Drive()
    drive.settle()
    now = (drive.tick + 1) / drive.hz
    out = drive.safety.filter(Command([0.0], now - 0.3), Measurement([0.0], now), now)
    assert reasons(out) == ["command_stale"]


def test_contact_latches_the_stop_also_without_a_command_until_it_is_released() -> None:
    for target in (0.02, None):
        drive = Drive(replace(LIMITS, axes=(replace(AXIS, contact_residual=5.0),)))
        drive.settle(residuals=[0.0])
        assert drive(0.01, residuals=[4.9]).accepted
        assert reasons(drive(target, residuals=[-5.1])) == ["contact"]
        assert drive.safety.stopped == "contact at joint slide"
        with pytest.raises(ValueError, match="still braking"):
            drive.safety.release()
        while not drive.safety.at_rest:
            assert reasons(drive(0.02, residuals=[0.0])) == ["stopped"]
        drive.safety.release()
        assert drive(drive.position, residuals=[0.0]).accepted
        assert reasons(drive(drive.position)) == ["contact"]  # a limit without a measurement is not a pass


def test_ticks_stay_on_the_grid() -> None:
    safety = SafetyFilter(LIMITS)
    safety.start([0.0], 0.0)
    first = safety.filter(Command([0.01], 0.11), Measurement([0.0], 0.1), 0.11)
    again = safety.filter(Command([0.4], 0.12), Measurement([0.0], 0.1), 0.12)
    assert reasons(again) == ["early_tick"]
    assert again[:4] == first[:4]


def test_late_ticks_advance_along_the_stop_path() -> None:
    drive = Drive()
    for k in range(1, 40):
        drive(0.002 * k)
    promised = drive.safety.path()
    drive.tick += 1
    out = drive(None)
    assert reasons(out) == ["missed_ticks", "no_command"]
    assert out.events[0].value == 1
    assert not drive.safety.lost
    begin, end = (np.array(point[1:]) for point in promised[-2:])
    at = drive.safety.sent_position(drive.tick / drive.hz)
    if promised[-2].time_s < drive.tick / drive.hz < promised[-1].time_s:
        h = promised[-1].time_s - promised[-2].time_s
        assert at == pytest.approx(cubic(begin, end, drive.tick / drive.hz - promised[-2].time_s, h)[0].tolist())


def test_after_a_long_pause_nothing_is_sent_until_the_arm_was_started_again() -> None:
    """With a lead the controller may have missed the last message; any stop it follows is safe, a new motion is not."""
    safety = SafetyFilter(LIMITS, lead_s=0.6)
    safety.start([0.0], 0.0)
    for tick in range(1, 40):
        safety.filter(
            Command([0.002 * tick], tick / 10), Measurement(safety.sent_position(tick / 10), tick / 10), tick / 10
        )
    assert not safety.lost
    out = safety.filter(Command([0.1], 4.3), Measurement(safety.sent_position(4.3), 4.3), 4.3)
    assert safety.lost
    assert not out.accepted
    for tick in range(44, 70):
        out = safety.filter(Command([0.1], tick / 10), Measurement([0.1], tick / 10), tick / 10)
        assert not out.accepted
    assert safety.at_rest
    safety.start(list(safety.positions), 7.0)
    assert not safety.lost


def test_without_a_lead_two_missed_ticks_are_a_pause() -> None:
    """The next position would be three ticks of motion away."""
    drive = Drive()
    for k in range(1, 40):
        drive(0.002 * k)
    drive.tick += 2
    assert reasons(drive(0.08)) == ["missed_ticks", "missed_ticks"]
    assert drive.safety.lost


def test_a_stop_replaces_what_was_sent_and_is_urgent() -> None:
    """Without it the arm would go on for the whole lead."""
    limits = replace(LIMITS, command_hz=100.0)
    safety = SafetyFilter(limits, lead_s=0.2)
    safety.start([0.0], 0.0)
    first = safety.tick
    for tick in range(1, first + 100):
        now = tick / 100
        target = max(0.0, 0.004 * (tick - first))
        safety.filter(Command([target], now), Measurement(safety.sent_position(now), now), now)
    cruising = safety.path()
    safety.stop("test")
    out = safety.filter(None, Measurement(safety.sent_position(now + 0.01), now + 0.01), now + 0.01)
    assert out.urgent
    braking = {round(point.time_s - now, 3): point for point in safety.path()}
    before = {round(point.time_s - now, 3): point for point in cruising}
    assert braking[0.05].positions == before[0.05].positions
    assert braking[0.15].velocities[0] < before[0.15].velocities[0] == pytest.approx(0.4, abs=0.06)
    now += 0.02
    assert not safety.filter(None, Measurement(safety.sent_position(now), now), now).urgent


@pytest.mark.parametrize("now", [-3.0, math.nan, -math.inf, math.inf])
def test_a_clock_that_runs_backwards_or_is_not_finite_latches_the_stop(now: float) -> None:
    drive = Drive()
    drive.settle()
    out = drive.safety.filter(Command([0.5], now), Measurement([0.4], now), now)
    assert reasons(out) == ["clock_jump", "stopped"]


def test_start_refuses_an_arm_outside_its_limits_or_in_motion() -> None:
    safety = SafetyFilter(LIMITS)
    with pytest.raises(RuntimeError, match="call start"):
        safety.filter(None, None, 0.0)
    with pytest.raises(ValueError, match=r"joint 'slide' is at 1.2000 m, allowed is -1.0 to 1.0"):
        safety.start([1.2], 0.0)
    with pytest.raises(ValueError, match="is at nan"):
        safety.start([math.nan], 0.0)
    with pytest.raises(ValueError, match="2 joint positions were measured, the limits name 1"):
        safety.start([0.0, 0.0], 0.0)
    drive = Drive()
    drive.settle()
    drive(0.01)
    with pytest.raises(ValueError, match="not come to rest"):
        drive.safety.start([0.0], 1.0)


def test_a_start_holds_where_the_arm_is_unless_it_still_holds_where_it_was_sent() -> None:
    """A hand-guided arm is not driven back; one that hangs a little lower is not lowered further."""
    drive = Drive()
    drive.settle()
    drive.safety.start([0.019], 100.0)
    assert drive.safety.positions == (0.0,)
    drive.safety.filter(None, Measurement([0.019], 200.0), 200.0)
    drive.safety.start([0.3], 201.0)
    assert drive.safety.positions == (0.3,)
    # 0.3 m from rest to rest: at most 1 m/s, 3 m/s^2, and the spline's step of acceleration within 1 ms
    assert drive.safety.path()[0].time_s - 201.0 >= math.sqrt(6 * 0.3 / (10.0 * 0.001)) - 0.1


def test_a_start_does_not_mix_where_the_arm_is_and_where_it_was_sent_to_a_pose_outside_the_box() -> None:
    """A hand moved the shoulder; the base joint is still within 0.02 rad of where it was sent, and kept there."""
    limits = load_robot(ROBOTS / "franka_panda.yaml").limits
    sent = [1.212, 1.145, -1.567, -0.954, -0.709, 3.538, -2.744]
    measured = [1.193, 1.445, *sent[2:]]
    box = WorkspaceClearance(limits.workspace, limits.axes)
    safety = SafetyFilter(limits)
    safety.start(sent, 0.0)
    for tick in range(1, 400):
        now = tick / limits.command_hz
        safety.filter(None, Measurement(sent, now), now)
    mix = [sent[0], *measured[1:]]
    assert abs(sent[0] - measured[0]) < limits.axes[0].hold_tolerance
    assert box.at(mix)[0] < -0.01
    safety.start(measured, 5.0)
    assert safety.positions == tuple(measured)


def test_end_effector_position_of_two_known_arms() -> None:
    """Franka's ready pose with the standard hand, and a UR5e stretched out at zero: the makers' own numbers."""
    panda, ur = load_robot(ROBOTS / "franka_panda.yaml").limits, load_robot(ROBOTS / "ur5e.yaml").limits
    assert panda.workspace is not None
    assert ur.workspace is not None
    point = EndEffectorPoint(panda.workspace.frames, panda.workspace.end_effector, panda.axes)
    assert point(READY) == pytest.approx((0.3069, 0.0, 0.4869), abs=1e-4)
    point = EndEffectorPoint(ur.workspace.frames, ur.workspace.end_effector, ur.axes)
    assert point([0.0] * 6) == pytest.approx((-0.8172, -0.2329, 0.0628), abs=1e-9)


def test_a_command_that_would_leave_the_workspace_is_rejected() -> None:
    limits = load_robot(ROBOTS / "franka_panda.yaml").limits
    safety = SafetyFilter(limits)
    safety.start(READY, 0.0)
    outs = []
    for tick in range(1, 250):
        now = tick / limits.command_hz
        target = [READY[0] + 0.012 * tick, *READY[1:]]  # turns the base: y grows until the face at 0.6 m
        target[1] += 0.007 * tick
        outs.append(safety.filter(Command(target, now), Measurement(safety.sent_position(now), now, [0.0] * 7), now))
    seen = [reason for out in outs for reason in reasons(out)]
    assert "workspace" in seen


@pytest.mark.parametrize("path", sorted(ROBOTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_robot_file_loads_and_can_start(path: Path) -> None:
    limits = load_robot(path).limits
    middle = [sum(axis.position) / 2 for axis in limits.axes]
    if limits.workspace is None:
        SafetyFilter(limits).start(middle, 0.0)
    assert limits.command_hz >= 50.0


def test_units_are_converted() -> None:
    assert quantity("150 deg/s", "x", "angle", 1) == pytest.approx(2.6179938)
    assert quantity("20 mm", "x", "length") == pytest.approx(0.02)
    assert quantity("-1.5e1 N m", "x", "torque") == -15.0


def generic() -> dict:
    return yaml.safe_load((ROBOTS / "generic.yaml").read_text())["limits"]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("joints", "joint_1", "velocity"), 2.0, r"\.joints\.joint_1\.velocity: got 2\.0; expected .* rad/s, deg/s"),
        (("joints", "joint_1", "velocity"), "2 rad", r"velocity: got '2 rad'; expected"),
        (("joints", "joint_1", "velocity"), "2 m/s", r"velocity: got '2 m/s'; expected"),
        (("joints", "joint_1", "velocity"), "-2 rad/s", r"must be above zero"),
        (("joints", "joint_1", "velocity"), "1.2.3 rad/s", r"got '1\.2\.3 rad/s'"),
        (("joints", "joint_1", "position"), ["1 rad", "-1 rad"], r"'1 rad' is not below the upper limit '-1 rad'"),
        (("joints", "joint_1", "position"), "1 rad", r"expected a list of 2"),
        (("joints", "joint_1", "kind"), "rotary", r"'rotary' is not one of \['prismatic', 'revolute'\]"),
        (("joints", "joint_1", "jerks"), "1 rad/s^3", r"'jerks' is not one of .*; did you mean 'jerk'\?"),
        (("joints", "joint_1", "acceleration"), "0.1 rad/s^2", r"stopping from full speed takes about 8\.00 s"),
        (("joints", "gripper", "position"), ["0 mm", "1 mm"], r"more than the whole range"),
        (("command_rate",), "100", r"\.command_rate: got '100'; expected a number with its unit, one of Hz"),
        (("joints",), [], r"\.joints: expected a table from joint name"),
    ],
)  # fmt: skip
def test_errors_in_limits_are_named_with_their_place(place: tuple, value: object, message: str) -> None:
    section = generic()
    table = section
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    with pytest.raises(ValueError, match=message):
        parse_limits(section)


def test_missing_keys_and_files_are_named(tmp_path: Path) -> None:
    section = generic()
    del section["joints"]["joint_2"]["jerk"]
    with pytest.raises(ValueError, match=r"\.joints\.joint_2: missing \['jerk'\]"):
        parse_limits(section)
    with pytest.raises(ValueError, match=r"absent\.yaml: cannot be read"):
        load_robot(tmp_path / "absent.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ValueError, match="no 'limits' section"):
        load_robot(tmp_path / "empty.yaml")


@pytest.mark.parametrize(
    ("speed", "accel"), [(0.02, 0.0), (0.02, 0.001), (-0.015, 0.0008), (0.0004, -0.0009), (0.0, 0.0)]
)
def test_a_stop_read_off_backwards_is_the_same_stop(speed: float, accel: float) -> None:
    axis = Axis(load_robot(ROBOTS / "franka_panda.yaml").limits.axes[0], 0.01)
    stop = axis.stop(speed, accel)
    assert stop is not None
    for tick in range(duration(stop[0]) + 2):
        assert offset_at(stop, speed, accel, tick) == pytest.approx(along(stop[0], speed, accel, tick)[0], abs=1e-12)
