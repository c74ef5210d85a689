"""Forward kinematics, Jacobian and damped-least-squares IK of the Franka Emika Panda, batched in torch.

The chain is the manufacturer's modified (Craig) Denavit-Hartenberg table; every backend uses these functions, so
that the pose that a policy observes and the joint targets of a simulator do not depend on the simulator.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm

from sims.devices.constant import constant

# Modified DH rows (a [m], d [m], alpha [rad]) of joints 1..7; Craig: T = Rx(alpha) Tx(a) Rz(q) Tz(d).
PANDA_DH = (
    (0.0, 0.333, 0.0),
    (0.0, 0.0, -math.pi / 2),
    (0.0, 0.316, math.pi / 2),
    (0.0825, 0.0, math.pi / 2),
    (-0.0825, 0.384, -math.pi / 2),
    (0.0, 0.0, math.pi / 2),
    (0.088, 0.0, math.pi / 2),
)
FLANGE_OFFSET = 0.107  # joint 7 to flange [m]
HAND_YAW = -math.pi / 4  # flange to hand [rad]
TCP_OFFSET = 0.1034  # hand to tool center point [m]

JOINT_LOW = (-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973)  # [rad]
JOINT_HIGH = (2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973)  # [rad]
JOINT_SPEED = (2.1750, 2.1750, 2.1750, 2.1750, 2.6100, 2.6100, 2.6100)  # [rad/s]
JOINT_TORQUE = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0)  # [N m]
DAMPING = 0.03  # of the inverse kinematics; bounds joint motion near singular poses


class Panda:
    """The kinematic chain on one device, in float64.

    The last bits of vectorized sine and cosine may depend on the position in the batch; rounding the results to float32
    removes them.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        def constants(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        # Each joint's transform is constant + cosine * cos(q) + sine * sin(q).
        constant, cosine, sine = [], [], []
        for a, d, alpha in PANDA_DH:
            ca, sa = math.cos(alpha), math.sin(alpha)
            constant.append([[0, 0, 0, a], [0, 0, -sa, -sa * d], [0, 0, ca, ca * d], [0, 0, 0, 1]])
            cosine.append([[1, 0, 0, 0], [0, ca, 0, 0], [0, sa, 0, 0], [0, 0, 0, 0]])
            sine.append([[0, -1, 0, 0], [ca, 0, 0, 0], [sa, 0, 0, 0], [0, 0, 0, 0]])
        c, s = math.cos(HAND_YAW), math.sin(HAND_YAW)
        tcp = constants([[c, -s, 0, 0], [s, c, 0, 0], [0, 0, 1, FLANGE_OFFSET + TCP_OFFSET], [0, 0, 0, 1]])
        local = torch.stack([constants(constant), constants(cosine), constants(sine)])
        # The end effector is on the last joint's axis, so its frame can replace that joint's frame in the Jacobian too.
        local[:, -1] = local[:, -1] @ tcp
        self._constant, self._cosine, self._sine = local
        self._damping = DAMPING**2 * torch.eye(6, dtype=torch.float64, device=device)
        self.low = constants(JOINT_LOW)
        self.high = constants(JOINT_HIGH)
        self.speed = constants(JOINT_SPEED)

    def forward(
        self, q: Float[Tensor, "N 7"]
    ) -> tuple[Float[Tensor, "N 3"], Float[Tensor, "N 3 3"], Float[Tensor, "N 6 7"]]:
        """End-effector position [m], rotation and geometric Jacobian (linear rows first) in the base frame, float64."""
        angle = q.double()[..., None, None]
        local = self._constant + self._cosine * angle.cos() + self._sine * angle.sin()
        joints = local.unbind(1)  # seven of [N, 4, 4]
        frames = [joints[0]]
        for joint in joints[1:]:
            frames.append(torch.bmm(frames[-1], joint))
        chain = torch.stack(frames, dim=3)[:, :3]  # [N, 3, 4, 7]
        axes, origins = chain[:, :, 2], chain[:, :, 3]
        jacobian = torch.cat([torch.linalg.cross(axes, origins[..., -1:] - origins, dim=1), axes], dim=1)
        return origins[..., -1], frames[-1][:, :3, :3], jacobian

    def solve(
        self, jacobian: Float[Tensor, "N 6 7"], error: Float[Tensor, "N 6"], posture: Float[Tensor, "N 7"]
    ) -> Float[Tensor, "N 7"]:
        """One damped-least-squares step: dq = posture + J^T (J J^T + DAMPING^2 I)^-1 (error - J posture).

        ``error`` is the desired end-effector motion [m, rad], ``posture`` a desired joint motion of which only the
        null-space part is executed.
        """
        transposed = jacobian.mT
        gram = torch.baddbmm(self._damping, jacobian, transposed)
        residual = torch.baddbmm(error[..., None], jacobian, posture[..., None], alpha=-1)
        factor = torch.linalg.cholesky_ex(gram).L
        return torch.baddbmm(posture[..., None], transposed, torch.cholesky_solve(residual, factor))[..., 0]


_IDENTITY = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
_SKEW = ((0, 0, 0, 0, 0, -1, 0, 1, 0), (0, 0, 1, 0, 0, 0, -1, 0, 0), (0, -1, 0, 1, 0, 0, 0, 0, 0))


def rotation_vector(rotation: Float[Tensor, "N 3 3"]) -> Float[Tensor, "N 3"]:
    """Axis times angle of small and medium rotations (below pi): the error that the IK removes."""
    flat = rotation.flatten(1)
    w = flat @ constant(_SKEW, flat).T
    sine = vector_norm(w, dim=1, keepdim=True)
    angle = torch.atan2(sine, flat[:, ::4].sum(1, keepdim=True) - 1)
    return w * torch.where(sine > 1e-9, angle / sine.clamp(min=1e-9), 0.5)


def rotation_matrix(vector: Float[Tensor, "N 3"]) -> Float[Tensor, "N 3 3"]:
    """Rodrigues' formula; inverse of ``rotation_vector``."""
    turns = vector_norm(vector, dim=1)[:, None, None] / math.pi
    cross = (vector @ constant(_SKEW, vector)).view(-1, 3, 3)
    half = torch.sinc(turns / 2)
    return constant(_IDENTITY, vector) + torch.sinc(turns) * cross + 0.5 * half * half * torch.bmm(cross, cross)


def end_effector_orientation(rotation: Float[Tensor, "N 3 3"]) -> Float[Tensor, "N 3"]:
    """The end effector's orientation as LIBERO's axis-angle, on the branch where the axis has a positive x component.

    A gripper that points down is near (pi, 0, 0), where plain axis-angle jumps between +pi and -pi; on this branch it
    is smooth for every yaw within (-pi, pi).
    """
    m = rotation
    # The quaternion from its largest component, which for every downward pose is x or y; x >= 0 picks the branch.
    qx = (1 + m[:, 0, 0] - m[:, 1, 1] - m[:, 2, 2]).clamp(min=1e-12).sqrt() / 2
    xy = m[:, 0, 1] + m[:, 1, 0]
    qy = (1 - m[:, 0, 0] + m[:, 1, 1] - m[:, 2, 2]).clamp(min=1e-12).sqrt() / 2
    qy = torch.where(xy < 0, -qy, qy)
    by_x = qx > qy.abs()
    qz = torch.where(by_x, (m[:, 0, 2] + m[:, 2, 0]) / (4 * qx), (m[:, 1, 2] + m[:, 2, 1]) / (4 * qy))
    qw = torch.where(by_x, (m[:, 2, 1] - m[:, 1, 2]) / (4 * qx), (m[:, 0, 2] - m[:, 2, 0]) / (4 * qy))
    axis = torch.stack([qx, qy, qz], dim=1)
    sine = vector_norm(axis, dim=1, keepdim=True)
    angle = 2 * torch.atan2(sine, qw[:, None])
    return axis * angle / sine.clamp(min=1e-9)
