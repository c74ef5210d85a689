"""Embodiments: name in the robot file to constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from real_robot.control.embodiment import Embodiment, JointPositions, JointSteps
from real_robot.control.panda_end_effector import PandaEndEffector
from real_robot.safety.stopping import AxisLimits

# From the joints' limits and the policy's rate [Hz].
EMBODIMENTS: Mapping[str, Callable[[Sequence[AxisLimits], float], Embodiment]] = {
    "joint_positions": lambda axes, control_hz: JointPositions(axes),
    "joint_steps": JointSteps,
    "panda_end_effector": lambda axes, control_hz: PandaEndEffector(axes),
}


def build_embodiment(name: str, axes: Sequence[AxisLimits], *, control_hz: float) -> Embodiment:
    """ValueError if the joints are not the embodiment's."""
    return EMBODIMENTS[name](axes, control_hz)
