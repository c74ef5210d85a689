"""From actions to joint references: the control law of the simulated arm and of a real one.

An action moves a *target pose* that the arm follows: position delta (1.0 = 5 cm), rotation delta as an axis-angle
vector in the base frame (1.0 = 0.5 rad). The distance from the end effector to the target is limited, so that a blocked
arm does not accumulate motion (wind-up).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm

from sims.devices.constant import constant
from sims.tabletop.kinematics import Panda, rotation_matrix, rotation_vector
from sims.tabletop.layout import START_JOINTS
from sims.tabletop.scene import CONTROL_HZ, FINGER_OPEN
from sims.tensor_dataclass import TensorDataclass

POSITION_SCALE = 0.05  # [m] per unit of action
ROTATION_SCALE = 0.5  # [rad] per unit of action
MAX_LEAD = (0.08, 0.6)  # largest distance from the end effector to its target [m, rad]
WORKSPACE = ((0.25, -0.35, 0.015), (0.75, 0.35, 0.5))  # of the target [m]


@dataclass(frozen=True, kw_only=True)
class EndEffectorTarget(TensorDataclass):
    """The target of the arm: the end effector's position [m] and rotation, and the joint positions [rad] for it."""

    position: Float[Tensor, "*N 3"]
    rotation: Float[Tensor, "*N 3 3"]
    joints: Float[Tensor, "*N 7"]


@dataclass(frozen=True, kw_only=True)
class EndEffectorState(TensorDataclass):
    """The state of the arm: end-effector pose, joints [rad], and the Jacobian (linear rows first)."""

    position: Float[Tensor, "*N 3"]
    rotation: Float[Tensor, "*N 3 3"]
    joints: Float[Tensor, "*N 7"]
    jacobian: Float[Tensor, "*N 6 7"]


class EndEffectorControl:
    """The control law on one device. Targets keep their precision; joint positions are computed in float64."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.panda = Panda(device)
        self._rest = torch.tensor(START_JOINTS, dtype=torch.float64, device=device)
        self._max_motion = self.panda.speed / CONTROL_HZ  # of a joint in one control period [rad]

    def next_target(
        self, target: EndEffectorTarget, action: Float[Tensor, "N 7"], arm: EndEffectorState
    ) -> EndEffectorTarget:
        """The target one control period after ``target``, for ``action`` in [-1, 1]."""
        low, high = (constant(corner, target.position) for corner in WORKSPACE)
        lead = (target.position + POSITION_SCALE * action[:, :3]).clamp(low, high) - arm.position
        lead = lead * (MAX_LEAD[0] / vector_norm(lead, dim=1, keepdim=True).clamp(min=MAX_LEAD[0]))
        spin = rotation_matrix(ROTATION_SCALE * action[:, 3:6].double()).to(target.rotation)
        rotation = torch.bmm(spin, target.rotation)
        turn = rotation_vector(torch.bmm(rotation, arm.rotation.mT).double())
        leads = vector_norm(turn, dim=1, keepdim=True)
        # A rotation beyond the limit is not executed; the rest of the action is.
        allowed = leads < MAX_LEAD[1]
        error = torch.cat([lead.double(), turn * (MAX_LEAD[1] / leads.clamp(min=MAX_LEAD[1]))], dim=1)
        return EndEffectorTarget(
            position=arm.position + lead,
            rotation=torch.where(allowed[..., None], rotation, target.rotation),
            joints=self._next_joints(target.joints.double(), error, arm).to(target.joints),
        )

    def _next_joints(
        self, last: Float[Tensor, "N 7"], error: Float[Tensor, "N 6"], arm: EndEffectorState
    ) -> Float[Tensor, "N 7"]:
        """Joint positions that remove the end effector's ``error``, within the joints' speed and position limits.

        In the null space of the Jacobian they stay near the last ones, so that vibrations of the arm do not feed back.
        """
        panda, joints = self.panda, arm.joints
        posture = last - joints + 0.05 * (self._rest - last)
        motion = joints + panda.solve(arm.jacobian, error, posture) - last
        excess = (motion.abs() / self._max_motion).amax(1, keepdim=True)
        return (last + motion / excess.clamp(min=1)).clamp(panda.low, panda.high)


def finger_target(gripper: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """Each finger's position [m]: -1 open, +1 closed, linear between."""
    return (FINGER_OPEN / 2) * (1 - gripper)
