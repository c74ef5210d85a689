"""Scale of states and actions, kept in buffers so that it travels with the weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sims.devices.crossing import crossing

# A dimension that moves less than this is constant: dividing by its spread would amplify noise.
CONSTANT_SPREAD = 1e-4
Part = Literal["state", "action"]
STATE_RANGE = (0.01, 0.99)  # state_quantiles of policies that cut normalized states off at -1 and 1
_BUFFERS: Mapping[Part, tuple[str, str]] = {
    "state": ("state_mean", "state_std"),
    "action": ("action_center", "action_scale"),
}


class Normalizer(nn.Module):
    """State to zero mean and unit std; action's 1 %..99 % range to [-1, 1], each dimension on its own.

    An action dimension whose 1 %..99 % range is a single value, as of a gripper that hardly ever closes, is scaled by
    its minimum and maximum. A constant dimension is only shifted, never stretched. Before ``fit`` both maps are the
    identity. ``state_fixed``: ``fit`` leaves the scale of states as it is, because pretrained weights expect it.
    ``robot_actions``: what it scales are the robot's own actions, not what a checkpoint makes them from.
    """

    state_fixed: bool

    state_mean: Tensor
    state_std: Tensor
    action_center: Tensor
    action_scale: Tensor

    def __init__(self, *, state_dim: int, action_dim: int, robot_actions: bool = True) -> None:
        super().__init__()
        self.robot_actions = robot_actions
        self.state_fixed = False
        self.register_buffer("state_mean", torch.zeros(state_dim))
        self.register_buffer("state_std", torch.ones(state_dim))
        self.register_buffer("action_center", torch.zeros(action_dim))
        self.register_buffer("action_scale", torch.ones(action_dim))

    @torch.no_grad()
    @crossing("scales")
    def fit(
        self,
        state: Float[Tensor, "N state_dim"],
        action: Float[Tensor, "M action_dim"],
        quantiles: tuple[float, float] = (0.01, 0.99),
        state_quantiles: tuple[float, float] | None = None,
    ) -> None:
        """Measure demonstrations; quantiles (0, 1) is min and max. ValueError on empty or non-finite data.

        ``quantiles``: of the actions' range. ``state_quantiles``: states are scaled like actions, by this range.
        """
        for name, rows, width in (
            ("state", state, len(self.state_mean)),
            ("action", action, len(self.action_center)),
        ):
            if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
                raise ValueError(f"normalizer.fit: {name} must be [rows > 0, {width}], got {list(rows.shape)}")
            if not bool(torch.isfinite(rows).all()):
                raise ValueError(f"normalizer.fit: {name} has NaN or infinite entries; clean the demonstrations first")
        state, action = state.double(), action.double()
        if not self.state_fixed:
            center, spread = state.mean(dim=0), state.std(dim=0, correction=0)
            if state_quantiles is not None:
                center, spread = _range(state, state_quantiles)
            self.set_scale("state", center, torch.where(spread > CONSTANT_SPREAD, spread, 1.0))
        center, half = _range(action, quantiles)
        self.set_scale("action", center, torch.where(half > CONSTANT_SPREAD, half, 1.0))

    @torch.no_grad()
    def set_scale(self, part: Part, center: Float[Tensor, " n"], scale: Float[Tensor, " n"]) -> None:
        """Of states or actions: x -> (x - center) / scale, as a published checkpoint has it."""
        for name, value in zip(_BUFFERS[part], (center, scale), strict=True):
            getattr(self, name).copy_(value)

    def normalize_state(self, state: Float[Tensor, "*B state_dim"]) -> Float[Tensor, "*B state_dim"]:
        return (state - self.state_mean) / self.state_std

    def normalize_action(self, action: Float[Tensor, "*B action_dim"]) -> Float[Tensor, "*B action_dim"]:
        return (action - self.action_center) / self.action_scale

    def unnormalize_action(self, action: Float[Tensor, "*B action_dim"]) -> Float[Tensor, "*B action_dim"]:
        return action * self.action_scale + self.action_center


def _range(
    rows: Float[Tensor, "N dims"], quantiles: tuple[float, float]
) -> tuple[Float[Tensor, " dims"], Float[Tensor, " dims"]]:
    """Center and half width of the range between the quantiles, or of all where that is a single value."""
    ordered = rows.sort(dim=0).values
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in quantiles)
    rare = (high - low <= 2 * CONSTANT_SPREAD) & (ordered[-1] - ordered[0] > 2 * CONSTANT_SPREAD)
    low, high = torch.where(rare, ordered[0], low), torch.where(rare, ordered[-1], high)
    return (low + high) / 2, (high - low) / 2


def normalizer_of(policy: object) -> Normalizer | None:
    """Of a policy whose scales others may take over; where it does not scale the robot's actions, these stay as they
    are, in [-1, 1]."""
    normalizer: Normalizer | None = getattr(policy, "normalizer", None)
    if normalizer is None or normalizer.robot_actions:
        return normalizer
    unscaled = copy.deepcopy(normalizer)
    unscaled.action_center.zero_()
    unscaled.action_scale.fill_(1)
    return unscaled


def in_units(policy: object, action: Float[Tensor, "*B action_dim"]) -> Float[Tensor, "*B action_dim"]:
    """``action`` in units of the demonstrations' range, where ``policy`` knows that; else as it is."""
    normalizer = normalizer_of(policy)
    return action if normalizer is None else normalizer.normalize_action(action)
