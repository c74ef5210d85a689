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
]
Clamp = Literal["position", "velocity", "acceleration", "jerk", "braking_distance", "catching_up"]  # one joint, limited
Timing = Literal["missed_ticks", "early_tick", "clock_jump"]  # irregular calls
StopPath = Sequence[tuple[Sequence[float], Sequence[float]]]  # positions and velocities of the coming ticks


class Command(NamedTuple):
    """Wanted position of each joint at this tick [rad or m], and when that was decided [s, the filter's clock]."""

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
    """Output to the controller for ``tick``. ``accepted``: the policy's command was used, clamped or not."""

    tick: int
    positions: tuple[float, ...]
    velocities: tuple[float, ...]
    accelerations: tuple[float, ...]
    accepted: bool
    events: tuple[SafetyEvent, ...]
