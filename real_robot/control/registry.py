"""Embodiments: name in the robot file to constructor.

Other distributions add theirs in the entry-point group "vla_rl.embodiments" (sims/plugins.py), under the name that
robot files use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from real_robot.control.embodiment import ActionScales, Embodiment, JointPositions, JointSteps
from real_robot.control.panda_end_effector import PandaEndEffector
from real_robot.safety.stopping import AxisLimits
from sims.plugins import with_named_plugins

# From the joints' limits and the scales of the robot file. ValueError if the joints are not the embodiment's.
BUILT_IN: Mapping[str, Callable[[Sequence[AxisLimits], ActionScales], Embodiment]] = {
    "joint_positions": lambda axes, scales: JointPositions(scales.ranges),
    "joint_steps": lambda axes, scales: JointSteps(scales.ranges, scales.steps),
    "panda_end_effector": lambda axes, scales: PandaEndEffector(axes),
}
# what each needs in the robot file's section ``control``
NEEDED_SCALES: Mapping[str, tuple[str, ...]] = {
    "joint_positions": ("joint_range",),
    "joint_steps": ("joint_range", "joint_step"),
}
EMBODIMENTS: Mapping[str, Callable[[Sequence[AxisLimits], ActionScales], Embodiment]] = with_named_plugins(
    BUILT_IN, "vla_rl.embodiments"
)
