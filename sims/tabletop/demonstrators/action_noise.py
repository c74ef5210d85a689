"""Correlated noise of a demonstrator's actions."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sims.devices.constant import constant

JITTER = 0.05  # std of the AR(1) noise on actions of full size


class ActionNoise:
    """AR(1) noise of [N, 7] actions, in proportion to the size of the motion; the gripper has none."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self._value = torch.zeros(num_envs, 7, device=device)

    def advance(self, draw: Float[Tensor, "N 7"], started: Bool[Tensor, " N"]) -> None:
        """``draw``: normal draws, scaled by the demonstrator's noise. ``started``: episodes at their first step."""
        shock = JITTER * draw * constant((1, 1, 1, 0.3, 0.3, 0.3, 0), draw)
        self._value = torch.where(started[:, None], shock, 0.8 * self._value + 0.6 * shock)

    def apply(self, action: Float[Tensor, "N 7"], speed: Float[Tensor, "N 1"]) -> Float[Tensor, "N 7"]:
        """The action with noise, in [-1, 1]. ``speed``: norm of the translation, in action units."""
        return (action + (0.15 + speed) * self._value).clamp(-1, 1)
