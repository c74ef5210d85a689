"""The configuration of ``vla-rl correct`` and ``vla-rl learn``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from policies.residual.policy import ResidualConfig
from real_robot.corrections.settings import ControlSettings
from sims.numbers.ranges import Interval, PositiveFloat, PositiveInt, Seed
from vla_rl.algorithms.bc import BCConfig
from vla_rl.algorithms.off_policy_settings import RecordedUpdatesConfig

CLONING, HUMAN_SHARE = BCConfig(steps=400, batch_size=64, learning_rate=3e-4), 0.5


@dataclass(frozen=True, kw_only=True)
class OwnSteps:
    """The policy clones its own steps of successful episodes, too, but for ``pre_intervention_steps`` before each
    take-over: these led to what had to be corrected."""

    pre_intervention_steps: PositiveInt = 15


@dataclass(frozen=True, kw_only=True)
class AdaptiveShare:
    """The corrections' share of a batch follows the losses (Pan et al. 2026, SOP, arXiv:2601.03044):
    exp(boost l_on) / (exp(boost l_on) + exp(l_off)), at least ``least`` and at most ``most``.

    l_on and l_off are cloning losses of corrections and of demonstrations by the policy that a round begins with, means
    of ``windows`` random windows each; SOP renews them while it trains.
    """

    boost: PositiveFloat = 1.5
    least: Annotated[float, Interval(gt=0, lt=1)] = 0.2
    most: Annotated[float, Interval(gt=0, lt=1)] = 0.8
    windows: PositiveInt = 200

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"adaptive.least {self.least} is above adaptive.most {self.most}")


@dataclass(frozen=True, kw_only=True)
class LearningConfig:
    """HG-DAgger (Kelly et al. 2019, arXiv:1810.02890): the policy clones what a person did where it would have failed.

    ``human_share``: of every batch, steps that a person drove in successful episodes; the rest are ``demonstrations``,
    stores of the episodes that the policy was cloned from (without any, every batch is corrections alone).
    ``actors``: whose steps have that share; "human" and "policy": Hi-ORS (Lu et al. 2025, arXiv:2510.26406), all steps
    of successful episodes alike, also of those that nobody corrected.
    ``own_steps``: Sirius (Liu et al. 2022, arXiv:2211.08416): demonstrations have the share of a batch that they have
    of all windows, the policy's own steps the rest; null: none of these.
    ``adaptive``: instead of ``human_share``. ``residual``: only a correction of the policy is trained, which itself
    stays as it is; its target is what the person did minus what the policy proposes there. The residual that a round
    made goes on in the next, with these very settings. null: the policy is trained, of one with a residual that alone.
    ``off_policy``: instead of cloning by ``bc`` in the shares above, updates of critics and actor from all episodes,
    failures too (vla_rl/runners/correction_replays.py).
    ``episodes_per_round``: new successes with steps of ``actors`` after which a policy is trained and published.
    """

    bc: BCConfig = CLONING
    demonstrations: tuple[Path, ...] = ()
    human_share: Annotated[float, Interval(gt=0, lt=1)] = HUMAN_SHARE
    actors: tuple[Literal["human", "policy", "expert"], ...] = ("human",)
    own_steps: OwnSteps | None = None
    adaptive: AdaptiveShare | None = None
    residual: ResidualConfig | None = None
    off_policy: RecordedUpdatesConfig | None = None
    episodes_per_round: PositiveInt = 5

    def __post_init__(self) -> None:
        if not self.actors or (self.own_steps is not None and "policy" in self.actors):
            raise ValueError(
                "learning.actors names 'human', or both 'human' and 'policy'; the latter not with own_steps"
            )
        if self.adaptive is not None and self.own_steps is not None:
            raise ValueError("learning.adaptive goes without learning.own_steps: set one of them to null")
        if self.off_policy is not None and (self.adaptive is not None or self.own_steps is not None):
            raise ValueError(
                "learning.off_policy divides no batch by losses or actors: set adaptive, own_steps to null"
            )
        if self.off_policy is not None and (self.bc, self.human_share) != (CLONING, HUMAN_SHARE):
            raise ValueError(
                "learning.off_policy reads neither bc nor human_share: its own are off_policy.steps, batch_size, "
                "actor_learning_rate and demonstration_share"
            )
        if self.residual is not None and self.residual.around != "base":
            raise ValueError("learning.residual corrects the policy's actions: set learning.residual.around to base")


@dataclass(frozen=True, kw_only=True)
class CorrectionsConfig:
    """``control``: of the person at the robot. ``learning``: from the corrections. ``device``: as of a run.

    ``classifier``: settings of the success classifier that the page fits, a YAML file or the name of a packaged one.
    """

    seed: Seed = 0
    device: str = "auto"
    control: ControlSettings = field(default_factory=ControlSettings)
    learning: LearningConfig = field(default_factory=LearningConfig)
    classifier: Path = Path("success_classifier")
