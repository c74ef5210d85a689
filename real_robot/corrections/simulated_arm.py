"""What a correction session asks of an arm beside ``VectorEnv``, answered for a simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from real_robot.robot_file import RobotError


class SimulatedArm:
    """See ``ArmEnv``. Nothing stops it, and its time stands still while nobody moves it.

    ``held``: action dimensions that keep their value, as of a gripper.
    """

    real_time = False
    ahead, ask_steps = 0, 0
    stopped, taken_s = "", 0.0

    def __init__(self, action_dim: int, held: Sequence[int]) -> None:
        self._action_dim, self._held = action_dim, [dim for dim in held if dim < action_dim]

    def problem(self) -> str:
        return ""

    def release(self) -> None:
        raise RobotError("a simulated robot has no stop")

    def rest(self) -> None:
        """It is at rest."""

    def executed(self, steps: int) -> list[Float32[np.ndarray, " A"] | None]:
        """Nothing but what it was given."""
        return [None] * steps

    def rest_action(self) -> Float32[np.ndarray, " A"]:
        """With an open gripper."""
        action = np.zeros(self._action_dim, dtype=np.float32)
        action[self._held] = -1.0
        return action
