"""The section ``imagination``: reinforcement learning in a world model (docs/world-models.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from sims.numbers.ranges import Count, Distinct, NonNegativeFloat, PositiveInt, Share
from vla_rl.algorithms.bc import BCConfig
from world_models.data.keyframes import KeyframeConfig
from world_models.imagined_env import ImaginedEnvConfig
from world_models.models.conv_flow import ConvFlowConfig
from world_models.registry import DynamicsConfig
from world_models.reward_model import RewardModelConfig
from world_models.training.autoencoder import AutoencoderFitConfig
from world_models.training.distillation import DistillConfig
from world_models.training.dynamics import DynamicsFitConfig


@dataclass(frozen=True, kw_only=True)
class WorldModelConfig:
    """``kinematics_steps``: fit steps of where actions lead the robot, before the images are fitted.
    ``autoencoder_fit``: of a latent model's autoencoder, unless it was loaded. ``distill``: after the fit, into fewer
    denoising steps. ``no_action_steps``: fit steps of a baseline that is not given the actions, for the evaluation
    (0: none).
    """

    dynamics: DynamicsConfig = field(default_factory=ConvFlowConfig)
    kinematics_steps: PositiveInt = 2000
    fit: DynamicsFitConfig = field(default_factory=DynamicsFitConfig)
    autoencoder_fit: AutoencoderFitConfig = field(default_factory=AutoencoderFitConfig)
    distill: DistillConfig | None = None
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    keyframes: KeyframeConfig = field(default_factory=KeyframeConfig)
    imagined_env: ImaginedEnvConfig = field(default_factory=ImaginedEnvConfig)
    no_action_steps: Count = 0

    def __post_init__(self) -> None:
        if self.distill is not None:
            self.distill.stride(self.dynamics.steps)


@dataclass(frozen=True, kw_only=True)
class EvaluationThresholds:
    """What the world model's evaluation must reach; for every miss, imagined episodes are halved, and once more where
    predicted images are no better than a copy of the first one. What is not measured is missed. GRPO and RECAP, which
    need whole episodes, are not trained in a world model with any miss.

    ``stop_below_auc``: below this AUC of success nothing is trained in the world model. AUCs are of length-matched
    pairs where there are 20 or more.
    """

    min_success_auc: Share = 0.8
    max_hallucinated: Share = 0.2
    max_delta_success: Share = 0.2
    stop_below_auc: Share = 0.6


@dataclass(frozen=True, kw_only=True)
class ImaginationConfig:
    """``imagine_every``: the world model is fitted and trained in every so many ``rounds``. ``real_episodes``: recorded
    with the exploring policy at the start of each round, observed every ``observe_every`` control steps (a divisor of
    the world model's action horizon).
    ``demonstrations``: the world model is fitted to those that the run starts from too; since all of them succeed, a
    model fitted mostly to them overestimates success. ``perturbed_chunks``: share of the recorded chunks to which one
    offset is added, drawn per dimension with the std ``perturbation`` (of the action range's half).
    ``clone_successes``: behavior cloning of all successes so far, after each recording (null: none). ``stores``:
    episodes that were recorded before.
    """

    rounds: PositiveInt = 2
    imagine_every: PositiveInt = 1
    real_episodes: PositiveInt = 200
    observe_every: PositiveInt = 4
    demonstrations: bool = True
    perturbed_chunks: Share = 0.0
    perturbation: NonNegativeFloat = 0.05
    clone_successes: BCConfig | None = None
    stores: Annotated[tuple[Path, ...], Distinct()] = ()
    model: WorldModelConfig = field(default_factory=WorldModelConfig)
    thresholds: EvaluationThresholds = field(default_factory=EvaluationThresholds)

    def __post_init__(self) -> None:
        if self.rounds % self.imagine_every:
            raise ValueError(
                f"imagination.rounds {self.rounds} is no multiple of imagination.imagine_every {self.imagine_every}: "
                "what the last rounds record would be trained on by nothing"
            )
