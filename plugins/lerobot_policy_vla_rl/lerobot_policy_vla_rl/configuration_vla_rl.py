"""The settings of a bundle in LeRobot, its ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass

from lerobot.configs.policies import PreTrainedConfig
from lerobot.optim.optimizers import OptimizerConfig


@PreTrainedConfig.register_subclass("vla_rl")
@dataclass
class VlaRlConfig(PreTrainedConfig):
    """``robot_file``: a robot file with a section ``lerobot``, which says what the arm's values mean for the policy;
    "": state and action are the policy's own, as of a simulator.

    ``n_action_steps``: actions of a chunk that are executed before the next one; 0: the robot file's
    ``control.chunking.execute_steps``, and the whole chunk without a robot file, or where the policy remembers its
    decisions.
    """

    robot_file: str = ""
    n_action_steps: int = 0
    seed: int = 0

    @property
    def observation_delta_indices(self) -> None:
        """The policy keeps its own memory."""
        return

    @property
    def action_delta_indices(self) -> None:
        return

    @property
    def reward_delta_indices(self) -> None:
        return

    def get_optimizer_preset(self) -> OptimizerConfig:
        raise NotImplementedError("bundles are trained by vla-rl; LeRobot only executes them")

    def get_scheduler_preset(self) -> None:
        return

    def validate_features(self) -> None:
        """ValueError unless there are a state and an action."""
        if self.robot_state_feature is None or self.action_feature is None:
            raise ValueError("this config.json lacks observation.state or action; write it again with "
                             "python -m lerobot_policy_vla_rl BUNDLE")  # fmt: skip
