"""Whether ROS 2 is installed for this Python."""

from __future__ import annotations

from importlib.util import find_spec

from real_robot.robot_file import RobotError


def require_ros() -> None:
    """RobotError that says how to get ROS if this Python has none."""
    if find_spec("rclpy") is None:
        raise RobotError(
            "this Python has no rclpy. On a ROS 2 machine: source /opt/ros/<distribution>/setup.bash first; "
            "elsewhere, in a checkout: make ros makes .venv-ros, and .venv-ros/bin/vla-rl has it"
        )
