"""The speed limit for contact with a person: its value, and that no point of the arm is faster, between ticks too."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from real_robot.control.trajectory import cubic
from real_robot.robot_file import load_robot
from real_robot.safety.commands import Command, Measurement
from real_robot.safety.contact import ContactLimit
from real_robot.safety.filter import SafetyFilter
from real_robot.safety.kinematics import rotation
from real_robot.safety.limits import RobotLimits, parse_limits
from tests.real_robot.test_safety_streams import READY, ROBOTS, STREAMS, stream_settings

CONTACT = ContactLimit(force=100.0, stiffness=50e3, body_mass=2.0, moving_mass=12.0, payload=1.0)
PANDA = load_robot(ROBOTS / "franka_panda.yaml").limits
H = 1e-4  # [s]


def panda(contact: ContactLimit | None) -> RobotLimits:
    """Nothing else keeps the arm slow or stops it."""
    axes = tuple(replace(axis, contact_residual=None, step_from_measured=10.0) for axis in PANDA.axes)
    return replace(PANDA, axes=axes, contact=contact)


def test_the_speed_limit_by_hand() -> None:
    """E = 100^2 / (2 * 50000) = 0.1 J; m_R = 12 / 2 + 1 = 7 kg, mu = 14 / 9 kg; v = sqrt(2 E / mu)."""
    assert CONTACT.max_energy_j == pytest.approx(0.1)
    assert CONTACT.max_speed_m_s == pytest.approx(math.sqrt(0.2 * 9 / 14))


def points_of(joints: np.ndarray) -> np.ndarray:
    """Ends of the capsules and the end effector [P, 3], through the chain of the robot file, transformed here."""
    box, collisions = PANDA.workspace, PANDA.collisions
    assert box is not None
    assert collisions is not None
    turn, origin, points = np.eye(3), np.zeros(3), []
    for frame, q in zip(box.frames, joints.tolist(), strict=True):
        origin = origin + turn @ frame.xyz
        turn = turn @ np.reshape(rotation(frame.rpy), (3, 3)) @ np.reshape(rotation((0.0, 0.0, q)), (3, 3))
        for capsule in collisions.capsules:
            if capsule.joint == frame.joint:
                points += [origin + turn @ capsule.start, origin + turn @ capsule.end]
    return np.array([*points, origin + turn @ box.end_effector])


def highest_speed(
    contact: ContactLimit | None, seed: int, swing: float, period: int, joints: range = range(7)
) -> float:
    """[m/s] of all points of the path that was sent, and of its stops, under random jumps of ``joints``, late ticks and
    a stop."""
    limits = panda(contact)
    safety, rng = SafetyFilter(limits, lead_s=0.1), random.Random(seed)
    safety.start(READY, 0.0)
    fastest, tick, target, stop_at = 0.0, 0, READY, rng.randrange(50, 160)
    for step in range(1, 91):
        tick += rng.randint(2, 3) if rng.random() < 0.02 else 1
        if step % period == 1:
            target = [q + rng.uniform(-swing, swing) * (i in joints) for i, q in enumerate(READY)]
        if step == stop_at:
            safety.stop("test")
        now = tick / limits.command_hz
        out = safety.filter(Command(target, now), Measurement(safety.sent_position(now), now), now)
        if step % 15 and not out.urgent:
            continue
        for before, after in pairwise(safety.path()):
            length = after.time_s - before.time_s
            for t in (0.3 * length, 0.7 * length):
                a, b = (cubic(np.array(before[1:]), np.array(after[1:]), t + d, length)[0] for d in (-H, H))
                moved = np.linalg.norm(points_of(b) - points_of(a), axis=-1)
                fastest = max(fastest, float(moved.max()) / (2.0 * H))
    return fastest


@settings(stream_settings, max_examples=max(5, STREAMS // 10))
@given(seed=st.integers(0, 2**32 - 1), swing=st.sampled_from([0.3, 1.0, 2.5]), period=st.sampled_from([3, 10, 60]))
def test_no_point_of_the_arm_is_faster_than_contact_allows(seed: int, swing: float, period: int) -> None:
    assert highest_speed(CONTACT, seed, swing, period) <= CONTACT.max_speed_m_s + 1e-4


def test_the_limit_slows_the_arm_and_lets_it_move() -> None:
    """One joint moves as fast as is allowed; of several, the bound adds up the speeds."""
    limit = CONTACT.max_speed_m_s
    assert highest_speed(None, 1, 1.0, 60, range(1)) > 1.5 * limit
    assert highest_speed(CONTACT, 1, 1.0, 60, range(1)) > 0.75 * limit
    assert highest_speed(CONTACT, 1, 1.0, 60) > 0.25 * limit


def test_motion_that_is_scaled_down_arrives() -> None:
    limits = panda(CONTACT)
    safety = SafetyFilter(limits)
    safety.start(READY, 0.0)
    target = [q + 0.2 for q in READY]
    named = []
    for tick in range(1, 400):
        now = tick / limits.command_hz
        out = safety.filter(Command(target, now), Measurement(safety.sent_position(now), now), now)
        named += [event.reason for event in out.events if out.accepted and event.reason == "contact_speed"]
    assert out.positions == pytest.approx(target, abs=1e-3)
    assert named


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stiffness", "75 N", r"\.contact\.stiffness: got '75 N'; expected a number with its unit, one of N/m, N/mm"),
        ("force", "0 N", r"\.contact\.force: got '0 N'; it must be above zero"),
        ("body_weight", "2 kg", r"\.contact\.body_weight: 'body_weight' is not one of"),
    ],
)
def test_errors_in_contact_are_named_with_their_place(key: str, value: str, message: str) -> None:
    section = yaml.safe_load((ROBOTS / "franka_panda.yaml").read_text())["limits"]
    section["contact"] = {"force": "140 N", "stiffness": "75 N/mm", "body_mass": "0.6 kg", "moving_mass": "16 kg"}
    assert parse_limits(section).contact.max_energy_j == pytest.approx(140.0**2 / 150e3)
    section["contact"][key] = value
    with pytest.raises(ValueError, match=message):
        parse_limits(section)
