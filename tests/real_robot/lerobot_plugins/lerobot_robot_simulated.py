"""An arm as a plugin for LeRobot."""

from __future__ import annotations

from dataclasses import dataclass

from lerobot.robots import Robot, RobotConfig
from simulated_device import SimulatedServos


@RobotConfig.register_subclass("simulated_arm")
@dataclass
class SimulatedArmConfig(RobotConfig):
    port: str = "none"


class SimulatedArm(SimulatedServos, Robot):
    config_class, name = SimulatedArmConfig, "simulated_arm"
