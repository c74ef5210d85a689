"""The robot that default benchmarks assume."""

from __future__ import annotations

from policies.policy import RobotSpec

EXAMPLE_ROBOT = RobotSpec(action_dim=7, state_dim=8, cameras=("agent", "wrist"), image_size=(64, 64), control_hz=20.0)
