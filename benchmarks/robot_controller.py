"""Whether the limits hold inside a trajectory controller: what it interpolates, sampled at 1 kHz.

    python -m benchmarks.robot_controller [--streams 20000]    # about 20 minutes of one core

Every stream drives the safety filter with random jumps, ramps, targets beyond the limits, stops, missed ticks and bad
input, from a start that the controller holds a little away from the measured one. Each message reaches the controller
up to 20 ms late, is lost with a probability of up to 5 %, and is read on a clock that is up to 10 ms off. The model of
the controller is ros2_control's joint_trajectory_controller (trajectory.cpp: sample, interpolate_between_points): a new
trajectory replaces the old one; before its first point it is approached from the present state. Messages with positions
and speeds are interpolated by cubic splines, with accelerations by quintic ones. Positions at 1 kHz are compared with
every limit by finite differences, and at 200 Hz with the margin of collisions. Writes
benchmarks/results/robot_controller.json and fails if a limit is broken.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from real_robot.control.trajectory import cubic, quintic
from real_robot.robot_file import load_robot
from real_robot.safety.collisions import CollisionClearance
from real_robot.safety.commands import Command, Measurement, PathPoint
from real_robot.safety.filter import UNKNOWN_OFFSET, SafetyFilter
from real_robot.safety.kinematics import rotation
from real_robot.safety.limits import RobotLimits
from real_robot.safety.workspace import Workspace, WorkspaceClearance
from vla_rl.bench.record import row, write_record

ROBOTS = Path(__file__).parents[1] / "configs" / "robots"
NAMES = ("franka_panda", "franka_fr3", "ur5e", "xarm6", "so101", "generic")
TICKS, BATCH, SAMPLE_S = 100, 200, 0.001
START_DEPTH_M = 0.1
COLLISION_SAMPLES = 5  # every so many of the positions at 1 kHz
MAX_LATE_S, MAX_LOSS, MAX_OFFSET_S = 0.02, 0.05, 0.01
# of finite differences: rounding of the positions
ROUNDING = {"velocity": 1e-9, "acceleration": 1e-6, "jerk": 1e-3}
Floats = NDArray[np.float64]


@cache
def limits_of(name: str) -> RobotLimits:
    return load_robot(ROBOTS / f"{name}.yaml").limits


@cache
def collisions_of(limits: RobotLimits) -> CollisionClearance | None:
    return CollisionClearance(limits.collisions, limits.axes) if limits.collisions else None


@dataclass(frozen=True)
class Message:
    arrival_s: float  # on the controller's clock
    path: list[PathPoint]


@dataclass(frozen=True)
class Stream:
    """What one controller gets, and where it holds before."""

    limits: RobotLimits
    start: list[float]
    messages: list[Message]
    end_s: float


def make_stream(seed: int, names: Sequence[str] = NAMES, max_loss: float = MAX_LOSS) -> Stream:
    """Adversarial commands through the filter, and what the network makes of its messages."""
    draw = random.Random(seed)
    limits = limits_of(names[seed % len(names)])
    safety = SafetyFilter(limits, lead_s=limits.command_lead_s)
    dt, start = safety.dt, _start(limits, safety, draw)
    loss, late_s = draw.uniform(0.0, max_loss), draw.uniform(0.0, MAX_LATE_S)
    offset_s = draw.uniform(-MAX_OFFSET_S, MAX_OFFSET_S)
    messages, tick, target = [], 0, list(start)
    stop_at, wild = safety.tick + draw.randrange(4 * TICKS), draw.choice((0.02, 0.2, 2.0))
    taken_up = safety.tick
    for k in range(taken_up + TICKS):
        tick += 1 if k < taken_up or draw.random() > 0.01 else draw.randrange(2, 12)  # missed ticks
        now = tick * dt + draw.uniform(-0.2, 0.2) * dt
        if k == stop_at:
            safety.stop("test")
        target = _next_target(target, limits, draw, k, wild)
        command = None if draw.random() < 0.01 else Command(target, now)
        measured = Measurement(safety.sent_position(now), now, [0.0] * len(start))
        out = safety.filter(command, None if k > taken_up and draw.random() < 0.003 else measured, now)
        if safety.lost:
            continue
        for _ in range(4 if out.urgent else 1):
            if draw.random() >= loss:
                arrival_s = now + draw.uniform(0.0, late_s) + offset_s
                messages.append(Message(arrival_s, safety.path()))
    held = [q + draw.uniform(-1, 1) * UNKNOWN_OFFSET[axis.unit] for q, axis in zip(start, limits.axes, strict=True)]
    return Stream(limits, held, messages, (tick + 60) * dt)


def _start(limits: RobotLimits, safety: SafetyFilter, draw: random.Random) -> list[float]:
    """A position from which the filter starts, such that what the controller holds is inside the limits too."""
    check = WorkspaceClearance(limits.workspace, limits.axes) if limits.workspace else None
    while True:
        start = [
            draw.uniform(low + UNKNOWN_OFFSET[axis.unit], high - UNKNOWN_OFFSET[axis.unit])
            for axis in limits.axes
            for low, high in [axis.position]
        ]
        if check is not None and check.at(start)[0] <= START_DEPTH_M:
            continue
        collisions, offsets = collisions_of(limits), [UNKNOWN_OFFSET[axis.unit] for axis in limits.axes]
        if collisions is None or collisions.left(collisions.at(start), offsets) > 0.0:
            safety.start(start, 0.0)
            return start


def _next_target(target: list[float], limits: RobotLimits, draw: random.Random, k: int, wild: float) -> list[float]:
    kind = draw.random()
    if kind < 0.05:  # a jump, perhaps beyond the limits
        return [q + draw.gauss(0.0, wild) for q in target]
    if kind < 0.06:
        return [draw.choice(axis.position) * 1.1 for axis in limits.axes]
    if kind < 0.065:
        return [draw.choice((float("nan"), float("inf"), q)) for q in target]
    if not np.isfinite(target).all():
        return [0.0] * len(target)
    share = 1.2 * math.sin(0.05 * k) / limits.command_hz
    return [q + share * axis.velocity for q, axis in zip(target, limits.axes, strict=True)]


class Controllers:
    """The controllers of a batch of streams, padded to the same number of joints."""

    def __init__(self, streams: Sequence[Stream], *, with_accelerations: bool) -> None:
        joints = max(len(stream.start) for stream in streams)
        count = max(len(stream.messages) for stream in streams)
        points = max(len(message.path) for stream in streams for message in stream.messages)
        self._spline = quintic if with_accelerations else cubic
        self._arrival_s = np.full((len(streams), count), np.inf)
        self._times = np.full((len(streams), count, points), np.inf)
        self._states = np.zeros((len(streams), count, points, 3, joints))
        self._last = np.zeros((len(streams), count), dtype=int)
        for b, stream in enumerate(streams):
            # a writer's messages that are overtaken by a newer one are dropped
            arrivals = np.minimum.accumulate([m.arrival_s for m in stream.messages][::-1])[::-1]
            self._arrival_s[b, : len(arrivals)] = arrivals
            for m, message in enumerate(stream.messages):
                n = len(message.path)
                self._last[b, m] = n - 1
                self._times[b, m, :n] = [point.time_s for point in message.path]
                self._states[b, m, :n, :, : len(stream.start)] = [point[1:] for point in message.path]
        held = np.zeros((len(streams), 3, joints))
        for b, stream in enumerate(streams):
            held[b, 0, : len(stream.start)] = stream.start
        self._state, self._now = held, 0.0
        self._before, self._before_s = held, np.zeros(len(streams))
        self._active = np.full(len(streams), -1)

    def sample(self, now: float) -> Floats:
        """Positions [B, J] at ``now`` [s, the controllers' clocks]."""
        newest = (self._arrival_s <= now).sum(axis=1) - 1
        new = newest > self._active
        if new.any():
            self._before = np.where(new[:, None, None], self._state, self._before)
            self._before_s = np.where(new, self._now, self._before_s)
            self._active = newest
        b, m = np.arange(len(newest)), np.maximum(self._active, 0)
        times = self._times[b, m]
        k = (times <= now).sum(axis=1)  # the point after now
        first, done = k == 0, k > self._last[b, m]
        begin_s = np.where(first, self._before_s, times[b, np.maximum(k - 1, 0)])
        begin = np.where(first[:, None, None], self._before, self._states[b, m, np.maximum(k - 1, 0)])
        k = np.minimum(k, self._last[b, m])
        end_s, end = times[b, k], self._states[b, m, k]
        length = np.where(done, 1.0, np.maximum(end_s - begin_s, 1e-9))[:, None]
        state = self._spline(begin, end, np.where(done[:, None], 0.0, (now - begin_s)[:, None]), length)
        state[done] = self._states[b, m, self._last[b, m]][done]
        idle = self._active < 0
        state[idle] = self._before[idle]
        self._state, self._now = state, now
        return state[:, 0]


def broken_limits(stream: Stream, positions: Floats) -> list[str]:
    """Of ``positions`` [T, J] at 1 kHz."""
    axes = stream.limits.axes
    positions = positions[:, : len(axes)]
    broken = []
    low, high = np.array([axis.position for axis in axes]).T
    if (positions < low - 1e-8).any() or (positions > high + 1e-8).any():
        broken.append("position")
    derivative = positions
    for name in ("velocity", "acceleration", "jerk"):
        derivative = np.diff(derivative, axis=0) / SAMPLE_S
        most = np.array([getattr(axis, name) for axis in axes])
        if (np.abs(derivative) > most * (1.0 + 1e-6) + ROUNDING[name]).any():
            broken.append(f"{name} x{(np.abs(derivative) / most).max():.3f}")
    if stream.limits.workspace is not None:
        box = stream.limits.workspace
        order = [axis.name for axis in axes]
        points = end_effectors(box, positions[:, [order.index(frame.joint) for frame in box.frames]])
        if (points < np.array(box.low) - 1e-8).any() or (points > np.array(box.high) + 1e-8).any():
            broken.append("workspace")
    collisions = collisions_of(stream.limits)
    if collisions and any(collisions.least(collisions.at(q)) < -1e-6 for q in positions[::COLLISION_SAMPLES].tolist()):
        broken.append("collision")
    return broken


def end_effectors(box: Workspace, joints: Floats) -> Floats:
    """Positions [T, 3] of the end effector for joints [T, J] along the chain, which all turn."""
    point = np.broadcast_to(box.end_effector, (len(joints), 3))
    for i in reversed(range(len(box.frames))):
        c, s = np.cos(joints[:, i]), np.sin(joints[:, i])
        x, y, z = point.T
        turned = np.stack([c * x - s * y, s * x + c * y, z], axis=1)
        point = turned @ np.reshape(rotation(box.frames[i].rpy), (3, 3)).T + box.frames[i].xyz
    return point


def check(seeds: Sequence[int], names: Sequence[str] = NAMES, max_loss: float = MAX_LOSS) -> dict[str, int]:
    """Streams with a broken limit, by interpolation."""
    broken = {"cubic": 0, "quintic": 0}
    for at in range(0, len(seeds), BATCH):
        streams = [make_stream(seed, names, max_loss) for seed in seeds[at : at + BATCH]]
        steps = int(max(stream.end_s for stream in streams) / SAMPLE_S)
        for name in broken:
            controllers = Controllers(streams, with_accelerations=name == "quintic")
            sampled = np.stack([controllers.sample(step * SAMPLE_S) for step in range(-20, steps)])
            for b, (seed, stream) in enumerate(zip(seeds[at : at + BATCH], streams, strict=True)):
                if found := broken_limits(stream, sampled[:, b]):
                    broken[name] += 1
                    print(f"stream {seed}, {name}: {', '.join(found)}", file=sys.stderr)
        done = at + len(streams)
        print(f"{done} of {len(seeds)} streams, {sum(broken.values())} violations", file=sys.stderr, flush=True)
    return broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=20000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first stream")
    parser.add_argument("--robots", nargs="+", default=NAMES, help="files in configs/robots")
    parser.add_argument("--loss", type=float, default=MAX_LOSS, help="of messages, at most")
    parser.add_argument("--name", default="robot_controller", help="of the file in benchmarks/results")
    options = parser.parse_args()
    broken = check(range(options.first, options.first + options.streams), options.robots, options.loss)
    rows = [row("streams", options.streams, "streams"), row("violations", sum(broken.values()), "streams")]
    rows += [row(f"violations, {name}", count, "streams") for name, count in broken.items()]
    write_record(options.name, rows, command="python -m benchmarks.robot_controller " + " ".join(sys.argv[1:]))
    for entry in rows:
        print(f"{entry['name']:24} {entry['value']}")
    sys.exit(1 if any(broken.values()) else 0)


if __name__ == "__main__":
    main()
