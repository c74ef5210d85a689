"""Inputs and outputs of the safety filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Rejection = Literal[  # the whole command is dropped and every joint brakes
    "stopped",
    "no_command",
    "command_stale",
    "measurement_stale",
    "joint_count",
    "not_finite",
    "step_from_measured",
    "contact",
    "workspace",
    "collision",
    "contact_speed",
]
# one joint is limited; with contact_speed and near, all of them
Clamp = Literal["position", "velocity", "acceleration", "braking_distance", "contact_speed", "near"]
Timing = Literal["missed_ticks", "early_tick", "clock_jump"]  # irregular calls


class Command(NamedTuple):
    """Wanted position of each joint [rad or m], and when that was observed which it is based on [s, filter's clock]."""

    positions: Sequence[float]
    stamp_s: float


class Measurement(NamedTuple):
    """Position of each joint, when it was measured, and the external torque or force where the robot reports it."""

    positions: Sequence[float]
    stamp_s: float
    residuals: Sequence[float] | None = None


class SafetyEvent(NamedTuple):
    """One change the filter made. ``joint``: index, or None for the whole command. ``value`` broke ``limit``."""

    reason: Rejection | Clamp | Timing
    joint: int | None
    value: float
    limit: float


class SafeCommand(NamedTuple):
    """Where the arm is sent at ``tick``, in SI units. ``accepted``: the command was used, limited or not.

    ``urgent``: the motion that was sent before is replaced by a stop.
    """

    tick: int
    positions: tuple[float, ...]
    velocities: tuple[float, ...]
    accelerations: tuple[float, ...]
    accepted: bool
    events: tuple[SafetyEvent, ...]
    urgent: bool = False


class PathPoint(NamedTuple):
    """Where the arm is to be at ``time_s`` [the filter's clock], in SI units."""

    time_s: float
    positions: Sequence[float]
    velocities: Sequence[float]
    accelerations: Sequence[float]


def due_point(path: Sequence[PathPoint], now_s: float) -> PathPoint:
    """The newest point of ``path`` whose time has come; before all of them the first, where the arm rests."""
    return next((point for point in reversed(path) if point.time_s <= now_s), path[0])
