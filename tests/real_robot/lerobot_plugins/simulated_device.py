"""What LeRobot asks of any device, for the plugins beside this file, and an arm's servos."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


class SimulatedDevice:
    """``unplugged``: it does not answer."""

    connected = unplugged = False
    is_connected = property(lambda self: self.connected)
    is_calibrated = property(lambda self: True)

    def connect(self, calibrate: bool = True) -> None:
        self.connected = True

    def calibrate(self) -> None:
        """Nothing to calibrate."""

    def configure(self) -> None:
        """Nothing to configure."""

    def disconnect(self) -> None:
        self.connected = False


class SimulatedServos(SimulatedDevice):
    """They approach their goals in 20 ms."""

    def __init__(self, *config: Any) -> None:
        super().__init__(*config)
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
