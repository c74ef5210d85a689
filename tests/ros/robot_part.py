"""A part of configs/robots/two_arms_on_base.yaml, as a process that can be killed: ``left``, ``right`` or ``base``.

An arm's controller interpolates the trajectories that it gets and its joints are where it says. The base integrates
Twist messages from a heading of 90 degrees, and stops .25 s after the last one.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import numpy as np
import rclpy
from geometry_msgs.msg import Twist
from rclpy.node import Node
from sensor_msgs.msg import JointState
from trajectory_msgs.msg import JointTrajectory

from real_robot.control.trajectory import Trajectory
from real_robot.ros.messages import LatestMessage

RATE_HZ = 200
TIMEOUT_S = 0.25


class Arm:
    def __init__(self, node: Node, name: str) -> None:
        self.names = [f"{name}_shoulder", f"{name}_elbow"]
        topic = f"/{name}/joint_trajectory_controller/joint_trajectory"
        self._commands = LatestMessage(node, JointTrajectory, topic, depth=8)
        self._trajectory = Trajectory(np.zeros(2), time.time())

    def positions(self, now_s: float) -> list[float]:
        for message in self._commands.take_new():
            assert list(message.joint_names) == self.names, message.joint_names
            begin_s = message.header.stamp.sec + 1e-9 * message.header.stamp.nanosec
            times = [begin_s + p.time_from_start.sec + 1e-9 * p.time_from_start.nanosec for p in message.points]
            points: list[Any] = [
                np.array([getattr(point, kind) for point in message.points])
                for kind in ("positions", "velocities", "accelerations")
            ]
            self._trajectory.follow(times, *points, now_s)
        return list(self._trajectory.sample(now_s)[0])


class Base:
    names = ("base_x", "base_y", "base_yaw")

    def __init__(self, node: Node) -> None:
        self._commands = LatestMessage(node, Twist, "/base/cmd_vel")
        self._pose, self._now_s = [0.0, 0.0, math.pi / 2], time.time()

    def positions(self, now_s: float) -> list[float]:
        step_s, self._now_s = now_s - self._now_s, now_s
        newest = self._commands.take()
        if newest is not None and time.monotonic() - newest[1] < TIMEOUT_S:
            twist, (x, y, yaw) = newest[0], self._pose
            forward, left = step_s * twist.linear.x, step_s * twist.linear.y
            x += math.cos(yaw) * forward - math.sin(yaw) * left
            y += math.sin(yaw) * forward + math.cos(yaw) * left
            self._pose = [x, y, yaw + step_s * twist.angular.z]
        return self._pose


def main(name: str) -> None:
    rclpy.init()
    node = Node(f"{name}_part")
    part: Any = Base(node) if name == "base" else Arm(node, name)
    states = node.create_publisher(JointState, f"/{name}/joint_states", 10)
    while True:
        message = JointState(name=list(part.names), position=part.positions(time.time()))
        message.header.stamp = node.get_clock().now().to_msg()
        states.publish(message)
        time.sleep(1.0 / RATE_HZ)


if __name__ == "__main__":
    main(sys.argv[1])
