"""An arm as a plugin for LeRobot: servos that approach their goals in 20 ms."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from lerobot.robots import Robot, RobotConfig
from simulated_device import JOINTS, SimulatedDevice


@RobotConfig.register_subclass("simulated_arm")
@dataclass
class SimulatedArmConfig(RobotConfig):
    port: str = "none"


class SimulatedArm(SimulatedDevice, Robot):
    config_class, name = SimulatedArmConfig, "simulated_arm"

    def __init__(self, config: SimulatedArmConfig) -> None:
        super().__init__(config)
        self.sent: list[tuple[float, np.ndarray]] = []
        self.goal = self.at = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 50.0])
        self.read_s = time.monotonic()

    observation_features = property(lambda self: self.action_features | {"front": (48, 64, 3)})
    action_features = property(lambda self: {f"{name}.pos": float for name in JOINTS})

    def get_observation(self) -> dict[str, Any]:
        if self.unplugged:
            raise ConnectionError("no answer from motor 3")
        now = time.monotonic()
        self.at = self.goal + (self.at - self.goal) * np.exp(-(now - self.read_s) / 0.02)
        self.read_s = now
        joints = {f"{name}.pos": float(q) for name, q in zip(JOINTS, self.at, strict=True)}
        return joints | {"front": np.full((48, 64, 3), 7, dtype=np.uint8)}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self.goal = np.array([action[f"{name}.pos"] for name in JOINTS])
        self.sent.append((time.monotonic(), self.goal))
        return action
