"""A leader arm as a plugin for LeRobot: it is where ``pose`` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lerobot.teleoperators import Teleoperator, TeleoperatorConfig


@TeleoperatorConfig.register_subclass("simulated_leader")
@dataclass
class SimulatedLeaderConfig(TeleoperatorConfig):
    port: str = "none"


class SimulatedLeader(Teleoperator):
    config_class, name = SimulatedLeaderConfig, "simulated_leader"

    def __init__(self, config: SimulatedLeaderConfig) -> None:
        super().__init__(config)
        names = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
        self.pose = {f"{name}.pos": 0.0 for name in names} | {"gripper.pos": 50.0}
        self.connected, self.unplugged = False, False

    action_features = property(lambda self: dict.fromkeys(self.pose, float))
    feedback_features = property(lambda self: {})
    is_connected = property(lambda self: self.connected)
    is_calibrated = property(lambda self: True)

    def connect(self, calibrate: bool = True) -> None:
        self.connected = True

    def calibrate(self) -> None:
        """Nothing to calibrate."""

    def configure(self) -> None:
        """Nothing to configure."""

    def get_action(self) -> dict[str, float]:
        if self.unplugged:
            raise ConnectionError("the leader does not answer")
        return dict(self.pose)

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        """It feels nothing."""

    def disconnect(self) -> None:
        self.connected = False
