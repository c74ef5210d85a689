"""Environments of this package: configuration class to constructor.

Embodiments are in control/registry.py, controller outputs in ros/registry.py, runtimes in serving/registry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from real_robot.robot_env import RobotConfig, RobotEnv
from sims.vector_env import VectorEnv

ENVIRONMENTS: Mapping[type[Any], Callable[[Any], VectorEnv]] = {RobotConfig: RobotEnv}
