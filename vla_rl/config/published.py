"""A published checkpoint as data: which policy it is, for which robot, and how its data were normalized."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from policies.policy import RobotSpec
from policies.pretrained.scales import ScaleConfig
from policies.registry import DEFAULT_POLICY, PolicyConfig


@dataclass(frozen=True, kw_only=True)
class RobotSection:
    """The robot that actions are for; the simulator's own, where the policy is to be trained in one.

    ``action_low``, ``action_high``: actions of the data set that become -1 and 1; one number, or one per dimension.
    """

    action_dim: int = 7
    state_dim: int = 8
    cameras: tuple[str, ...] = ("agentview", "robot0_eye_in_hand")
    image_size: tuple[int, int] = (224, 224)
    control_hz: float = 20.0
    action_low: tuple[float, ...] = (-1.0,)
    action_high: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, limits in (("action_low", self.action_low), ("action_high", self.action_high)):
            if len(limits) not in (1, self.action_dim):
                raise ValueError(
                    f"robot.{name} has {len(limits)} numbers for {self.action_dim} action dimensions: give one, or "
                    f"{self.action_dim}"
                )
        low, high = self.action_limits()
        if not all(math.isfinite(b - a) and b > a for a, b in zip(low, high, strict=True)):
            raise ValueError(
                f"robot.action_high {list(high)} must be above action_low {list(low)} in every dimension, both finite"
            )

    def action_limits(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Low and high of each dimension."""
        low, high = (
            limits * self.action_dim if len(limits) == 1 else limits for limits in (self.action_low, self.action_high)
        )
        return low, high

    def spec(self) -> RobotSpec:
        return RobotSpec(
            action_dim=self.action_dim,
            state_dim=self.state_dim,
            cameras=self.cameras,
            image_size=self.image_size,
            control_hz=self.control_hz,
        )


@dataclass(frozen=True, kw_only=True)
class Published:
    """``statistics``, ``tokenizer``: files, relative to the checkpoint; tokenizer null: the policy needs none.

    ``dataset``: part of the statistics, where the file has several.
    """

    policy: PolicyConfig = field(default_factory=DEFAULT_POLICY)
    robot: RobotSection = field(default_factory=RobotSection)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    statistics: str = "norm_stats.json"
    dataset: str | None = None
    tokenizer: str | None = "tokenizer.model"
