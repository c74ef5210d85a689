"""What a checkpoint expects of a robot's observations and means by its actions, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from policies.normalizer import Normalizer
from policies.policy import RobotSpec
from sims.errors import UserError
from sims.numbers.ranges import Count, Interval
from sims.vector_env import Observation

Gripper = Literal["as_is", "zero_to_one_inverted"]


@dataclass(frozen=True, kw_only=True)
class Convention:
    """Applied to observations before a policy's network and to actions after it; the defaults change nothing.

    ``cameras``: the robot's, in the order of the checkpoint's slots; empty: all, in the robot's order. A slot for which
    there is no camera is left out. ``rotate_images``: by 180 degrees. ``crop``: area of the centered crop that is
    scaled up again, 1 for none (OpenVLA was trained with random crops of .9). ``relative_actions``: the first so many
    elements of an action are relative to the state at the start of the chunk (openpi's extra_delta_transform).
    ``gripper``: of the last element; zero_to_one_inverted is 0 closed .. 1 open for a robot that opens at -1 and closes
    at 1, and only these two are sent (OpenVLA in LIBERO).
    """

    cameras: tuple[str, ...] = ()
    rotate_images: bool = False
    crop: Annotated[float, Interval(gt=0, le=1)] = 1.0
    relative_actions: Count = 0
    gripper: Gripper = "as_is"

    def __post_init__(self) -> None:
        if not 0 < self.crop <= 1:
            raise ValueError(f"convention.crop must be an area within (0, 1], got {self.crop}")
        if self.relative_actions < 0:
            raise ValueError(f"convention.relative_actions must not be negative, got {self.relative_actions}")

    @property
    def changes_actions(self) -> bool:
        return self.relative_actions > 0 or self.gripper != "as_is"

    def normalizer(self, robot: RobotSpec) -> Normalizer:
        """Of a checkpoint's states and actions, before ``fit`` the identity."""
        return Normalizer(
            state_dim=robot.state_dim, action_dim=robot.action_dim, robot_actions=not self.changes_actions
        )

    def refuse_fitting(self) -> None:
        """UserError where scales measured on the robot's actions would not be those of the checkpoint's."""
        if self.changes_actions:
            raise UserError(
                "policy.convention changes actions, so their scales are the checkpoint's: start from its bundle "
                "(vla-rl convert), or leave relative_actions and gripper out"
            )

    def check_robot(self, robot: RobotSpec) -> None:
        """UserError where the robot has no camera or not one that is chosen, and where more elements of its actions
        are relative than its actions or its state have."""
        if not robot.cameras:
            raise UserError("this policy needs a camera, and the robot or simulator has none: choose another policy")
        unknown = sorted(set(self.cameras) - set(robot.cameras))
        if unknown:
            raise UserError(
                f"policy.convention.cameras: the robot has no camera {unknown[0]!r}; it has {', '.join(robot.cameras)}"
            )
        most = min(robot.action_dim, robot.state_dim)
        if self.relative_actions > most:
            raise UserError(
                f"policy.convention.relative_actions must be at most {most}, as the robot has {robot.action_dim} "
                f"action and {robot.state_dim} state dimensions, got {self.relative_actions}"
            )

    def observe(self, obs: Observation, cameras: tuple[str, ...]) -> Observation:
        """``cameras``: names of the images of ``obs``."""
        images = obs.images
        if self.cameras:
            images = images[:, [cameras.index(name) for name in self.cameras]]
        if self.rotate_images:
            images = torch.flip(images, dims=(-3, -2))
        return replace(obs, images=center_crop(images, self.crop) if self.crop < 1 else images)

    def to_robot(self, action: Float[Tensor, "B H A"], state: Float[Tensor, "B state_dim"]) -> Float[Tensor, "B H A"]:
        """From the units of the checkpoint's data set to the robot's, in [-1, 1]."""
        action = action + self._origin(action, state)
        if self.gripper == "zero_to_one_inverted":
            action = torch.cat([action[..., :-1], -torch.sign(2 * action[..., -1:] - 1)], dim=-1)
        return action.clamp(-1, 1)

    def from_robot(self, action: Float[Tensor, "B H A"], state: Float[Tensor, "B state_dim"]) -> Float[Tensor, "B H A"]:
        """The inverse, for demonstrations."""
        if self.gripper == "zero_to_one_inverted":
            action = torch.cat([action[..., :-1], (1 - action[..., -1:]) / 2], dim=-1)
        return action - self._origin(action, state)

    def _origin(self, action: Tensor, state: Tensor) -> Tensor:
        count = self.relative_actions
        return F.pad(state[:, None, :count], (0, action.shape[-1] - count))


def center_crop(images: UInt8[Tensor, "*N height width 3"], area: float) -> UInt8[Tensor, "*N height width 3"]:
    """The central part with this share of the area, scaled back to the full size.

    As TensorFlow's crop_and_resize and convert_image_dtype, which OpenVLA has it from: bilinear with the corners
    aligned, and what is behind the point cut off.
    """
    x = images.reshape(-1, *images.shape[-3:]).movedim(-1, 1).float()
    rows, columns = (torch.linspace(-(area**0.5), area**0.5, size, device=x.device) for size in x.shape[-2:])
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)
    scaled = F.grid_sample(x, grid.expand(len(x), -1, -1, -1), align_corners=True)
    return (scaled * (255.5 / 255)).clamp(0, 255).to(torch.uint8).movedim(1, -1).reshape(images.shape)
