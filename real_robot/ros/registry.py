"""Controller outputs: ``ros.command_type`` of the robot file to constructor. Needs rclpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from rclpy.node import Node

from real_robot.robot_file import Robot, RosSection, is_timed
from real_robot.ros.outputs import (
    BaseTwistOutput,
    CommandOutput,
    ControllerPart,
    JointVelocityOutput,
    PositionOutput,
    SeparateOutputs,
    TrajectoryActionOutput,
    TrajectoryOutput,
    TwistOutput,
    VelocityOutput,
)
from real_robot.safety.limits import RobotLimits

OUTPUTS: Mapping[str, Callable[[Node, RosSection, RobotLimits], CommandOutput]] = {
    "joint_trajectory": TrajectoryOutput,
    "follow_joint_trajectory": TrajectoryActionOutput,
    "float64_multi_array": PositionOutput,
    "float64_velocities": VelocityOutput,
    "joint_jog": JointVelocityOutput,
    "twist_stamped": TwistOutput,
    "base_twist": partial(BaseTwistOutput, stamped=False),
    "base_twist_stamped": partial(BaseTwistOutput, stamped=True),
}


def build_output(node: Node, robot: Robot) -> CommandOutput:
    """ValueError if the ROS package of a configured message is not installed."""
    controllers, names = robot.controllers, [axis.name for axis in robot.limits.axes]
    if len(controllers) == 1:
        return OUTPUTS[robot.ros.command_type](node, robot.ros, robot.limits)
    parts = []
    for controller in controllers:
        joints = [names.index(name) for name in controller.joints]
        ros = replace(robot.ros, command=controller.command, command_type=controller.command_type)
        limits = replace(robot.limits, axes=tuple(robot.limits.axes[i] for i in joints))
        output = OUTPUTS[controller.command_type](node, ros, limits)
        parts.append(ControllerPart(output, joints, at_once=robot.lead_s > 0.0 and not is_timed(controller)))
    return SeparateOutputs(parts)
