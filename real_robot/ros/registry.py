"""Controller outputs: ``ros.command_type`` of the robot file to constructor. Needs rclpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rclpy.node import Node

from real_robot.robot_file import Robot, RosSection
from real_robot.ros.outputs import (
    CommandOutput,
    JointVelocityOutput,
    PositionOutput,
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
}


def build_output(node: Node, robot: Robot) -> CommandOutput:
    """ValueError if the ROS package of the configured message is not installed."""
    return OUTPUTS[robot.ros.command_type](node, robot.ros, robot.limits)
