"""Properties of the safety filter: for any input, the output keeps every limit and can always be stopped."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from real_robot.safety.commands import Command, Measurement, SafeCommand
from real_robot.safety.filter import SafetyFilter
from real_robot.safety.kinematics import EndEffectorPoint, max_travel
from real_robot.safety.limits import RobotLimits, load_limits
from real_robot.safety.stopping import Axis, AxisLimits

# With run-time type checking, beartype draws at random which items of a tuple it checks.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
ROBOTS = Path(__file__).parents[2] / "configs" / "robots"
PANDA = load_limits(ROBOTS / "franka_panda.yaml")
READY = [0.0, -math.pi / 4, 0.0, -3 * math.pi / 4, 0.0, math.pi / 2, math.pi / 4]
STREAMS = int(os.environ.get("SAFETY_STREAMS", "1000"))
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


def run(limits: RobotLimits, attack: Attack, start: list[float]) -> tuple[list[list[float]], list[SafeCommand]]:
    """Positions at every tick of the grid (missed ticks included, from the stop path) and the filter's answers."""
    safety = SafetyFilter(limits)
    safety.start(start, 0.0)
    path, answers, measured = [list(start)], [], list(start)
    for tick, sent in attack_stream(limits, attack, start):
        now = tick / limits.command_hz
        ahead = [positions for positions, _ in safety.stop_path()]
        while len(path) < tick:
            path.append(ahead.pop(0) if ahead else path[-1])
        command = None if sent is None else Command(sent, now)
        out = safety.filter(command, Measurement(measured, now), now)
        assert out.tick == tick == len(path)
        path.append(list(out.positions))
        answers.append(out)
        measured = [attack.lag * m + (1.0 - attack.lag) * q for m, q in zip(measured, out.positions, strict=True)]
    path += [positions for positions, _ in safety.stop_path()]
    return [*path, path[-1], path[-1]], answers


def assert_within_limits(limits: RobotLimits, path: list[list[float]]) -> None:
    """From the positions alone. The allowance is for the rounding of positions near 3, which is 4e-16, over dt^n."""
    hz = limits.command_hz
    for axis, column in zip(limits.axes, zip(*path, strict=True), strict=True):
        low, high = axis.position
        assert low - 2e-9 <= min(column)
        assert max(column) <= high + 2e-9
        values = [column[0]] * 3 + list(column)
        for limit, order in ((axis.velocity, 1), (axis.acceleration, 2), (axis.jerk, 3)):
            values = [(b - a) * hz for a, b in pairwise(values)]
            allowance = 1.2e-14 * hz**order + 2e-9
            assert max(map(abs, values)) <= limit * (1 + 1e-9) + allowance, (axis.name, order)


@stream_settings
@given(limits=arms(), attack=attacks, where=st.floats(0.0, 1.0))
def test_no_stream_of_commands_exceeds_a_limit(limits: RobotLimits, attack: Attack, where: float) -> None:
    start = [min(high, low + where * (high - low)) for low, high in (axis.position for axis in limits.axes)]
    path, answers = run(limits, attack, start)
    assert_within_limits(limits, path)
    for out in answers:
        assert out.accepted or out.events


@stream_settings
@given(limits=arms(), speed=st.floats(-1.0, 1.0), accel=st.floats(-1.0, 1.0), share=st.floats(0.0, 1.0))
def test_the_closed_form_of_a_stop_agrees_with_stepping(
    limits: RobotLimits, speed: float, accel: float, share: float
) -> None:
    for axis in limits.axes:
        model, dt = Axis(axis, 1.0 / limits.command_hz), 1.0 / limits.command_hz
        v, a = speed * axis.velocity, accel * axis.acceleration
        positions, speeds, ways = [0.0], [abs(v)], [0.0]
        begin = v, a
        # an acceleration of one whole step of jerk is not ramped out in one: planning leaves 1e-6 of it unused
        while abs(v) * dt > 1e-14 or abs(a) > axis.jerk * dt * (1.0 - 0.9e-6):
            a = model.brake(v, a)
            v += a * dt
            positions.append(positions[-1] + v * dt)
            speeds.append(abs(v))
            ways.append(ways[-1] + abs(v) * dt)
        *whole, fastest, stop_ticks, curve = model.stop(*begin)
        last = len(positions) - 1
        assert stop_ticks >= last
        assert whole == pytest.approx([min(positions), max(positions), positions[-1], ways[-1]], abs=1e-11)
        assert fastest == pytest.approx(max(speeds), rel=1e-9)
        for ticks in {min(1, last), round(share * last), last} - {0}:
            assert model.along(curve, ticks) == pytest.approx((positions[ticks], ways[ticks]), abs=1e-11)
        assert model.along(curve, last + 1) == pytest.approx((positions[-1], ways[-1]), abs=1e-11)


@stream_settings
@given(limits=arms(), where=st.floats(0.0, 1.0), speed=st.floats(-1.0, 1.0), accel=st.floats(-1.0, 1.0))
def test_the_bound_of_a_stop_agrees_with_the_stop(
    limits: RobotLimits, where: float, speed: float, accel: float
) -> None:
    """The bound and the stop agree on the limits, and the bound is never below the path length."""
    for axis in limits.axes:
        model, (low, high) = Axis(axis, 1.0 / limits.command_hz), axis.position
        position, v, a = low + where * (high - low), speed * axis.velocity, accel * axis.acceleration
        lowest, highest, _, way, fastest, *_ = model.stop(v, a)
        within = position + highest <= high and position + lowest >= low and fastest <= axis.velocity
        answer = model.stopping_distance(position, v, a, 0.0)
        assert (answer is not None) == within
        assert answer is None or answer >= way - 1e-12


@settings(stream_settings, max_examples=max(200, STREAMS // 10))
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
    safety, path = SafetyFilter(limits), [READY]
    safety.start(READY, 0.0)
    for tick in range(1, 121):
        if tick % period == 1:
            target = [q + rng.uniform(-swing, swing) for q in READY]
        now = tick / limits.command_hz
        path.append(list(safety.filter(Command(target, now), Measurement(path[-1], now), now).positions))
    path += [positions for positions, _ in safety.stop_path()]
    assert_within_limits(limits, path)
    for joints in path:
        assert max(abs(x - c) for x, c in zip(point(joints), center, strict=True)) <= margin + 1e-9


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


@settings(stream_settings, max_examples=max(100, STREAMS // 5))
@given(limits=arms(), attack=attacks)
def test_filtering_filtered_commands_changes_nothing(limits: RobotLimits, attack: Attack) -> None:
    start = [0.0] * len(limits.axes)
    path, _ = run(limits, attack, start)
    again = SafetyFilter(limits)
    again.start(start, 0.0)
    for tick, positions in enumerate(path[1:], 1):
        now = tick / limits.command_hz
        out = again.filter(Command(positions, now), Measurement(positions, now), now)
        assert out.accepted
        assert out.positions == pytest.approx(positions, abs=1e-9)


@settings(stream_settings, max_examples=max(100, STREAMS // 5))
@given(limits=arms(), attack=attacks, stop_at=st.integers(0, 30))
def test_after_a_latched_stop_the_arm_brakes_and_stays_at_rest(
    limits: RobotLimits, attack: Attack, stop_at: int
) -> None:
    start = [0.0] * len(limits.axes)
    safety = SafetyFilter(limits)
    safety.start(start, 0.0)
    path, coming = [start], None
    for i, (tick, sent) in enumerate(attack_stream(limits, replace(attack, late=0.0), start)):
        if i == stop_at:
            coming = [positions for positions, _ in safety.stop_path()]
            safety.stop("test")
        now = tick / limits.command_hz
        out = safety.filter(None if sent is None else Command(sent, now), Measurement(path[-1], now), now)
        path.append(list(out.positions))
        if coming is not None:
            assert not out.accepted
            assert list(out.positions) == (coming.pop(0) if coming else path[-2])
    assert_within_limits(limits, path)


@settings(stream_settings, max_examples=max(100, STREAMS // 5))
@given(limits=arms(), attack=attacks, lost=st.sampled_from(["command", "commands_frozen", "measurements_frozen"]))
def test_lost_input_leads_to_a_hold_within_one_watchdog_period(limits: RobotLimits, attack: Attack, lost: str) -> None:
    start = [0.0] * len(limits.axes)
    safety = SafetyFilter(limits)
    safety.start(start, 0.0)
    tick = 0
    position = list(start)
    for tick, sent in attack_stream(limits, replace(attack, late=0.0), start):
        now = tick / limits.command_hz
        command = None if sent is None else Command(sent, now)
        position = list(safety.filter(command, Measurement(position, now), now).positions)
    lost_at = tick / limits.command_hz
    watchdog_s = 0.0 if lost == "command" else limits.max_command_age_s
    while tick / limits.command_hz <= lost_at + watchdog_s + 0.5 / limits.command_hz:
        tick += 1
        now = tick / limits.command_hz
        command = None if lost == "command" else Command(position, lost_at if lost == "commands_frozen" else now)
        measured = Measurement(position, lost_at if lost == "measurements_frozen" else now)
        out = safety.filter(command, measured, now)
    assert not out.accepted
