"""The reward model: a classifier of an episode's status (running, success, failed) from observations.

Its encoder is a compact encoder and may start from a policy's weights. It reads the current observation and the
episode's first one, which is recorded and therefore sharp. From both it predicts the state in which the task ends; the
distance from there to the current state, which is predicted accurately, is more reliable than blurred images.

It is trained on recorded observations and on predicted versions of them, and its thresholds are set on predicted
episodes, because classifiers that are nearly perfect on recorded images err on predicted ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeGuard

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn

from policies.compact_encoder import CompactEncoder, CompactEncoderConfig, Forecast, HasCompactEncoder
from policies.normalizer import Normalizer
from policies.policy import RobotSpec
from policies.tensor_file import digest
from sims.devices.crossing import crossing
from sims.numbers.ranges import Count, Interval, NonNegativeFloat, PartialShare, PositiveFloat, PositiveInt, Share
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation
from world_models.data.clip import FAILED, SUCCESS

TAKEN = ("encoder", "forecast", "normalizer")  # parts of a policy with a compact encoder
GOAL_GAIN = 4.0  # scales distances to the magnitude of the encoder's features

Images = UInt8[Tensor, "B cameras height width 3"]
States = Float[Tensor, "B state_dim"]
Instructions = UInt8[Tensor, "B instruction_bytes"]
Features = Float[Tensor, "B feature_dim"]


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """``encoder``: equal to the policy's, where its weights are to be the start. ``frozen_encoder``: it keeps them.

    ``imagined_share``: of each batch that is predicted. ``imagined_clips``, ``imagined_chunks``: number and length of
    the predicted clips. ``near_end_steps``: running observations this close to an end are mined as negatives (0:
    none). ``shift``: training images are shifted by up to this many pixels (Kostrikov et al. 2021, Sec. 3.1).
    ``goal_weight``: of the error in predicting the state in which a successful episode ends. ``false_success``: share
    of failed episodes that may be rewarded. ``min_successes``: successful recorded episodes needed.
    """

    encoder: CompactEncoderConfig = field(default_factory=lambda: CompactEncoderConfig(width=128))
    frozen_encoder: bool = False
    steps: PositiveInt = 600
    batch_size: PositiveInt = 128
    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.05
    imagined_share: PartialShare = 0.5
    imagined_clips: PositiveInt = 1200
    imagined_chunks: PositiveInt = 4
    near_end_steps: Count = 12
    shift: Annotated[int, Interval(ge=0, le=4096)] = 2
    goal_weight: NonNegativeFloat = 1.0
    false_success: Share = 0.05
    min_successes: PositiveInt = 10


@dataclass(frozen=True, kw_only=True)
class StatusEstimate(TensorDataclass):
    """At most one of ``success`` and ``failed`` is True; ``probability``: of success."""

    success: Bool[Tensor, "*B"]
    failed: Bool[Tensor, "*B"]
    probability: Float[Tensor, "*B"]


class RewardModel(nn.Module):
    """Thresholds are buffers, so that they are saved with the weights.

    ``success_threshold`` is for estimates: as many calibration episodes exceed it as truly succeed.
    ``reward_threshold`` is for training: few failed episodes exceed it, since a policy exploits false rewards.
    """

    success_threshold: Tensor
    reward_threshold: Tensor
    failed_threshold: Tensor

    def __init__(self, config: RewardModelConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.config, self.robot = config, robot
        self.encoder = CompactEncoder(
            config.encoder, cameras=len(robot.cameras), image_size=robot.image_size, state_dim=robot.state_dim
        )
        pooled_width = self.encoder.pooled_width
        self.forecast = Forecast(config.encoder, pooled_width=pooled_width, state_dim=robot.state_dim)
        self.normalizer = Normalizer(state_dim=robot.state_dim, action_dim=robot.action_dim)
        self.feature_dim = pooled_width + self.forecast.dims
        inputs = 2 * (self.feature_dim + 1)  # of the first and the current observation; 1: the distance to a goal
        self.head = nn.Sequential(nn.Linear(inputs, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 3))
        self.register_buffer("success_threshold", torch.tensor(0.5))
        self.register_buffer("reward_threshold", torch.tensor(0.5))
        self.register_buffer("failed_threshold", torch.tensor(0.5))

    @property
    def device(self) -> torch.device:
        return self.success_threshold.device

    def encode(self, images: Images, state: States, instruction: Instructions) -> Features:
        """Features of observations: the encoder's summary, and the normalized state in which the task ends."""
        obs = Observation(images=images, state=state, instruction=instruction)
        pooled = self.encoder(obs, self.normalizer.normalize_state(state)).pooled
        return torch.cat([pooled, self.forecast(pooled)[:, -1]], dim=1)

    def logits(self, first: Features, current: Features, state: States) -> Float[Tensor, "B 3"]:
        """``first`` and ``current``: features of the episode's first and of the current observation."""
        dims = self.forecast.dims
        normalized = self.normalizer.normalize_state(state)[:, :dims]
        goals = GOAL_GAIN * torch.stack([first[:, -dims:] - normalized, current[:, -dims:] - normalized], dim=1)
        distance = (goals.square().sum(2) + 1e-3).sqrt()
        return self.head(torch.cat([first[:, :-dims], current[:, :-dims], goals.flatten(1), distance], dim=1))

    @torch.no_grad()
    def classify(
        self, first: Features, images: Images, state: States, instruction: Instructions, *, strict: bool
    ) -> StatusEstimate:
        """``first``: features of the episodes' first observations. ``strict``: use ``reward_threshold``."""
        probability = torch.softmax(self.logits(first, self.encode(images, state, instruction), state), dim=-1)
        success = probability[:, SUCCESS] > (self.reward_threshold if strict else self.success_threshold)
        failed = (probability[:, FAILED] > self.failed_threshold) & ~success
        return StatusEstimate(success=success, failed=failed, probability=probability[:, SUCCESS])

    def start_from(self, policy: object) -> bool:
        """Copy the encoder of ``policy``, if it has a compact encoder of the same settings; whether it was copied.

        ValueError as of ``takes_encoder``.
        """
        if takes_encoder(policy, self.config):
            for name in TAKEN:
                with crossing("weights"):
                    getattr(self, name).load_state_dict(getattr(policy, name).state_dict())
            self.encoder.requires_grad_(not self.config.frozen_encoder)
            return True
        return False


def taken_digest(policy: object, config: RewardModelConfig) -> str | None:
    """sha256 of the weights that a reward model starts from; None where it takes none of ``policy``.

    ValueError as of ``takes_encoder``.
    """
    if not takes_encoder(policy, config):
        return None
    with crossing("weights"):
        return digest(
            {f"{name}.{key}": one.cpu() for name in TAKEN for key, one in getattr(policy, name).state_dict().items()}
        )


def takes_encoder(policy: object, config: RewardModelConfig) -> TypeGuard[HasCompactEncoder]:
    """Whether a reward model starts from the encoder of ``policy``. ValueError where it is to keep it and cannot."""
    same = isinstance(policy, HasCompactEncoder) and policy.encoder.config == config.encoder
    if config.frozen_encoder and not same:
        raise ValueError(
            "frozen_encoder needs a policy with a compact encoder of the same settings, whose weights it keeps; "
            "set encoder to the policy's, or frozen_encoder to false"
        )
    return same
