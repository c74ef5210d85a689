"""Properties of the safety filter: for any input, the output keeps every limit and can always be stopped."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from real_robot.control.trajectory import cubic
from real_robot.robot_file import load_robot
from real_robot.safety.commands import Command, Measurement, PathPoint
from real_robot.safety.filter import SafetyFilter
from real_robot.safety.kinematics import EndEffectorPoint, max_travel
from real_robot.safety.limits import RobotLimits
from real_robot.safety.stopping import Axis, AxisLimits, along

# With run-time type checking, beartype draws at random which items of a tuple it checks.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
ROBOTS = Path(__file__).parents[2] / "configs" / "robots"
PANDA = load_robot(ROBOTS / "franka_panda.yaml").limits
READY = [0.0, -math.pi / 4, 0.0, -3 * math.pi / 4, 0.0, math.pi / 2, math.pi / 4]
STREAMS = int(os.environ.get("SAFETY_STREAMS", "100"))
NASTY = (math.nan, math.inf, -math.inf, 1e300, -1e300, 1e-320, 0.0)

stream_settings = settings(
    max_examples=STREAMS, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def arms(draw: st.DrawFn) -> RobotLimits:
    """One to three joints, with slow to fast limits, at 20 to 1000 Hz."""
    rate = draw(st.sampled_from([20.0, 50.0, 100.0, 250.0, 1000.0]))
    axes = []
    for i in range(draw(st.integers(1, 3))):
        accel = 10 ** draw(st.floats(0.0, 1.3))
        axis = AxisLimits(
            name=f"joint_{i}",
            unit="rad",
            position=(draw(st.floats(-3.0, -0.5)), draw(st.floats(0.5, 3.0))),
            velocity=accel * 10 ** draw(st.floats(-1.5, -0.4)),
            acceleration=accel,
            jerk=accel * 10 ** draw(st.floats(0.7, 3.0)),
            step_from_measured=draw(st.sampled_from([0.05, 0.5, 100.0])),
        )
        axes.append(axis)
    return RobotLimits(
        command_hz=rate, axes=tuple(axes), workspace=None, max_command_age_s=0.1, max_measurement_age_s=0.1
    )


@dataclass(frozen=True)
class Attack:
    """A stream of commands with faults; everything random in it derives from ``seed``."""

    seed: int
    ticks: int
    jump: float  # chance per tick that a target jumps anywhere, beyond the limits too
    edge: float  # chance that it jumps exactly onto a position limit
    poison: float  # chance of a number that is not finite
    silence: float  # chance that no command comes
    lag: float  # how far the measurement trails the command, as a fraction
    late: float  # chance that the call comes some periods late


attacks = st.builds(
    Attack,
    seed=st.integers(0, 2**32 - 1),
    ticks=st.integers(5, 60),
    jump=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    edge=st.sampled_from([0.0, 0.1, 0.5]),
    poison=st.sampled_from([0.0, 0.0, 0.02, 0.2]),
    silence=st.sampled_from([0.0, 0.0, 0.1]),
    lag=st.sampled_from([0.0, 0.3, 1.0]),
    late=st.sampled_from([0.0, 0.0, 0.1]),
)


def attack_stream(limits: RobotLimits, attack: Attack, start: list[float]):
    """Yields (tick, command or None, measurement as a function of the last output)."""
    rng = random.Random(attack.seed)
    target, drift = list(start), [0.0] * len(start)
    tick = 0
    for _ in range(attack.ticks):
        tick += rng.randint(2, 5) if rng.random() < attack.late else 1
        for i, axis in enumerate(limits.axes):
            low, high = axis.position
            if rng.random() < attack.edge:
                target[i] = rng.choice([low, high])
            elif rng.random() < attack.jump:
                target[i] = rng.uniform(low - 0.5, high + 0.5)
                drift[i] = rng.uniform(-2.0, 2.0) * axis.velocity / limits.command_hz
            target[i] += drift[i]
        sent = [rng.choice(NASTY) if rng.random() < attack.poison else q for q in target]
        yield tick, (None if rng.random() < attack.silence else sent)


def started(limits: RobotLimits, start: list[float], lead_s: float = 0.0) -> SafetyFilter:
    """A filter that may move at the next tick, number 1: the time in which an arm is taken up is skipped."""
    probe, safety = SafetyFilter(limits, lead_s=lead_s), SafetyFilter(limits, lead_s=lead_s)
    probe.start(start, 0.0)
    waited = probe.tick - probe.lead
    safety.start(start, -waited / limits.command_hz)
    safety._sent.time_s, safety._sent.now = 0.0, waited
    return safety


def check_message(limits: RobotLimits, path: Sequence[PathPoint]) -> None:
    """Between each two points the motion is one cubic that keeps every limit; its end is a stop."""
    assert not any(path[-1].velocities)
    assert not any(path[-1].accelerations)
    for before, after in pairwise(path):
        h = after.time_s - before.time_s
        assert h > 0
        for j, axis in enumerate(limits.axes):
            (p, v, a), (q, w, b) = ([values[j] for values in point[1:]] for point in (before, after))
            c2, c3 = (3 * (q - p) / h - 2 * v - w) / h, (v + w - 2 * (q - p) / h) / h**2
            rounding = 2e-14 / h**3 + 1e-6
            assert 6 * abs(c3) <= axis.jerk * (1 + 1e-6) + rounding, axis
            assert 2 * c2 == pytest.approx(a, abs=rounding * h), "the cubic has the acceleration of the point"
            assert max(abs(a), abs(b)) <= axis.acceleration * (1 + 1e-6)
            turn = -a / (6 * c3) if a * b < 0 and c3 else 0.0
            fastest = max(abs(v), abs(w), abs(v + a * turn + 3 * c3 * turn * turn))
            assert fastest <= axis.velocity * (1 + 1e-6) + rounding * h * h
            assert axis.position[0] - 1e-8 <= q <= axis.position[1] + 1e-8


def check_agreement(old: Sequence[PathPoint], new: Sequence[PathPoint], until_s: float) -> None:
    """Up to ``until_s`` both messages are the same motion, so it does not matter which of them arrived."""
    points = {round(point.time_s, 6): point for point in new}
    for point in old:
        other = points.get(round(point.time_s, 6))
        if other is not None and point.time_s <= until_s + 1e-9:
            assert other.positions == pytest.approx(point.positions, abs=1e-12)
            assert other.velocities == pytest.approx(point.velocities, abs=1e-9)


@stream_settings
@given(limits=arms(), attack=attacks, where=st.floats(0.0, 1.0), lead=st.sampled_from([0.0, 0.1]))
def test_no_stream_of_commands_exceeds_a_limit_at_the_controller(
    limits: RobotLimits, attack: Attack, where: float, lead: float
) -> None:
    start = [min(high, low + where * (high - low)) for low, high in (axis.position for axis in limits.axes)]
    safety = started(limits, start, lead)
    before: list[PathPoint] = []
    for i, (tick, sent) in enumerate(attack_stream(limits, attack, start)):
        now = tick / limits.command_hz
        measured = Measurement(safety.sent_position(now), now)
        decided_s = safety.last_point_s
        out = safety.filter(None if sent is None else Command(sent, now), measured, now)
        assert out.accepted or out.events
        if safety.lost:
            break
        path = safety.path()
        if i % 5 == 4:
            check_message(limits, path)
        if before and not out.urgent:
            check_agreement(before, path, decided_s)
        before = path


@stream_settings
@given(limits=arms(), speed=st.floats(-1.0, 1.0), accel=st.floats(-1.0, 1.0), share=st.floats(0.0, 1.0))
def test_a_stop_agrees_with_stepping(limits: RobotLimits, speed: float, accel: float, share: float) -> None:
    for axis in limits.axes:
        model = Axis(axis, 1.0 / limits.command_hz)
        u, w = speed * model.max_speed, accel * model.max_accel
        stop = model.stop(u, w)
        assert stop is not None
        (first, n1, n2, last, n3), lowest, highest, end, distance, fastest = stop
        q, speeds, places, ticks = 0.0, [abs(u)], [0.0], [(0.0, u, w)]
        for jerk in [first] * n1 + [0.0] * n2 + [last] * n3:
            assert abs(jerk) <= model.max_jerk
            for t in (0.25, 0.5, 0.75, 1.0):
                places.append(q + t * (u + t * (w / 2 + t * jerk / 6)))
                speeds.append(abs(u + t * (w + t * jerk / 2)))
            q, u, w = q + u + w / 2 + jerk / 6, u + w + jerk / 2, w + jerk
            ticks.append((q, u, w))
            assert abs(w) <= model.max_accel * (1 + 1e-9)
        assert (u, w) == pytest.approx((0.0, 0.0), abs=1e-9 * max(model.max_speed, model.max_accel))
        assert end == pytest.approx(q, abs=1e-12)
        assert lowest - 1e-12 <= min(places)
        assert max(places) <= highest + 1e-12
        assert max(speeds) <= fastest * (1 + 1e-9) + 1e-15
        assert sum(abs(b - a) for a, b in pairwise(places)) <= distance + 1e-12
        k = round(share * (len(ticks) - 1))
        at = along(stop[0], speed * model.max_speed, accel * model.max_accel, k)
        assert at == pytest.approx(ticks[k], abs=1e-9)


@settings(stream_settings, max_examples=max(3, STREAMS // 10))
@given(
    seed=st.integers(0, 2**32 - 1),
    margin=st.floats(0.02, 0.3),
    swing=st.sampled_from([0.1, 0.5, 1.5]),
    period=st.integers(3, 60),
)
def test_the_end_effector_stays_in_the_box(seed: int, margin: float, swing: float, period: int) -> None:
    """Motions that would leave a box of any size around the end effector."""
    assert PANDA.workspace is not None
    point = EndEffectorPoint(PANDA.workspace.frames, PANDA.workspace.end_effector, PANDA.axes)
    center = point(READY)
    box = replace(PANDA.workspace, low=tuple(x - margin for x in center), high=tuple(x + margin for x in center))
    axes = tuple(replace(axis, contact_residual=None, step_from_measured=10.0) for axis in PANDA.axes)
    limits = replace(PANDA, workspace=box, axes=axes)
    rng = random.Random(seed)
    safety = SafetyFilter(limits)
    safety.start(READY, 0.0)
    for tick in range(1, 161):
        if tick % period == 1:
            target = [q + rng.uniform(-swing, swing) for q in READY]
        now = tick / limits.command_hz
        safety.filter(Command(target, now), Measurement(safety.sent_position(now), now), now)
        if tick % 10:
            continue
        path = safety.path()
        check_message(limits, path)
        for before, after in pairwise(path):
            h = after.time_s - before.time_s
            for t in (0.25 * h, 0.5 * h, 0.75 * h, h):
                joints = cubic(np.array(before[1:]), np.array(after[1:]), t, h)[0].tolist()
                assert max(abs(x - c) for x, c in zip(point(joints), center, strict=True)) <= margin + 1e-9


@settings(stream_settings, max_examples=max(10, STREAMS // 10))
@given(seed=st.integers(0, 2**32 - 1), margin=st.floats(0.05, 0.3))
def test_an_arm_that_was_driven_to_a_face_can_leave_it(seed: int, margin: float) -> None:
    """From wherever commands that lead out of the box bring it; the way back is straight for the end effector."""
    assert PANDA.workspace is not None
    point = EndEffectorPoint(PANDA.workspace.frames, PANDA.workspace.end_effector, PANDA.axes)
    center = np.array(point(READY))
    box = replace(PANDA.workspace, low=tuple(center - margin), high=tuple(center + margin))
    axes = tuple(replace(axis, contact_residual=None) for axis in PANDA.axes)
    safety, rng = SafetyFilter(replace(PANDA, workspace=box, axes=axes, collisions=None)), random.Random(seed)
    safety.start(READY, 0.0)

    def back() -> list[float]:
        joints = np.array(safety.positions)
        moved = [point((joints + 1e-6 * one).tolist()) for one in np.eye(len(joints))]
        jacobian = (np.array(moved) - point(joints.tolist())).T / 1e-6
        step = np.linalg.pinv(jacobian, rcond=0.1) @ (center - point(joints.tolist()))
        return (joints + 0.2 * step).tolist()

    away = [q + rng.uniform(-1.0, 1.0) for q in READY]
    for tick in range(1, 501):
        now = tick / PANDA.command_hz
        target = away if tick <= 100 else back()
        safety.filter(Command(target, now), Measurement(safety.sent_position(now), now), now)
    assert np.abs(point(safety.positions) - center).max() < 0.5 * margin


@stream_settings
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([0.01, 0.1, 0.5]))
def test_the_end_effector_never_exceeds_the_bound_of_its_travel(seed: int, size: float) -> None:
    assert PANDA.workspace is not None
    point = EndEffectorPoint(PANDA.workspace.frames, PANDA.workspace.end_effector, PANDA.axes)
    rng = random.Random(seed)
    start = [rng.uniform(*axis.position) for axis in PANDA.axes]
    steps = [rng.uniform(-size, size) for _ in start]
    place, levers = point.position_and_levers(start)
    way = max_travel(levers, [abs(step) for step in steps])
    went, before = 0.0, place
    for part in range(1, 21):
        at = point([q + step * part / 20 for q, step in zip(start, steps, strict=True)])
        went, before = went + math.dist(before, at), at
    assert went <= way + 1e-12


@settings(stream_settings, max_examples=max(10, STREAMS // 5))
@given(limits=arms(), attack=attacks, stop_at=st.integers(0, 30), lead=st.sampled_from([0.0, 0.1]))
def test_after_a_latched_stop_the_arm_brakes_and_stays_at_rest(
    limits: RobotLimits, attack: Attack, stop_at: int, lead: float
) -> None:
    start = [0.0] * len(limits.axes)
    safety = started(limits, start, lead)
    held, stopped = None, False
    for i, (tick, sent) in enumerate(attack_stream(limits, replace(attack, late=0.0), start)):
        stopped = stopped or i == stop_at
        if i == stop_at:
            safety.stop("test")
        now = tick / limits.command_hz
        measured = Measurement(safety.sent_position(now), now)
        out = safety.filter(None if sent is None else Command(sent, now), measured, now)
        if i in (stop_at, stop_at + 5):
            check_message(limits, safety.path())
        if stopped:
            assert not out.accepted
            assert out.urgent == (i == stop_at)
        if stopped and safety.at_rest:
            held = held or out.positions
            assert out.positions == held


@settings(stream_settings, max_examples=max(10, STREAMS // 5))
@given(limits=arms(), attack=attacks, lost=st.sampled_from(["command", "commands_frozen", "measurements_frozen"]))
def test_lost_input_leads_to_a_hold_within_one_watchdog_period(limits: RobotLimits, attack: Attack, lost: str) -> None:
    start = [0.0] * len(limits.axes)
    safety = started(limits, start)
    tick = 0
    for tick, sent in attack_stream(limits, replace(attack, late=0.0), start):
        now = tick / limits.command_hz
        safety.filter(None if sent is None else Command(sent, now), Measurement(safety.positions, now), now)
    lost_at = tick / limits.command_hz
    watchdog_s = 0.0 if lost == "command" else limits.max_command_age_s
    while tick / limits.command_hz <= lost_at + watchdog_s + 0.5 / limits.command_hz:
        tick += 1
        now = tick / limits.command_hz
        stamp = lost_at if lost == "commands_frozen" else now
        command = None if lost == "command" else Command(list(safety.positions), stamp)
        measured = Measurement(safety.positions, lost_at if lost == "measurements_frozen" else now)
        out = safety.filter(command, measured, now)
    assert not out.accepted
