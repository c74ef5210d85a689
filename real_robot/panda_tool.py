"""The tabletop suite's Panda: tool motions in, tool pose out, on a real arm as in simulation.

The same numbers as in ``sims.tabletop``: what one unit of action is, how far a target may lead the tool, and the same
damped-least-squares step, so that a policy trained there finds its own arm here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from real_robot.stopping import AxisLimits
from sims.tabletop.env import LEASH, POSITION_SCALE, ROTATION_SCALE, WORKSPACE
from sims.tabletop.episode import START_JOINTS
from sims.tabletop.kinematics import Panda, rotation_matrix, rotation_vector, tool_orientation
from sims.tabletop.scene import CONTROL_HZ, FINGER_OPEN


class PandaTool:
    """Seven arm joints and one finger [m]. Action: translation and rotation of the tool, gripper (1 is closed)."""

    action_dim = 7
    state_dim = 8

    def __init__(self, axes: Sequence[AxisLimits]) -> None:
        """ValueError unless ``axes`` are the arm's seven turning joints from the base on, then the sliding finger."""
        units = [axis.unit for axis in axes]
        if units != ["rad"] * 7 + ["m"] or [axis.name for axis in axes[:7]] != sorted(axis.name for axis in axes[:7]):
            raise ValueError(
                "embodiment panda_tool needs limits.joints in the order joint 1 to 7 (revolute), finger (prismatic); "
                f"got {[f'{axis.name} [{axis.unit}]' for axis in axes]}"
            )
        self._panda = Panda()
        self._rest = torch.tensor(START_JOINTS, dtype=torch.float64)
        self._workspace = torch.tensor(WORKSPACE, dtype=torch.float64)
        self._position, self._rotation = torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)

    def state(self, joints: Sequence[float]) -> NDArray[np.float32]:
        position, rotation, _ = self._forward(joints)
        finger = joints[7]
        parts = [position, tool_orientation(rotation[None])[0], torch.tensor([finger, -finger], dtype=torch.float64)]
        return np.asarray(torch.cat(parts).float().numpy())

    def begin(self, joints: Sequence[float]) -> None:
        self._position, self._rotation, _ = self._forward(joints)

    def targets(self, action: NDArray[np.float32], joints: Sequence[float]) -> list[float]:
        tool, rotation, jacobian = self._forward(joints)
        move = torch.from_numpy(np.asarray(action, dtype=np.float64)).clamp(-1, 1)
        wanted = (self._position + POSITION_SCALE * move[:3]).clamp(self._workspace[0], self._workspace[1])
        lead = _shorten(wanted - tool, LEASH[0])
        turned = rotation_matrix(ROTATION_SCALE * move[None, 3:6])[0] @ self._rotation
        turn = _shorten(rotation_vector((turned @ rotation.T)[None])[0], LEASH[1])
        self._position, self._rotation = tool + lead, rotation_matrix(turn[None])[0] @ rotation
        arm = torch.tensor(joints[:7], dtype=torch.float64)
        error = torch.cat([lead, turn])[None]
        motion = self._panda.solve(jacobian[None], error, 0.1 * (self._rest - arm)[None])[0]
        motion = motion / (motion.abs() / (self._panda.speed / CONTROL_HZ)).max().clamp(min=1.0)
        arm = (arm + motion).clamp(self._panda.low, self._panda.high)
        return [*arm.tolist(), FINGER_OPEN / 2 * (1.0 - float(move[6]))]

    def _forward(self, joints: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        position, rotation, jacobian = self._panda.forward(torch.tensor([joints[:7]], dtype=torch.float64))
        return position[0], rotation[0], jacobian[0]


def _shorten(vector: torch.Tensor, length: float) -> torch.Tensor:
    return vector * (length / vector.norm().clamp(min=length))
