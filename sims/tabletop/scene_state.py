"""The state of the scene, which tasks, experts and labels read, and the arithmetic they share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.linalg import vector_norm

from sims.devices.constant import constant
from sims.tabletop.scene import DRAWER_Y, HANDLE
from sims.tensor_dataclass import TensorDataclass


@dataclass(frozen=True, kw_only=True)
class SceneState(TensorDataclass):
    """The state of the scene: meters, radians, quaternions w first, float32."""

    end_effector: Float[Tensor, "N 3"]  # position
    rotation: Float[Tensor, "N 3 3"]  # of the end effector
    fingers: Float[Tensor, "N 2"]  # opening of each finger, 0 closed
    blocks: Float[Tensor, "N 3 7"]
    peg: Float[Tensor, "N 7"]
    drawers: Float[Tensor, "N 2"]  # opening
    fixtures: Float[Tensor, "N 5 4"]  # position and yaw of mats, cabinet, holes, as in scene.MOCAP

    @property
    def mats(self) -> Float[Tensor, "N 2 3"]:
        return self.fixtures[:, 0:2, :3]

    @property
    def holes(self) -> Float[Tensor, "N 2 3"]:
        return self.fixtures[:, 3:5, :3]

    @property
    def cabinet_yaw(self) -> Float[Tensor, " N"]:
        return self.fixtures[:, 2, 3]

    @property
    def handles(self) -> Float[Tensor, "N 2 3"]:
        """Middle of each handle's bar."""
        offset = constant(((HANDLE[0], DRAWER_Y, HANDLE[1]), (HANDLE[0], -DRAWER_Y, HANDLE[1])), self.drawers)
        offset = torch.nn.functional.pad(self.drawers[..., None], (0, 2)) + offset
        return self.fixtures[:, 2:3, :3] + rotate_z(offset, self.cabinet_yaw[:, None])


def rotate_z(vector: Float[Tensor, "*N 3"], angle: Float[Tensor, "*#N"]) -> Float[Tensor, "*N 3"]:
    """``vector`` turned by ``angle`` [rad] about the vertical axis."""
    x, y, z = vector.unbind(-1)
    cosine, sine = angle.cos(), angle.sin()
    return torch.stack([cosine * x - sine * y, sine * x + cosine * y, z], dim=-1)


def quaternion_yaw(quaternion: Float[Tensor, "*N 4"]) -> Float[Tensor, "*N"]:
    w, x, y, z = quaternion.unbind(-1)
    return torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))


def gap(a: Tensor, b: Tensor) -> Tensor:
    """Distance [m] between points of the same dimension."""
    return vector_norm(a - b, dim=-1)


def near(distance: Tensor, scale: float) -> Tensor:
    """1 at distance 0, about a quarter at ``scale``."""
    return 1 - torch.tanh(distance / scale)


def lift(point: Float[Tensor, "*N 3"], height: Tensor | float) -> Float[Tensor, "*N 3"]:
    """``point`` raised by ``height`` [m]."""
    up = torch.zeros_like(point)
    up[..., 2] = height
    return point + up


def of_candidate(values: Float[Tensor, "N slots D"], slot: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
    """``values[i, slot[i]]`` of every environment."""
    return values[torch.arange(len(values), device=values.device), slot]
