"""The safety filter's rules one by one, with numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from real_robot.safety.commands import Command, Measurement, SafeCommand
from real_robot.safety.filter import SafetyFilter
from real_robot.safety.kinematics import EndEffectorPoint
from real_robot.safety.limits import RobotLimits, load_limits, parse_limits, quantity
from real_robot.safety.stopping import Axis, AxisLimits

ROBOTS = Path(__file__).parents[2] / "configs" / "robots"
READY = [0.0, -math.pi / 4, 0.0, -3 * math.pi / 4, 0.0, math.pi / 2, math.pi / 4]

# One period of 0.1 s: a step of jerk changes the acceleration by 1, the speed by 0.1, the position by 0.01.
AXIS = AxisLimits(
    name="slide", unit="m", position=(-1.0, 1.0), velocity=1.0, acceleration=3.0, jerk=10.0, step_from_measured=0.5
)
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
        fields = {"positions": [self.position], "stamp_s": now, **measured}
        out = self.safety.filter(command, Measurement(**fields), now)  # type: ignore[arg-type]
        (self.position,) = out.positions
        return out


def reasons(out: SafeCommand) -> list[str]:
    return [event.reason for event in out.events]


def test_the_stop_law_by_hand() -> None:
    """Speed 0.6 at 10 Hz is 6 periods of unit acceleration: 3 + 2 + 1, the ramp that a jerk of 1 per period allows."""
    axis = Axis(AXIS, 0.1)
    assert axis.brake(0.6, -2.0) == pytest.approx(-3.0, rel=1e-5)
    assert axis.brake(0.3, -3.0) == pytest.approx(-2.0, rel=1e-5)
    assert axis.brake(0.1, -2.0) == pytest.approx(-1.0, rel=1e-5)
    assert axis.brake(0.6, 0.0) == pytest.approx(-1.0, rel=1e-5)  # jerk allows no more yet


@pytest.mark.parametrize(
    ("speed", "accel", "lowest", "highest", "fastest"),
    [
        (0.6, -2.0, 0.0, 0.03 + 0.01, 0.6),  # speeds 0.3, 0.1, 0
        (0.9, -3.0, 0.0, 0.06 + 0.03 + 0.01, 0.9),  # 0.6, 0.3, 0.1, 0: one period at full acceleration before
        (0.0, 3.0, 0.0, 0.02 + 0.03 + 0.03 + 0.02 + 0.005, 0.3),  # 0.2, 0.3, 0.3, 0.2, 0.05, 0
        (0.1, -3.0, -0.01 - 0.02 - 0.02 - 0.01, 0.0, 0.2),  # reversed: -0.1, -0.2, -0.2, -0.1, 0
    ],
)
def test_the_whole_stop_by_hand(speed: float, accel: float, lowest: float, highest: float, fastest: float) -> None:
    low, high, _, _, peak, *_ = Axis(AXIS, 0.1).stop(speed, accel)
    assert (low, high, peak) == pytest.approx((lowest, highest, fastest), rel=1e-4, abs=1e-6)


def test_a_command_within_the_limits_passes_bit_for_bit() -> None:
    drive = Drive()
    for k in range(1, 60):
        target = 0.3 * math.sin(0.05 * k) ** 3
        out = drive(target)
        assert out.positions == (target,)
        assert out.accepted
        assert out.events == ()


@pytest.mark.parametrize(
    ("target", "reason", "value", "limit"),
    [
        (0.45, "velocity", 4.5, 1.0),
        (0.05, "acceleration", 5.0, 3.0),
        (0.02, "jerk", 20.0, 10.0),
    ],
)
def test_clamps_name_the_limit_that_was_broken(target: float, reason: str, value: float, limit: float) -> None:
    out = Drive()(target)
    assert out.accepted
    ((got, joint, got_value, got_limit),) = out.events
    assert (got, joint) == (reason, 0)
    assert (got_value, got_limit) == pytest.approx((value, limit))
    assert 0.0 < out.positions[0] <= 0.01  # one period of the largest jerk: 1 m/s^2, 0.1 m/s, 0.01 m


def test_a_target_beyond_the_range_is_approached_up_to_the_limit() -> None:
    drive = Drive()
    outs = [drive(min(1.4, drive.position + 0.4)) for _ in range(60)]
    assert max(out.positions[0] for out in outs) <= 1.0 + 1e-9
    assert outs[-1].positions[0] == pytest.approx(1.0, abs=1e-3)
    assert "position" in reasons(outs[-1])


def test_a_moving_target_is_followed_after_its_speed_changes() -> None:
    """0.9 rad/s, then 0.3 rad/s: at 7.5 rad/s^2 the joint needs 0.08 s to slow down and goes too far meanwhile."""
    shoulder = replace(AXIS, position=(-2.0, 2.0), velocity=2.175, acceleration=7.5, jerk=3750.0)
    drive, target, behind = Drive(replace(LIMITS, command_hz=100.0, axes=(shoulder,))), 0.0, []
    for tick in range(100):
        target += (0.9 if tick < 40 else 0.3) * 0.01
        drive(target)
        behind.append(abs(target - drive.position))
    assert max(behind[40:]) == pytest.approx(0.6**2 / (2 * 7.5), rel=0.2)
    assert behind[39] == max(behind[70:]) == 0.0


@pytest.mark.parametrize("distance", [0.004, 0.03, 0.2, 0.45])
def test_a_jump_is_followed_without_overshoot(distance: float) -> None:
    drive = Drive(replace(LIMITS, command_hz=50.0))
    path = [drive(distance).positions[0] for _ in range(250)]
    assert max(path) <= distance + 1e-9
    assert path[-1] == distance
    assert reasons(drive(distance)) == []


@pytest.mark.parametrize(
    ("target", "measured", "reason"),
    [
        (None, {}, "no_command"),
        (math.nan, {}, "not_finite"),
        (math.inf, {}, "not_finite"),
        (0.0, {"positions": [math.nan]}, "not_finite"),
        (0.51, {}, "step_from_measured"),
        (0.0, {"positions": [0.6]}, "step_from_measured"),
        (0.0, {"positions": [0.0, 0.0]}, "joint_count"),
        (0.0, {"stamp_s": -0.2}, "measurement_stale"),
        (0.0, {"stamp_s": math.nan}, "measurement_stale"),
        (0.0, {"stamp_s": 9.9}, "measurement_stale"),
    ],
)
def test_rejections(target: float | None, measured: dict[str, object], reason: str) -> None:
    drive = Drive()
    out = drive(target, **measured)
    assert reasons(out) == [reason]
    assert not out.accepted
    assert out.positions == (0.0,)


def test_a_rejected_command_brakes_along_the_stop_path() -> None:
    drive = Drive()
    for k in range(1, 12):
        drive(0.004 * k * k)
    promised = drive.safety.stop_path()
    assert len(promised) > 5
    for position, _ in promised:
        assert drive(math.nan).positions == tuple(position)
    assert drive.safety.at_rest


def test_a_wrong_number_of_joints_is_rejected() -> None:
    safety = SafetyFilter(LIMITS)
    safety.start([0.0], 0.0)
    assert reasons(safety.filter(Command([0.0, 0.0], 0.1), Measurement([0.0], 0.1), 0.1)) == ["joint_count"]


def test_a_stale_command_is_rejected() -> None:
    safety = SafetyFilter(LIMITS)
    safety.start([0.0], 0.0)
    assert reasons(safety.filter(Command([0.0], -0.2), Measurement([0.0], 0.1), 0.1)) == ["command_stale"]


def test_contact_latches_the_stop_until_it_is_released() -> None:
    drive = Drive(replace(LIMITS, axes=(replace(AXIS, contact_residual=5.0),)))
    assert drive(0.01, residuals=[4.9]).accepted
    assert reasons(drive(0.02, residuals=[-5.1])) == ["contact"]
    assert drive.safety.stopped == "contact at joint 0"
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
    assert again[:-1] == first[:-1]
    assert safety.filter(Command([0.02], 0.24), Measurement([0.0], 0.2), 0.24).tick == 2


def test_late_ticks_advance_along_the_stop_path() -> None:
    drive = Drive()
    for k in range(1, 12):
        drive(0.004 * k * k)
    promised = [position for position, _ in drive.safety.stop_path()]
    drive.tick += 2
    out = drive(None)
    assert reasons(out) == ["missed_ticks", "no_command"]
    assert out.events[0].value == 2
    assert out.tick == 14
    assert list(out.positions) == promised[2]


@pytest.mark.parametrize("now", [-3.0, math.nan, -math.inf, math.inf])
def test_a_clock_that_runs_backwards_or_is_not_finite_latches_the_stop(now: float) -> None:
    drive = Drive()
    for k in range(1, 12):
        drive(0.004 * k * k)
    promised = [position for position, _ in drive.safety.stop_path()]
    out = drive.safety.filter(Command([0.5], now), Measurement([0.4], now), now)
    assert reasons(out) == ["clock_jump", "stopped"]
    assert list(out.positions) == promised[0]


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
    drive(0.01)
    with pytest.raises(ValueError, match="not come to rest"):
        drive.safety.start([0.0], 1.0)


def test_end_effector_position_of_two_known_arms() -> None:
    """Franka's ready pose with the standard hand, and a UR5e stretched out at zero: the makers' own numbers."""
    panda, ur = load_limits(ROBOTS / "franka_panda.yaml"), load_limits(ROBOTS / "ur5e.yaml")
    assert panda.workspace is not None
    assert ur.workspace is not None
    point = EndEffectorPoint(panda.workspace.frames, panda.workspace.end_effector, panda.axes)
    assert point(READY) == pytest.approx((0.3069, 0.0, 0.4869), abs=1e-4)
    point = EndEffectorPoint(ur.workspace.frames, ur.workspace.end_effector, ur.axes)
    assert point([0.0] * 6) == pytest.approx((-0.8172, -0.2329, 0.0628), abs=1e-9)


def test_a_command_that_would_leave_the_workspace_is_rejected() -> None:
    limits = load_limits(ROBOTS / "franka_panda.yaml")
    safety = SafetyFilter(limits)
    safety.start(READY, 0.0)
    outs = []
    for tick in range(1, 150):
        now = tick / limits.command_hz
        target = [READY[0] + 0.012 * tick, *READY[1:]]  # turns the base: y grows until the face at 0.6 m
        target[1] += 0.007 * tick
        outs.append(safety.filter(Command(target, now), Measurement(target, now, [0.0] * 7), now))
    seen = [reason for out in outs for reason in reasons(out)]
    assert "workspace" in seen


@pytest.mark.parametrize("path", sorted(ROBOTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_robot_file_loads_and_can_start(path: Path) -> None:
    limits = load_limits(path)
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
        load_limits(tmp_path / "absent.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ValueError, match="no 'limits' section"):
        load_limits(tmp_path / "empty.yaml")
