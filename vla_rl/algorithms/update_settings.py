"""Settings of a clipped update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sims.numbers.ranges import Interval, Names, NonNegativeFloat, PartialShare, PositiveFloat, PositiveInt
from vla_rl.algorithms.log_ratio import Reduction


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How a policy is changed by a batch.

    ``adaptive_rate``: the learning rate starts at ``learning_rate`` and follows ``target_kl``, between a tenth and ten
    times of where it started, and needs ``epochs`` above 1. Adam's first steps have full size in every direction, most
    of which are noise; with a constant rate that suits later iterations they spoil the policy
    (docs/notes/learning-experiments.md).
    ``frozen``: parameter groups of the policy that are not trained. ``target_kl`` is in sum units (over denoising
    steps, executed actions and dimensions); once a minibatch exceeds it only the critic is updated; null turns it off.
    ``micro_batch``: chunks per backward pass, gradients accumulate to ``minibatch``. ``reference_weight``: of behavior
    cloning towards the frozen policy that training started from. ``denoising_discount`` scales the advantage of earlier
    denoising steps (DPPO, Ren et al. 2024, Sec. 4.3), for step-wise ratios. ``clip_first_step`` is the clip of the
    noisiest trained step, growing exponentially to ``clip_low`` / ``clip_high`` at the last (DPPO); null clips all
    steps alike. ``average``: decay per optimizer step of the moving average of the weights that is evaluated and
    shipped; null ships the last weights. ``audit_tolerance``: largest difference in nats between a log-prob of the
    rollout and the same one computed for the update, before a run stops; null: 1e-3 for float32, 0.1 for bfloat16.
    ``max_behavior_weight``: with staleness, samples that the present policy prefers more than that are dropped.
    """

    learning_rate: PositiveFloat = 1e-4
    adaptive_rate: bool = False
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[PartialShare, PartialShare] = (0.9, 0.95)
    epochs: PositiveInt = 4
    minibatch: PositiveInt = 512
    micro_batch: PositiveInt = 512
    reduction: Reduction = "chunk_sum"
    clip_low: Annotated[float, Interval(gt=0, le=1)] = 0.2
    clip_high: PositiveFloat = 0.2
    clip_first_step: Annotated[float, Interval(gt=0, le=1)] | None = None
    dual_clip: Annotated[float, Interval(gt=1)] | None = 3.0
    target_kl: PositiveFloat | None = 0.05
    max_grad_norm: PositiveFloat = 1.0
    entropy_weight: NonNegativeFloat = 0.0
    reference_weight: NonNegativeFloat = 0.0
    denoising_discount: Annotated[float, Interval(gt=0, le=1)] = 1.0
    normalize_advantage: bool = True
    frozen: Names = ()
    average: PartialShare | None = None
    audit_tolerance: PositiveFloat | None = None
    max_behavior_weight: PositiveFloat = 2.0

    @property
    def weighs_steps(self) -> bool:
        """Whether denoising steps differ in their advantage or clip."""
        return self.denoising_discount != 1 or self.clip_first_step is not None

    def __post_init__(self) -> None:
        if self.minibatch % self.micro_batch:
            raise ValueError(f"minibatch ({self.minibatch}) must be a multiple of micro_batch ({self.micro_batch})")
        if self.adaptive_rate and self.target_kl is None:
            raise ValueError("adaptive_rate follows target_kl: give target_kl, or set adaptive_rate: false")
        if self.adaptive_rate and self.epochs == 1:
            raise ValueError(
                "adaptive_rate follows the KL of earlier steps on the same batch, and with epochs 1 there may be none: "
                "set epochs to 2 or more, or adaptive_rate: false"
            )
        if self.weighs_steps and self.reduction.startswith("chunk"):
            raise ValueError("denoising_discount and clip_first_step need reduction step_sum or step_mean")
