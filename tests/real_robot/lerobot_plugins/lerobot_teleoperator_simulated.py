"""A leader arm as a plugin for LeRobot: it is where ``pose`` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lerobot.teleoperators import Teleoperator, TeleoperatorConfig
from simulated_device import JOINTS, SimulatedDevice


@TeleoperatorConfig.register_subclass("simulated_leader")
@dataclass
class SimulatedLeaderConfig(TeleoperatorConfig):
    port: str = "none"


class SimulatedLeader(SimulatedDevice, Teleoperator):
    config_class, name = SimulatedLeaderConfig, "simulated_leader"

    def __init__(self, config: SimulatedLeaderConfig) -> None:
        super().__init__(config)
        self.pose = {f"{name}.pos": 0.0 for name in JOINTS} | {"gripper.pos": 50.0}

    action_features = property(lambda self: dict.fromkeys(self.pose, float))
    feedback_features = property(lambda self: {})

    def get_action(self) -> dict[str, float]:
        if self.unplugged:
            raise ConnectionError("the leader does not answer")
        return dict(self.pose)

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        """It feels nothing."""
