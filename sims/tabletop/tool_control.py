"""From actions to joint references: the suite's one control law, for the simulated arm and for a real one.

An action moves a *target pose* that the arm follows: position delta (1.0 = 5 cm), rotation delta as an axis-angle
vector in the base frame (1.0 = 0.5 rad). The target never leads the tool by more than the leash, so a blocked arm does
not wind up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sims.tabletop.episode import START_JOINTS
from sims.tabletop.kinematics import Panda, rotation_matrix, rotation_vector
from sims.tabletop.scene import CONTROL_HZ, FINGER_OPEN
from sims.tensor_dataclass import TensorDataclass

POSITION_SCALE = 0.05  # [m] per unit of action
ROTATION_SCALE = 0.5  # [rad] per unit of action
LEASH = (0.08, 0.6)  # the target leads the tool by at most this [m, rad]
WORKSPACE = ((0.25, -0.35, 0.015), (0.75, 0.35, 0.5))  # of the target [m]


@dataclass(frozen=True, kw_only=True)
class ToolTarget(TensorDataclass):
    """Where the arm is sent: the tool's position [m] and rotation, and the joint positions [rad] that go there."""

    position: Float[Tensor, "*N 3"]
    rotation: Float[Tensor, "*N 3 3"]
    joints: Float[Tensor, "*N 7"]


@dataclass(frozen=True, kw_only=True)
class ToolState(TensorDataclass):
    """Where the arm is: the tool, the joints, and the Jacobian there (linear rows first)."""

    position: Float[Tensor, "*N 3"]
    rotation: Float[Tensor, "*N 3 3"]
    joints: Float[Tensor, "*N 7"]
    jacobian: Float[Tensor, "*N 6 7"]


class ToolControl:
    """The law on one device. Targets keep the precision they are given; joints are computed in float64."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.panda = Panda(device)
        self._rest = torch.tensor(START_JOINTS, dtype=torch.float64, device=device)
        self._workspace = torch.tensor(WORKSPACE, dtype=torch.float64, device=device)

    def next_target(self, target: ToolTarget, action: Float[Tensor, "N 7"], tool: ToolState) -> ToolTarget:
        """The target one control period after ``target``, for ``action`` in [-1, 1]."""
        low, high = self._workspace.to(target.position)
        lead = (target.position + POSITION_SCALE * action[:, :3]).clamp(low, high) - tool.position
        lead = lead * (LEASH[0] / lead.norm(dim=1, keepdim=True).clamp(min=LEASH[0]))
        spin = rotation_matrix(ROTATION_SCALE * action[:, 3:6].double()).to(target.rotation)
        rotation = torch.bmm(spin, target.rotation)
        turn = rotation_vector(torch.bmm(rotation, tool.rotation.mT).double())
        leads = turn.norm(dim=1, keepdim=True)
        # A turn beyond the leash is not taken; the rest of the action is.
        taken = leads < LEASH[1]
        error = torch.cat([lead.double(), turn * (LEASH[1] / leads.clamp(min=LEASH[1]))], dim=1)
        return ToolTarget(
            position=tool.position + lead,
            rotation=torch.where(taken[..., None], rotation, target.rotation),
            joints=self._next_joints(target.joints.double(), error, tool).to(target.joints),
        )

    def _next_joints(
        self, last: Float[Tensor, "N 7"], error: Float[Tensor, "N 6"], tool: ToolState
    ) -> Float[Tensor, "N 7"]:
        """Joint positions that remove the tool's ``error``, within the joints' speed and position limits.

        The last ones are kept where the tool does not feel it, so the arm's vibrations do not feed back.
        """
        panda, joints = self.panda, tool.joints
        posture = last - joints + 0.05 * (self._rest - last)
        motion = joints + panda.solve(tool.jacobian, error, posture) - last
        excess = (motion.abs() / (panda.speed / CONTROL_HZ)).amax(1, keepdim=True)
        return (last + motion / excess.clamp(min=1)).clamp(panda.low, panda.high)


def finger_target(gripper: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Each finger's position [m]: -1 open, +1 closed, linear between."""
    return (FINGER_OPEN / 2) * (1 - gripper)
