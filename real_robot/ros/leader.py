"""A leader arm that publishes its joints on a topic. Needs rclpy."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from rclpy.node import Node
from sensor_msgs.msg import JointState

from real_robot.control.embodiment import Embodiment
from real_robot.control.human_source import INPUT_AGE_S, action_towards
from real_robot.ros.messages import LatestMessage


class LeaderTopic:
    """Its joints, by the names of the robot file, are where the arm is to go. ``problem``: why there is no input."""

    def __init__(self, node: Node, topic: str, names: Sequence[str], embodiment: Embodiment) -> None:
        self.problem = ""
        self._topic = LatestMessage(node, JointState, topic)
        self._names, self._embodiment = list(names), embodiment

    def action(self, joints: Sequence[float]) -> Float[np.ndarray, " A"] | None:
        taken = self._topic.take()
        if taken is None or time.monotonic() - taken[1] > INPUT_AGE_S:
            self.problem = f"the leader on {self._topic.topic} is silent"
            return None
        wanted = dict(zip(taken[0].name, taken[0].position, strict=False))
        missing = [name for name in self._names if name not in wanted]
        self.problem = f"the leader on {self._topic.topic} lacks {missing}" if missing else ""
        return None if missing else action_towards(self._embodiment, joints, [wanted[name] for name in self._names])
