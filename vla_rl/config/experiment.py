"""The configuration of a training run: one section per part, each declared beside the code that reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from policies.device import Precision
from policies.registry import DEFAULT_POLICY, PolicyConfig
from policies.residual.policy import ResidualConfig
from sims.numbers.ranges import Count, NonNegativeFloat, PositiveFloat, PositiveInt, Seed
from sims.tabletop import TabletopConfig
from vla_rl.algorithms.bc import BCConfig
from vla_rl.algorithms.distillation import DistillationConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.pretraining import PretrainingConfig
from vla_rl.algorithms.registry import AnyAlgorithmConfig
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.config.cluster import ClusterConfig
from vla_rl.config.environments import EnvironmentConfig, NoSimulatorConfig
from vla_rl.config.imagination import ImaginationConfig
from vla_rl.rewards.registry import OutcomeConfig, RewardConfig


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """Start from behavior cloning of the simulator's scripted expert.

    ``noise``: how far the expert is from its best. ``observe_every``: control steps between recorded observations
    (neighboring images differ little and rendering them takes most of the time). ``equal_shares``: the same number of
    episodes of each task; false: start states of all tasks in turn, whatever succeeds is kept. ``missing_tasks``: what
    to do where the expert has no success or almost never succeeds at a task. ``store``: recorded episodes to clone
    instead. ``backbone``: pretrained encoder to start from, a file or "tabletop", which ships with the package; null:
    from random weights. ``residual``: added to the cloned policy, which then stays as it is; null: none.
    """

    name: Literal["imitation"] = "imitation"
    episodes: PositiveInt = 400
    noise: NonNegativeFloat = 0.0
    observe_every: PositiveInt = 1
    equal_shares: bool = True
    missing_tasks: Literal["error", "skip"] = "error"
    store: Path | None = None
    backbone: Literal["tabletop"] | Path | None = None
    policy: PolicyConfig = field(default_factory=DEFAULT_POLICY)
    bc: BCConfig = field(default_factory=BCConfig)
    residual: ResidualConfig | None = None


FINE_TUNING = BCConfig(learning_rate=1e-4)


@dataclass(frozen=True, kw_only=True)
class FromBundle:
    """Start from an existing bundle.

    ``store``: recorded episodes that are cloned into its policy first, as ``bc`` says (its learning rate is 1e-4 by
    default), with the scales of states and actions that it has; null: none. ``residual``: added to the policy, which
    then stays as it is; null: none.
    """

    name: Literal["bundle"] = "bundle"
    path: Path
    store: Path | None = None
    bc: BCConfig = FINE_TUNING
    residual: ResidualConfig | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Every ``validate_every`` iterations the deployed policy runs ``validation_episodes`` starts of their own stream
    (0, of either: never); the final figures come from ``episodes`` held-out starts that nothing before has used.
    ``seed``: of both streams; null is the run's own, so that runs of several seeds are evaluated on different starts.
    ``control_episodes``: of each control (docs/algorithms.md) and each other split of the simulator, for the final
    policy; 0: none."""

    episodes: PositiveInt = 200
    seed: Seed | None = None
    validation_episodes: Count = 100
    validate_every: Count = 10
    videos_per_task: Count = 1
    control_episodes: Count = 0

    @property
    def validates(self) -> bool:
        """Whether iterations in a simulator are validated."""
        return self.validate_every > 0 and self.validation_episodes > 0


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """``device``: where everything is computed but the simulator: "auto" (a CUDA GPU if there is one), "cpu", "cuda" or
    "cuda:1". ``precision``: of the policy's matrix products; log-probs, losses, critics and weights stay float32.
    ``compile``: the policy through torch.compile.
    ``reward``: of the episodes that are learned from; evaluation is always by the environment's own success.
    ``imagination``: reinforcement learning in a world model instead of the simulator (docs/world-models.md).
    ``pretraining``: of the encoder, by ``vla-rl pretrain`` alone. ``distillation``: to fewer denoising steps, by
    ``vla-rl distill`` alone. ``wandb``: project of Weights & Biases that gets the metrics too (its environment
    variables apply, such as WANDB_MODE=offline). ``cluster``: rollouts in other processes, on this machine or others;
    null: in the process of the run. ``trace``: iterations, from each start of the process on, whose timeline is written
    to trace.json (open it in https://ui.perfetto.dev). ``watchdog_s``: seconds without progress in a stage
    of the run after which the stage and what every thread is doing are written to watchdog.txt.
    """

    seed: Seed = 0
    device: str = "auto"
    precision: Precision = "float32"
    compile: bool = False
    sim: EnvironmentConfig = field(default_factory=TabletopConfig)
    start: Annotated[Imitation | FromBundle, Field(discriminator="name")] = field(default_factory=Imitation)
    reward: RewardConfig = field(default_factory=OutcomeConfig)
    algorithm: AnyAlgorithmConfig = field(default_factory=PPOConfig)
    imagination: ImaginationConfig | None = None
    pretraining: PretrainingConfig = field(default_factory=PretrainingConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint_every: PositiveInt = 5
    wandb: str | None = None
    cluster: ClusterConfig | None = None
    trace: Count = 3
    watchdog_s: PositiveFloat = 900.0

    @property
    def evaluation_seed(self) -> int:
        """Of the held-out starts and those of validation."""
        return self.seed if self.evaluation.seed is None else self.evaluation.seed

    def __post_init__(self) -> None:
        if self.imagination is not None:
            setting = "imagination.model.imagined_env.num_envs"
            self.algorithm.check_num_envs(self.imagination.model.imagined_env.num_envs, setting)
            if self.algorithm.rollout_shards > 1 or self.algorithm.staleness or self.cluster is not None:
                raise ValueError("imagination needs algorithm.rollout_shards 1, algorithm.staleness 0 and cluster null")
            if not self.without_simulator and not self.evaluation.validation_episodes:
                raise ValueError("imagination chooses the best policy by evaluation.validation_episodes, got 0")
            if not isinstance(self.reward, OutcomeConfig):
                raise ValueError(
                    f"imagination needs reward outcome, got {self.reward.name}: imagined episodes have a reward model "
                    "of their own, imagination.model.reward_model"
                )
        elif not self.without_simulator:
            self.algorithm.check_num_envs(self.sim.num_envs, "sim.num_envs")
        self._check_cluster()

    @property
    def without_simulator(self) -> bool:
        return isinstance(self.sim, NoSimulatorConfig)

    @property
    def divides_weights(self) -> bool:
        """Whether each of several learners has a part of the weights."""
        return self.cluster is not None and self.cluster.sharding != "none"

    def _check_cluster(self) -> None:
        shards = self.algorithm.rollout_shards
        if self.cluster is not None and self.cluster.collects:
            if getattr(self.algorithm, "gate", None) is not None:
                raise ValueError("algorithm.gate evaluates in the run's own process: leave the section cluster out")
            if (wanted := self.cluster.collectors) is not None and wanted > shards:
                raise ValueError(
                    f"cluster.collectors must be at most algorithm.rollout_shards ({shards}), got {wanted}; a run with "
                    "as many shards in one process has the same results"
                )
        if self.cluster is not None and self.cluster.placement == "pipelined":
            if shards == 1:
                raise ValueError("cluster.placement pipelined needs algorithm.rollout_shards of 2 or more, got 1")
            if getattr(self.algorithm, "complete_share", 1.0) < 1:
                raise ValueError("cluster.placement pipelined needs algorithm.complete_share 1")
        if self.cluster is not None and self.cluster.learners > 1:
            self._check_learners(self.cluster.learners)

    def _check_learners(self, learners: int) -> None:
        update = getattr(self.algorithm, "update", None)
        if not isinstance(update, UpdateConfig):
            raise ValueError(f"cluster.learners: algorithm {self.algorithm.name} learns in one process; set learners 1")
        if (parts := update.minibatch // update.micro_batch) < learners:
            raise ValueError(
                f"cluster.learners must be at most the micro-batches of a minibatch, which they share ({parts}), got "
                f"{learners}; a smaller algorithm.update.micro_batch makes more"
            )
        if update.reference_weight:
            raise ValueError(
                "cluster.learners needs algorithm.update.reference_weight 0: the random numbers of that loss are drawn "
                "in one sequence"
            )
