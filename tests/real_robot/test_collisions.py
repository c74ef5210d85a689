"""Distances of links and obstacles, their bound, and that no motion that is sent comes closer than the margin."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from real_robot.control.trajectory import cubic
from real_robot.robot_file import load_robot
from real_robot.safety.collisions import Capsule, CollisionClearance, Collisions, Obstacle
from real_robot.safety.commands import Command, Measurement
from real_robot.safety.filter import SafetyFilter
from real_robot.safety.kinematics import JointFrame, rotation
from real_robot.safety.limits import RobotLimits, parse_limits
from real_robot.safety.stopping import AxisLimits
from tests.real_robot.test_safety_streams import READY, ROBOTS, STREAMS, stream_settings

PANDA = load_robot(ROBOTS / "franka_panda.yaml").limits
OBSTACLES = (
    Obstacle(kind="plane", position=(0.0, 0.0, -0.05)),
    Obstacle(kind="box", position=(0.6, 0.3, 0.3), rpy=(0.0, 0.0, 0.5), size=(0.2, 0.1, 0.6)),
    Obstacle(kind="sphere", position=(0.5, -0.4, 0.6), size=(0.1, 0.1, 0.1)),
)


def panda() -> RobotLimits:
    """Obstacles instead of a box around the end effector, and nothing that stops the arm for other reasons."""
    assert PANDA.collisions is not None
    axes = tuple(replace(axis, contact_residual=None, step_from_measured=10.0) for axis in PANDA.axes)
    return replace(PANDA, axes=axes, workspace=None, collisions=replace(PANDA.collisions, obstacles=OBSTACLES))


def clearance(limits: RobotLimits) -> CollisionClearance:
    assert limits.collisions is not None
    return CollisionClearance(limits.collisions, limits.axes)


def test_distances_by_hand() -> None:
    """A slide, then a hinge 0.3 m above the base; at zero a rod of 0.5 m lies along y, 50 mm thick on each side."""
    axes = [
        AxisLimits(name=name, unit=unit, position=(-1.0, 1.0), velocity=1.0, acceleration=5.0, jerk=50.0,
                   step_from_measured=0.1)
        for name, unit in (("lift", "m"), ("turn", "rad"))
    ]  # fmt: skip
    frames = (JointFrame(joint="lift", xyz=(0.0, 0.0, 0.3)), JointFrame(joint="turn", xyz=(0.1, 0.0, 0.0)))
    rod = Capsule(joint="turn", start=(0.0, 0.0, 0.0), end=(0.0, 0.5, 0.0), radius=0.05)
    for obstacle, lift, turn, expected in (
        (Obstacle(kind="plane", position=(0.0, 0.0, 0.0)), 0.1, 1.0, 0.35),
        (Obstacle(kind="plane", position=(1.2, 0.0, 0.0), rpy=(0.0, -math.pi / 2, 0.0)), 0.0, -math.pi / 2, 0.55),
        (Obstacle(kind="sphere", position=(0.1, 1.0, 0.3), size=(0.2, 0.2, 0.2)), 0.0, 0.0, 0.25),
        (Obstacle(kind="box", position=(0.1, 1.0, 0.3), size=(0.2, 0.4, 0.2)), 0.0, 0.0, 0.25),
        (Obstacle(kind="box", position=(0.1, 1.0, 0.3), size=(0.2, 0.4, 0.2)), 0.5, 0.0, math.hypot(0.3, 0.4) - 0.05),
    ):  # fmt: skip
        model = Collisions(margin=0.02, chains=(frames,), capsules=(rod,), obstacles=(obstacle,))
        assert CollisionClearance(model, axes).at([lift, turn])[0] + 0.02 == pytest.approx(expected, abs=1e-5)


def test_no_start_with_a_link_through_a_box_of_which_mujoco_says_that_it_is_clear() -> None:
    axes = [
        AxisLimits(name=name, unit="rad", position=(-1.0, 1.0), velocity=1.0, acceleration=5.0, jerk=50.0,
                   step_from_measured=0.1)
        for name in ("a", "b")
    ]  # fmt: skip
    frames = tuple(JointFrame(joint=axis.name, xyz=(0.0, 0.0, 0.0)) for axis in axes)
    rod = Capsule(joint="b", start=(-0.14, 0.11, 0.13), end=(0.09, -0.05, 0.21), radius=0.06)
    box = Obstacle(kind="box", position=(-0.02, 0.02, 0.03), rpy=(-0.5, 0.1, 1.9), size=(0.1, 0.52, 0.39))
    check = CollisionClearance(Collisions(margin=0.0, chains=(frames,), capsules=(rod,), obstacles=(box,)), axes)
    assert check.at([0.0, 0.0])[0] > 0.003
    assert "b (links[0]) and box (obstacles[0]) are 0 mm apart" in check.start_problem([0.0, 0.0])
    far = replace(box, position=(0.0, 0.0, 1.0))
    apart = Collisions(margin=0.0, chains=(frames,), capsules=(rod,), obstacles=(far,))
    assert CollisionClearance(apart, axes).start_problem([0.0, 0.0]) == ""


def test_capsules_are_where_the_kinematic_chain_puts_them() -> None:
    """Against points on the capsules' lines, transformed here: never nearer than the distance, and as near as they lie
    dense."""
    limits = panda()
    check, model = clearance(limits), limits.collisions
    assert model is not None
    rng = random.Random(0)
    for _ in range(20):
        joints = [rng.uniform(*axis.position) for axis in limits.axes]
        lines = {}
        turn, origin = np.eye(3), np.zeros(3)
        poses = {"base": (turn, origin)}
        for frame, q in zip(model.chains[0], joints, strict=True):
            origin = origin + turn @ frame.xyz
            turn = turn @ np.reshape(rotation(frame.rpy), (3, 3)) @ np.reshape(rotation((0.0, 0.0, q)), (3, 3))
            poses[frame.joint] = (turn, origin)
        for i, capsule in enumerate(model.capsules):
            turn, origin = poses[capsule.joint]
            at = np.linspace(capsule.start, capsule.end, 60)
            lines[f"{capsule.joint} (links[{i}])"] = (at @ turn.T + origin, capsule.radius)
        for (first, second), left in zip(check._names, check.at(joints), strict=True):
            if second in lines:
                (a, r), (b, s) = lines[first], lines[second]
                sampled = np.linalg.norm(a[:, None] - b[None], axis=-1).min() - r - s
                assert -1e-9 <= min(sampled, 0.9) - min(left + model.margin, 0.9) < 0.003


@settings(stream_settings, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([0.01, 0.1, 0.5]))
def test_no_distance_changes_more_than_the_bound(seed: int, size: float) -> None:
    check, rng = clearance(panda()), random.Random(seed)
    start = [rng.uniform(*axis.position) for axis in PANDA.axes]
    steps = np.array([rng.uniform(-size, size) for _ in start])
    change = np.abs(check.at(start) - check.at([q + step for q, step in zip(start, steps, strict=True)]))
    assert (change <= check._travel @ np.abs(steps) + 1e-6).all()


def test_what_is_not_near_keeps_its_distance_on_the_way() -> None:
    """Along a random walk, on which most pairs are not looked at again."""
    check, every, rng = clearance(panda()), clearance(panda()), random.Random(1)
    joints, named = list(READY), []
    for _ in range(300):
        joints = [
            min(max(q + rng.uniform(-0.05, 0.05), axis.position[0]), axis.position[1])
            for q, axis in zip(joints, PANDA.axes, strict=True)
        ]
        sweeps = [rng.uniform(0.0, 0.1) for _ in joints]
        near = check.near(joints, sweeps)
        named.append(0 if near is None else len(near[0]))
        moved = [q + rng.choice((-1.0, 1.0)) * sweep for q, sweep in zip(joints, sweeps, strict=True)]
        after = every.at(moved)
        assert near is None or near[1] == pytest.approx(every.at(joints)[near[0]])
        assert (after >= 0.0)[[i for i in range(len(after)) if near is None or i not in near[0]]].all()
    assert 0 < np.mean(named) < 0.5 * len(after)


def drive(
    limits: RobotLimits, seed: int, swing: float, period: int, ready: Sequence[float] = READY
) -> tuple[float, set[str]]:
    """Random jumps, late ticks and a stop: the least clearance of all that was sent, and what the filter named."""
    check, rng, safety = clearance(limits), random.Random(seed), SafetyFilter(limits, lead_s=0.1)
    safety.start(ready, 0.0)
    least, named, tick = math.inf, set(), 0
    stop_at = rng.randrange(80, 200)
    target = list(ready)
    for step in range(1, 151):
        tick += rng.randint(2, 3) if rng.random() < 0.02 else 1
        if step % period == 1:
            target = [q + rng.uniform(-swing, swing) for q in ready]
        if step == stop_at:
            safety.stop("test")
        now = tick / limits.command_hz
        out = safety.filter(Command(target, now), Measurement(safety.sent_position(now), now), now)
        named |= {event.reason for event in out.events}
        if step % 10 and not out.urgent:
            continue
        for before, after in pairwise(safety.path()):
            h = after.time_s - before.time_s
            for t in (0.25 * h, 0.5 * h, 0.75 * h, h):
                joints = cubic(np.array(before[1:]), np.array(after[1:]), t, h)[0].tolist()
                least = min(least, check.least(check.at(joints)))
    return least, named


@settings(stream_settings, max_examples=max(10, STREAMS // 10))
@given(seed=st.integers(0, 2**32 - 1), swing=st.sampled_from([0.3, 1.0, 2.5]), period=st.sampled_from([3, 10, 60]))
def test_no_motion_comes_closer_than_the_margin_braking_included(seed: int, swing: float, period: int) -> None:
    least, _ = drive(panda(), seed, swing, period)
    assert least >= -1e-6


def test_a_command_that_would_collide_is_rejected_and_comes_close() -> None:
    least, named = zip(*(drive(panda(), seed, swing=2.5, period=10) for seed in range(3)), strict=True)
    assert any("collision" in reasons for reasons in named)
    assert min(least) < 0.02


def two_pandas() -> dict:
    """The limits section of two arms that face each other, 0.9 m apart; the right one's joints are named right_..."""
    section = yaml.safe_load((ROBOTS / "franka_panda.yaml").read_text())["limits"]
    right = yaml.safe_load(yaml.safe_dump(section).replace("panda_joint", "right_joint"))
    section["joints"] |= right["joints"]
    for arm in (section["workspace"], right["workspace"]):
        arm["low"], arm["high"] = ["-1 m", "-1 m", "0 m"], ["2 m", "1 m", "1.5 m"]
    right["workspace"]["chain"][0] |= {"xyz": ["0.9 m", "0 m", "0.333 m"], "rpy": ["0 deg", "0 deg", "180 deg"]}
    section["more_arms"] = [right["workspace"]]
    section["collisions"]["links"] += [link for link in right["collisions"]["links"] if link["joint"] != "base"]
    for joint in section["joints"].values():
        del joint["contact_residual"]
        joint["step_from_measured"] = "10 rad"
    return section


def test_two_arms_have_one_filter_and_keep_apart() -> None:
    limits = parse_limits(two_pandas())
    apart = [0.6, -1.2, 0.0, -2.6, 0.0, math.pi / 2, math.pi / 4]
    check = clearance(limits)
    assert check.least(check.at([*apart, *apart])) > 0.0
    assert any("panda" in a and "right" in b for a, b in check._names)
    least, named = zip(*(drive(limits, seed, 1.5, 60, [*apart, *apart]) for seed in range(3)), strict=True)
    assert min(least) >= -1e-6
    assert any("collision" in reasons for reasons in named)


def test_a_joint_belongs_to_one_arm() -> None:
    section = two_pandas()
    section["more_arms"][0]["chain"][2]["joint"] = "panda_joint3"
    with pytest.raises(ValueError, match=r"\.more_arms\[0\]\.chain\[2\]\.joint: 'panda_joint3' is in a chain already"):
        parse_limits(section)


def test_an_arm_within_the_margin_may_not_start() -> None:
    folded = [0.0, -1.7, 0.0, -3.0, 0.0, 0.0, 0.0]
    with pytest.raises(
        ValueError, match=r"mm apart, must be 21 mm \(margin of collisions\); move the arm away by hand"
    ):
        SafetyFilter(panda()).start(folded, 0.0)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("margin",), "0 mm", r"\.collisions\.margin: got '0 mm'; it must be above zero"),
        (("links", 1, "joint"), "panda_joint9", r"links\[1\]\.joint: 'panda_joint9' is not one of .*did you mean"),
        (("links", 1, "radius"), 0.1, r"links\[1\]\.radius: got 0\.1; expected a number with its unit"),
        (("also",), [["panda_joint5"]], r"also\[0\]: got .* expected a list of 2"),
        (("obstacles",), [{"kind": "wall"}], r"obstacles\[0\]\.kind: 'wall' is not one of"),
        (("obstacles",), [{"kind": "box", "position": ["0 m"] * 3}], r"obstacles\[0\]: missing \['size'\]"),
    ],
)
def test_errors_in_collisions_are_named_with_their_place(place: tuple, value: object, message: str) -> None:
    section = yaml.safe_load(Path(ROBOTS / "franka_panda.yaml").read_text())["limits"]
    table = section["collisions"]
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    with pytest.raises(ValueError, match=message):
        parse_limits(section)
