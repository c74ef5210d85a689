"""The minibatch loop that PPO and GRPO share: clipped surrogate, optional critic, target KL, accumulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from policies.compact_vla import Context
from policies.denoising.policy import DenoisingPolicy
from policies.policy import DenoisingTrace
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation
from vla_rl.algorithms.log_ratio import Reduction, approximate_kl, reduce_log_ratio
from vla_rl.algorithms.surrogate import clipped_surrogate, value_loss
from vla_rl.critics.value import CriticConfig, ValueCritic

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How a policy is moved by a batch.

    ``target_kl`` is in sum units (over denoising steps, executed actions and dimensions); when a minibatch exceeds
    it the update stops; null turns it off. ``micro_batch``: rows per backward pass, gradients accumulate to
    ``minibatch``. ``reference_weight`` ties the policy to the frozen one it started from. ``denoising_discount``
    scales the advantage of earlier denoising steps (DPPO, Ren et al. 2024, Sec. 4.3), for step-wise ratios.
    ``clip_first_step`` is the clip of the noisiest trained step, growing exponentially to ``clip_low`` /
    ``clip_high`` at the last (DPPO); null clips all steps alike. ``average``: decay per optimizer step of the moving
    average of the weights that is evaluated and shipped; null ships the last weights.
    """

    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    epochs: int = 4
    minibatch: int = 512
    micro_batch: int = 512
    reduction: Reduction = "chunk_sum"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_first_step: float | None = None
    dual_clip: float | None = 3.0
    target_kl: float | None = 0.05
    max_grad_norm: float = 1.0
    entropy_weight: float = 0.0
    reference_weight: float = 0.0
    denoising_discount: float = 1.0
    normalize_advantage: bool = True
    train_encoder: bool = True
    average: float | None = None

    def __post_init__(self) -> None:
        if self.minibatch % self.micro_batch:
            raise ValueError(f"minibatch ({self.minibatch}) must be a multiple of micro_batch ({self.micro_batch})")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be greater than 1, got {self.dual_clip}")
        per_step = self.denoising_discount != 1 or self.clip_first_step is not None
        if per_step and self.reduction.startswith("chunk"):
            raise ValueError("denoising_discount and clip_first_step need reduction step_sum or step_mean")


@dataclass(frozen=True, kw_only=True)
class Batch(TensorDataclass):
    """Flat chunks with what to push and how hard. ``weight`` averages to one over the batch."""

    inputs: TensorDataclass
    path: DenoisingTrace
    log_prob: Float[Tensor, "B S H A"]
    num_executed: Int[Tensor, " B"]
    advantage: Float[Tensor, " B"]
    weight: Float[Tensor, " B"]
    value: Float[Tensor, " B"] | None = None
    value_target: Float[Tensor, " B"] | None = None

    def __len__(self) -> int:
        return len(self.advantage)


def encoded(policy: DenoisingPolicy, inputs: TensorDataclass) -> Any:
    """What the policy sees: an observation is encoded, a context (the policy knows of which kind) was already."""
    return policy.encode(inputs) if isinstance(inputs, Observation) else inputs


class PolicyUpdate:
    """Moves ``policy`` (and ``critic``) on batches; owns the optimizers and the shuffling generator."""

    def __init__(
        self,
        policy: DenoisingPolicy,
        *,
        config: UpdateConfig,
        reference: DenoisingPolicy | None,
        critic: ValueCritic | None,
        critic_config: CriticConfig | None,
        generator: torch.Generator,
    ) -> None:
        self.policy, self.reference, self.critic = policy, reference, critic
        self.config, self.critic_config, self.generator = config, critic_config, generator
        self.parameters = policy.trainable_parameters(encoder=config.train_encoder)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )
        self.critic_optimizer: torch.optim.Optimizer | None = None
        if critic is not None and critic_config is not None:
            self.critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=critic_config.learning_rate)
        self._average = None
        if config.average is not None:
            self._average = AveragedModel(policy, multi_avg_fn=get_ema_multi_avg_fn(config.average))

    @property
    def averaged(self) -> DenoisingPolicy | None:
        """The moving average of the policy, if one is kept."""
        if self._average is None:
            return None
        assert isinstance(self._average.module, DenoisingPolicy)
        return self._average.module

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "critic_optimizer": None if self.critic_optimizer is None else self.critic_optimizer.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "shuffle": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.critic_optimizer is not None:
            self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        self.generator.set_state(state["shuffle"])

    def run(self, batch: Batch, *, train_policy: bool = True) -> Metrics:
        """All epochs over ``batch``; ``train_policy=False`` (critic warm-up) leaves the policy as it is.

        Once a minibatch exceeds the target KL only the critic goes on learning.
        """
        totals: dict[str, list[float]] = defaultdict(list)
        moving, policy_steps = train_policy, 0
        for _ in range(self.config.epochs):
            for minibatch in self._minibatches(batch):
                if not moving and self.critic is None:
                    break
                metrics = self._minibatch_step(minibatch, moving)
                for name, value in metrics.items():
                    totals[name].append(value)
                moving = moving and not self._kl_exceeded(metrics)
                policy_steps += moving
        summary = {name: sum(values) / len(values) for name, values in totals.items()}
        if "kl" in totals:
            summary["kl_last"] = totals["kl"][-1]
        return summary | {"policy_steps": float(policy_steps)}

    def _minibatches(self, batch: Batch) -> Iterator[Batch]:
        order = torch.randperm(len(batch), generator=self.generator)
        for index in order.split(self.config.minibatch):
            if len(index) * 2 >= min(self.config.minibatch, len(batch)):  # a scrap's gradient is mostly noise
                yield batch[index]

    def _minibatch_step(self, batch: Batch, train_policy: bool) -> Metrics:
        config = self.config
        advantage = batch.advantage
        if config.normalize_advantage and len(batch) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic_optimizer is not None:
            self.critic_optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = defaultdict(float)
        for index in torch.arange(len(batch)).split(config.micro_batch):
            micro = batch[index]
            loss, metrics = self._losses(micro, advantage[index], train_policy)
            share = len(index) / len(batch)
            (loss * share).backward()
            for name, value in metrics.items():
                totals[name] += value * share
        if train_policy and not self._kl_exceeded(totals):
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
            totals["grad_norm"] = norm.item()
            self.optimizer.step()
            if self._average is not None:
                self._average.update_parameters(self.policy)
        if self.critic_optimizer is not None:
            self.critic_optimizer.step()
        return dict(totals)

    def _kl_exceeded(self, metrics: Metrics) -> bool:
        return self.config.target_kl is not None and metrics.get("kl", 0.0) > self.config.target_kl

    def _losses(self, batch: Batch, advantage: Tensor, train_policy: bool) -> tuple[Tensor, Metrics]:
        with torch.set_grad_enabled(train_policy):
            context = encoded(self.policy, batch.inputs)
        metrics: Metrics = {}
        loss = torch.zeros(())
        if train_policy:
            policy_loss, metrics = self._policy_loss(context, batch, advantage)
            loss = loss + policy_loss
        if self.critic is not None:
            critic_loss, value = self._critic_loss(context, batch)
            loss = loss + critic_loss
            metrics |= {"value_loss": critic_loss.item(), "value_mean": value.mean().item()}
        return loss, metrics

    def _policy_loss(self, context: Context, batch: Batch, advantage: Tensor) -> tuple[Tensor, Metrics]:
        config = self.config
        difference = self.policy.log_prob(context, batch.path) - batch.log_prob
        log_ratio = reduce_log_ratio(difference, batch.num_executed, config.reduction)
        units = log_ratio.shape[1]
        low, high = self._clips(units)
        surrogate = clipped_surrogate(
            log_ratio,
            advantage[:, None] * self._discounts(units),
            clip_low=low,
            clip_high=high,
            dual_clip=config.dual_clip,
        )
        loss = (surrogate.mean(1) * batch.weight).mean()
        with torch.no_grad():
            total = reduce_log_ratio(difference, batch.num_executed, "chunk_sum")
            clipped = ((log_ratio.exp() < 1 - low) | (log_ratio.exp() > 1 + high)).float().mean().item()
            metrics = {"policy_loss": loss.item(), "kl": approximate_kl(total).item(), "clip_fraction": clipped}
        if config.entropy_weight:
            entropy = self.policy.entropy(context, batch.path).mean()
            loss = loss - config.entropy_weight * entropy
            metrics["entropy"] = entropy.item()
        if config.reference_weight:
            drift = self._reference_loss(context, batch)
            loss = loss + config.reference_weight * drift
            metrics["reference_loss"] = drift.item()
        return loss, metrics

    def _clips(self, units: int) -> tuple[Tensor, Tensor]:
        first, (low, high) = self.config.clip_first_step, (self.config.clip_low, self.config.clip_high)
        if first is None or units == 1:
            return torch.tensor(low), torch.tensor(high)
        growth = torch.linspace(0, 1, units)
        return first * (low / first) ** growth, first * (high / first) ** growth

    def _discounts(self, units: int) -> Tensor:
        return self.config.denoising_discount ** torch.arange(units - 1, -1, -1, dtype=torch.float32)

    def _reference_loss(self, context: Context, batch: Batch) -> Tensor:
        """Imitation of what the frozen reference would do in the same situation."""
        assert self.reference is not None
        with torch.no_grad():
            action = self.reference.act(encoded(self.reference, batch.inputs), self.generator)
        return self.policy.bc_loss(context, action, torch.ones(action.shape[:2]), self.generator)

    def _critic_loss(self, context: Context, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self.critic is not None and self.critic_config is not None
        assert batch.value is not None and batch.value_target is not None
        config = self.critic_config
        value = self.critic(self.policy.value_features(context))
        loss = value_loss(
            value, batch.value, batch.value_target, clip=config.value_clip, huber_delta=config.huber_delta
        )
        return loss.mean(), value
