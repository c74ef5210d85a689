"""The tabletop suite's Panda: end-effector motions as actions and the end-effector pose as state, on a real arm.

The control law is the suite's own (``sims.tabletop.end_effector_control``), so that policies trained there can be used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from real_robot.safety.stopping import AxisLimits
from sims.tabletop.end_effector_control import (
    POSITION_SCALE,
    ROTATION_SCALE,
    EndEffectorControl,
    EndEffectorState,
    EndEffectorTarget,
    finger_target,
)
from sims.tabletop.kinematics import end_effector_orientation, rotation_vector
from sims.tabletop.layout import START_JOINTS
from sims.tabletop.scene import FINGER_OPEN


class PandaEndEffector:
    """Seven arm joints and one finger [m].

    Action: translation, rotation and gripper (1 is closed). State: position, orientation, both fingers [m].
    """

    action_dim = 7
    state_dim = 8

    def __init__(self, axes: Sequence[AxisLimits]) -> None:
        """ValueError unless ``axes`` are the arm's seven turning joints from the base on, then the sliding finger."""
        units = [axis.unit for axis in axes]
        if units != ["rad"] * 7 + ["m"] or [axis.name for axis in axes[:7]] != sorted(axis.name for axis in axes[:7]):
            raise ValueError(
                "embodiment panda_end_effector needs limits.joints in the order joint 1 to 7 (revolute), "
                f"finger (prismatic); got {[f'{axis.name} [{axis.unit}]' for axis in axes]}"
            )
        self._control = EndEffectorControl()
        self.begin([*START_JOINTS, 0.0])

    def state(self, joints: Sequence[float]) -> NDArray[np.float32]:
        pose = self._pose(joints)
        finger = joints[7]
        parts = [pose.position[0], end_effector_orientation(pose.rotation)[0], torch.tensor([finger, -finger]).double()]
        return np.asarray(torch.cat(parts).float().numpy())

    def begin(self, joints: Sequence[float]) -> None:
        pose = self._pose(joints)
        self._target = EndEffectorTarget(position=pose.position, rotation=pose.rotation, joints=pose.joints)

    def targets(self, action: NDArray[np.float32], joints: Sequence[float]) -> list[float]:
        move = torch.from_numpy(np.asarray(action, dtype=np.float64)).clamp(-1, 1)[None]
        self._target = self._control.next_target(self._target, move, self._pose(joints))
        return [*self._target.joints[0].tolist(), float(finger_target(move[0, 6]))]

    def achieved(
        self, action: NDArray[np.float32], start: Sequence[float], end: Sequence[float]
    ) -> NDArray[np.float32]:
        before, after = self._pose(start), self._pose(end)
        move = (after.position - before.position)[0] / POSITION_SCALE
        turn = rotation_vector(torch.bmm(after.rotation, before.rotation.mT).double())[0] / ROTATION_SCALE
        gripper = torch.tensor([1.0 - 2.0 * end[7] / FINGER_OPEN], dtype=torch.float64)
        return np.asarray(torch.cat([move.double(), turn, gripper]).float().numpy())

    def _pose(self, joints: Sequence[float]) -> EndEffectorState:
        arm = torch.tensor([joints[:7]], dtype=torch.float64)
        position, rotation, jacobian = self._control.panda.forward(arm)
        return EndEffectorState(position=position, rotation=rotation, joints=arm, jacobian=jacobian)
