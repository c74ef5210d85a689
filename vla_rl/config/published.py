"""A published checkpoint as data: which policy it is, for which robot, and how its data were normalized."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.policy import RobotSpec
from policies.pretrained.scales import ScaleConfig
from policies.registry import DEFAULT_POLICY, PolicyConfig


@dataclass(frozen=True, kw_only=True)
class RobotSection:
    """The robot that actions are for; the simulator's own, where the policy is to be trained in one."""

    action_dim: int = 7
    state_dim: int = 8
    cameras: tuple[str, ...] = ("agentview", "robot0_eye_in_hand")
    image_size: tuple[int, int] = (224, 224)
    control_hz: float = 20.0

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
