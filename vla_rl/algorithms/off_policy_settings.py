"""Settings of off-policy learning: which parts of the learner a method uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from episodes.catalog import FOLDS
from policies.residual.ensemble import EnsembleConfig
from policies.residual.histogram import HistogramConfig
from sims.numbers.ranges import (
    Count,
    Distinct,
    Interval,
    Names,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Share,
    Width,
)
from vla_rl.algorithms.algorithm import AlgorithmConfig
from vla_rl.algorithms.gate import GateConfig

Fold = Annotated[int, Interval(ge=0, lt=FOLDS)]


@dataclass(frozen=True, kw_only=True)
class EntropyConfig:
    """SAC's entropy bonus. ``target``: of the entropy per action element, in nats of the squashed draw.

    ``temperature``: before training. ``backup``: whether targets hold the bonus of the next action (not for sparse
    rewards: Ball et al. 2023, RLPD).
    """

    target: float = -0.5
    temperature: PositiveFloat = 0.1
    learning_rate: PositiveFloat = 3e-4
    backup: bool = False


@dataclass(frozen=True, kw_only=True)
class IQLConfig:
    """Implicit Q-learning (Kostrikov et al. 2021): no value of an action that was not recorded is ever asked for.

    A state's value V is the ``expectile`` of the values of what was done there (Eq. 5), a target is the reward and the
    next state's V (Eq. 6), and the actor clones what was done with weight min(exp(``temperature`` * (Q - V)),
    ``max_weight``) (Eq. 7), by its own cloning loss: any policy can be the actor, not only a residual.
    """

    expectile: Annotated[float, Interval(gt=0.5, lt=1)] = 0.7
    temperature: NonNegativeFloat = 3.0
    max_weight: PositiveFloat = 100.0


@dataclass(frozen=True, kw_only=True)
class ConditionConfig:
    """The policy clones all and is told the label (policies/residual/conditioned.py), but for a ``dropped`` share of
    the chunks; it acts under "good", with ``guidance`` away from what is done without a label (1: none)."""

    dropped: Annotated[float, Interval(ge=0, lt=1)] = 0.1
    guidance: NonNegativeFloat = 1.0


@dataclass(frozen=True, kw_only=True)
class RecapConfig:
    """RECAP (Physical Intelligence 2025, pi*0.6): V is a histogram of the recorded episodes' returns from a state on,
    the advantage of a window is its reward and V at its end, minus V, and the ``positive`` share of largest advantages
    of a batch is good; so is every chunk that one of ``positive_actors`` chose alone. ``condition``: how the policy
    learns from the labels, by its own cloning loss; null: it goes on cloning what is good alone.
    """

    positive: Annotated[float, Interval(gt=0, le=1)] = 0.3
    positive_actors: tuple[Literal["human", "expert"], ...] = ("human",)
    histogram: HistogramConfig = field(default_factory=lambda: HistogramConfig(bins=201))
    condition: ConditionConfig | None = None


@dataclass(frozen=True, kw_only=True)
class BestOfConfig:
    """The actor of Q-chunking (Li et al. 2025): the best of ``samples`` chunks of the policy by the critic, when it
    acts and as the next action of a target. The policy itself, flow or diffusion with noise, goes on cloning all that
    is drawn.
    """

    samples: Width = 32


@dataclass(frozen=True, kw_only=True)
class CalQLConfig:
    """Calibrated conservative Q-learning (Nakamoto et al. 2023): values of actions that were not recorded are low.

    ``weight`` times logsumexp over actions of Q(s, a) - log density, minus Q of the recorded action, is added to the
    critic's loss; ``draws`` actions each are uniform, the policy's at s and its at the window's end. Values of the
    policy's actions count as at least the discounted return of the recorded episode from s on. ``online_weight``: the
    same once the policy acts (0: WSRL, Zhou et al. 2024).
    """

    weight: PositiveFloat = 5.0
    online_weight: NonNegativeFloat = 5.0
    draws: PositiveInt = 10


def _refuse_changed(config: UpdatesConfig | CalQLConfig | None, names: Sequence[str], where: str) -> None:
    """ValueError where one of these settings, which nothing reads here, is not as it is by default."""
    if config is None:
        return
    section = "algorithm.cal_ql" if isinstance(config, CalQLConfig) else "algorithm"
    for name in names:
        value, default = getattr(config, name), getattr(type(config), name)
        if value != default:
            raise ValueError(f"{section}.{name} has no effect {where}: leave it at {default}, got {value}")


@dataclass(frozen=True, kw_only=True)
class UpdatesConfig:
    """What the updates of critic and actor depend on, wherever the windows come from.

    The first ``critic_warmup`` of all updates train the critic alone, then every ``actor_every``th update also changes
    the actor. ``actor_learning_rate``: of its Adam. ``actor_value``: what the actor maximizes, the mean of the critic's
    members (Chen et al. 2021, REDQ) or the least of them (Haarnoja et al. 2018, SAC). ``n_step``: chunks per target.
    ``demonstration_share`` of every batch is drawn from demonstrations. ``target_noise``: std of the noise on the next
    action of a target, clipped at 0.3, for fixed noise. ``shift``: pixels by which stored images are shifted at random;
    without effect where the encoder that sees them is frozen. ``frozen``: parameter groups that stay as they are.
    ``reward_scale``: of the rewards as the critic learns them, against the entropy bonus and Cal-QL's penalty, which
    are in nats (Haarnoja et al. 2018, SAC, Sec. 5.2).

    ``correction_weight``: of the mean squared correction, in units of the largest, in the actor's loss, whose Q is then
    divided by its mean size. The policy corrects only where Q gains by it. ``cloning_weight``: the same of the distance
    from the action that was recorded, in units of the demonstrations' range: TD3+BC (Fujimoto and Gu 2021, Eq. 5),
    whose alpha is its inverse; ``cloned_actors``: only where one of these chose the whole chunk (RLT clones a person's
    corrections so); null: everywhere. ``iql``, ``recap``, ``best_of`` and ``cal_ql``: null: off.
    """

    n_step: PositiveInt = 3
    batch_size: PositiveInt = 256
    reward_scale: PositiveFloat = 1.0
    demonstration_share: Share = 0.5
    critic_warmup: Count = 500
    actor_every: PositiveInt = 2
    actor_learning_rate: PositiveFloat = 3e-4
    actor_value: Literal["mean", "least"] = "mean"
    correction_weight: NonNegativeFloat = 0.0
    cloning_weight: NonNegativeFloat = 0.0
    cloned_actors: tuple[Literal["human", "expert"], ...] | None = None
    target_noise: NonNegativeFloat = 0.05
    entropy: EntropyConfig | None = None
    iql: IQLConfig | None = None
    recap: RecapConfig | None = None
    best_of: BestOfConfig | None = None
    cal_ql: CalQLConfig | None = None
    shift: Count = 4
    frozen: Names = ()
    max_grad_norm: PositiveFloat = 10.0
    critic: EnsembleConfig = field(default_factory=EnsembleConfig)

    def __post_init__(self) -> None:
        if self.cal_ql is not None and self.entropy is None:
            raise ValueError("algorithm.cal_ql draws actions of a squashed policy: it needs algorithm.entropy: {}")
        actors = [name for name in ("iql", "recap", "best_of", "entropy") if getattr(self, name) is not None]
        if len(actors) > 1:
            raise ValueError(f"algorithm.{actors[0]} goes without algorithm.{actors[1]}: set one of them to null")
        if self.recap is not None and self.critic.histogram is not None:
            raise ValueError("algorithm.critic.histogram is of Q, and recap learns V alone: set recap.histogram")
        actor = next((name for name in ("iql", "recap", "best_of") if getattr(self, name) is not None), None)
        if actor is not None:
            unread = ("cloning_weight", "correction_weight", "actor_value", "target_noise")
            _refuse_changed(self, unread, f"with algorithm.{actor}")
        if self.entropy is not None:
            _refuse_changed(self, ("target_noise",), "with algorithm.entropy")
        if not self.cloning_weight:
            _refuse_changed(self, ("cloned_actors",), "with cloning_weight 0")

    def check_updates(self, updates: int, setting: str) -> None:
        """ValueError where so many updates, of ``setting``, never train the actor."""
        if updates - updates % self.actor_every <= self.critic_warmup:
            raise ValueError(
                f"critic_warmup must be below the {updates} updates of {setting}, or the policy is never trained "
                f"(actor_every {self.actor_every}), got {self.critic_warmup}"
            )

    @property
    def clones(self) -> bool:
        """Whether the policy itself clones, weighted or not, and does not follow Q."""
        return self.iql is not None or self.recap is not None or self.best_of is not None

    @property
    def reads_actions(self) -> bool:
        """Whether it learns from actions that were not made from a known noise."""
        return bool(self.demonstration_share or self.cloning_weight)


@dataclass(frozen=True, kw_only=True)
class RecordedUpdatesConfig(UpdatesConfig):
    """``steps`` updates from recorded episodes alone. ``gamma``: discount per control step."""

    steps: PositiveInt = 1000
    gamma: Annotated[float, Interval(gt=0, le=1)] = 0.97

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of is not None:
            raise ValueError("off_policy.best_of chooses while it acts: set it to null where nothing is acted")
        _refuse_changed(self.cal_ql, ("online_weight",), "where nothing is acted")
        self.check_updates(self.steps, "off_policy.steps")

    @property
    def reads_actions(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(AlgorithmConfig, UpdatesConfig):
    """An iteration acts ``chunks`` chunks in every environment; ``utd_ratio`` updates of the critic follow each chunk
    of an environment.

    The first ``offline_iterations`` act nothing and make ``offline_updates`` updates each from recorded episodes alone.
    ``gate``: which of these are kept; null: all. Before updates of what it acts itself, ``warmup`` chunks of all
    environments together are acted, with uniform noise of up to ``warmup_noise`` added (1 is half of the range that
    demonstrations span). ``stores``: recorded episodes; null: those that start cloned. ``folds``: which tenths of their
    starts (0 to 9, by task and seed); null: all, but in imagination not 0, with which the world model is evaluated.
    ``demonstration_share`` of every batch is drawn from them once the policy acts. ``capacity``: chunks of the replay.
    """

    name: Literal["off_policy"] = "off_policy"
    iterations: Count = 100
    chunks: PositiveInt = 50
    utd_ratio: PositiveFloat = 1.0
    stores: tuple[Path, ...] | None = None
    folds: Annotated[tuple[Fold, ...], Distinct(least=1)] | None = None
    offline_iterations: Count = 0
    offline_updates: PositiveInt = 1000
    gate: GateConfig | None = None
    capacity: PositiveInt = 100_000
    warmup: PositiveInt = 500
    warmup_noise: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate is not None and (self.rollout_shards > 1 or self.staleness):
            raise ValueError(
                "algorithm.gate evaluates in whole episodes between chunks: it needs rollout_shards 1 and staleness 0"
            )
        if self.gate is not None and not self.offline_iterations:
            raise ValueError("algorithm.gate evaluates offline iterations: set algorithm.offline_iterations")
        if not self.offline_iterations:
            _refuse_changed(self.cal_ql, ("weight",), "with offline_iterations 0 (online_weight has)")
        if 0 < self.iterations <= self.offline_iterations:
            _refuse_changed(self.cal_ql, ("online_weight",), "where all iterations are offline")
            self.check_updates(self.iterations * self.offline_updates, "the offline iterations")

    def check_num_envs(self, num_envs: int, setting: str) -> None:
        super().check_num_envs(num_envs, setting)
        if self.capacity <= num_envs:
            raise ValueError(
                f"algorithm.capacity ({self.capacity}) must be above {setting} ({num_envs}): of each environment the "
                "replay holds a chunk and the one after it"
            )

    def with_demonstrations(self, stores: Sequence[Path], *, folds: tuple[int, ...] | None = None) -> OffPolicyConfig:
        return replace(
            self,
            stores=tuple(stores) if self.stores is None else self.stores,
            folds=folds if self.folds is None else self.folds,
        )

    def acting(self) -> OffPolicyConfig:
        return replace(self, capacity=1, stores=None)

    @property
    def reads_actions(self) -> bool:
        return super().reads_actions or bool(self.offline_iterations or self.warmup_noise)

    @property
    def all_offline_updates(self) -> int:
        return self.offline_iterations * self.offline_updates
