"""What PPO, GRPO and RLIR share: minibatches, losses with a clipped importance ratio, optimizer steps."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from episodes.sampler import Targets
from policies.audit import StepDifference, audit_log_prob
from policies.device import AUDIT_TOLERANCE, make_generator, restore_generator, restore_optimizer
from policies.policy import LikelihoodModel, Policy, copy_trained, set_frozen, trained_parameters
from sims.devices.crossing import crossing, read_numbers
from sims.errors import UserError
from sims.numbers.finite import NotFinite, check_metrics
from sims.tensor_dataclass import TensorDataclass
from vla_rl.algorithms.algorithm import Metrics
from vla_rl.algorithms.average import WeightAverage
from vla_rl.algorithms.decoupled import behavior_weight, decoupling_metrics
from vla_rl.algorithms.gradient_sum import GradientSum, InTurn
from vla_rl.algorithms.log_ratio import approximate_kl, reduce_log_ratio
from vla_rl.algorithms.surrogate import clipped_surrogate, value_loss
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.critics.value import ValueCritic
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.weights import named_weights


def _any_older(batch: Experience, version: int) -> bool:
    with crossing("metrics"):
        return bool((batch.policy_version < version).any())


def _normalized(advantage: Float[Tensor, " B"], weight: Float[Tensor, " B"] | None) -> Float[Tensor, " B"]:
    """To mean 0 and standard deviation 1, of those with a ``weight`` where some have none; not of a single one."""
    weighed = advantage
    if weight is not None:
        with crossing("metrics"):
            weighed = advantage[weight > 0]
    return (advantage - weighed.mean()) / (weighed.std() + 1e-8) if len(weighed) > 1 else advantage


def _gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class ClippedUpdate:
    """Changes ``policy`` (and ``critic``) by a batch; owns the optimizers, the average and the shuffling generator.

    The first minibatch of a process, so also the first after a resume, is audited: nothing has changed the weights
    yet, so its importance ratios must be 1 (policies/audit.py).
    """

    def __init__(
        self, config: UpdateConfig, policy: LikelihoodModel, *, critic: ValueCritic | None = None, seed: int
    ) -> None:
        if policy.log_prob_steps == 0:
            raise UserError(
                "this policy has no likelihood, which ppo and grpo need: of OpenVLA take policy.head tokens (a head l1 "
                "can be cloned, evaluated and served); the best of several samples is trained by algorithm off_policy"
            )
        if config.weighs_steps and policy.log_prob_steps == 1:
            raise UserError(
                "algorithm.update: denoising_discount and clip_first_step weigh the denoising steps of a chunk, but "
                "this policy scores one step per chunk; leave them out, or set explore.random_steps: all"
            )
        self.config, self.critic, self.audited = config, critic, False
        self.policy = cast(Policy, policy)  # more than a LikelihoodModel where critic, reference or average ask more
        set_frozen(policy, config.frozen)
        if config.entropy_weight and not policy.learns_spread:
            raise UserError(
                "algorithm.update.entropy_weight has no effect on this policy: the spread of what it draws is fixed or "
                "frozen. Leave it out, or explore with a spread that is trained (policy.explore {name: flow_noise}, "
                "residual.noise {name: squashed})"
            )
        self.make_optimizers()
        self.reference = copy_trained(self.policy) if config.reference_weight else None
        self.average = WeightAverage(self.policy, config.average) if config.average is not None else None
        self.device = self.parameters[0].device
        self.generator = make_generator(self.device, seed)
        self.gradient_sum: GradientSum = InTurn()

    def make_optimizers(self) -> None:
        """Of the parameters that policy and critic have now; what earlier ones had learned is forgotten."""
        config, critic = self.config, self.critic
        self.parameters = trained_parameters(self.policy)
        # foreach, not fused: a fused step rounds by an element's place in its tensor, so divided weights would differ.
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            foreach=True,
        )
        self.critic_optimizer: torch.optim.Optimizer | None = None
        self.critic_parameters: list[nn.Parameter] = []
        if critic is not None:
            self.critic_parameters = list(critic.parameters())
            self.critic_optimizer = torch.optim.AdamW(
                self.critic_parameters, lr=critic.config.learning_rate, foreach=True
            )

    def run(self, batch: Experience, *, train_policy: bool = True, version: int | None = None) -> Metrics:
        """All epochs over ``batch``; ``train_policy=False`` (critic warm-up) leaves the policy as it is.

        An empty ``batch``, as where the simulator failed in every chunk of a rollout, changes nothing.

        Once a minibatch exceeds the target KL only the critic goes on learning. ``version``: of the present weights;
        where older ones acted, the update is decoupled (decoupled.py).
        """
        self.gradient_sum.begin(batch, train_policy=train_policy, version=version)
        decoupling: Metrics = {}
        older = version is not None and _any_older(batch, version)
        if train_policy and older:
            batch, decoupling = self._decouple(batch)
        totals: dict[str, list[float]] = defaultdict(list)
        moving, policy_steps = train_policy, 0
        for number, minibatch in enumerate(self._minibatches(batch)):
            if not older:  # else other weights drew it
                self._audit_once(minibatch)
            if not moving and self.critic is None:
                break
            metrics = self.checked_gradients(minibatch, moving, number=number)
            moving = moving and not self._kl_exceeded(metrics)
            if not moving:
                metrics.pop("grad_norm", None)  # of steps that are taken
            self._step(moving)
            policy_steps += moving
            for name, value in metrics.items():
                totals[name].append(value)
        summary = {name: sum(values) / len(values) for name, values in totals.items()}
        if "kl" in totals:
            summary["kl_last"] = totals["kl"][-1]
            summary["learning_rate"] = self.optimizer.param_groups[0]["lr"]
            self._adapt_rate(exceeded=not moving, kl=totals["kl"][-1])
        return summary | decoupling | {"policy_steps": float(policy_steps)}

    @torch.no_grad()
    def _decouple(self, batch: Experience) -> tuple[Experience, Metrics]:
        """``batch`` with the log-probs of the present weights, and the weights that correct for those that acted."""
        parts = [
            self.gradient_sum.compute(self._log_prob, batch[i])
            for i in torch.arange(len(batch), device=self.device).split(self.config.micro_batch)
        ]
        proximal, counted = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        limit, reduction = self.config.max_behavior_weight, self.config.reduction
        weight = behavior_weight(proximal, batch.log_prob, counted, reduction, limit=limit)
        metrics = read_numbers(decoupling_metrics(proximal, batch.log_prob, counted, weight))
        return dataclasses.replace(batch, proximal_log_prob=proximal, behavior_weight=weight), metrics

    def _log_prob(self, batch: Experience) -> tuple[Tensor, Tensor]:
        log_prob = self.policy.log_prob(self.policy.restore(batch.inputs), batch.trace)
        return log_prob, self.policy.counted(batch.trace, batch.num_executed)

    def checked_gradients(self, minibatch: Experience, train_policy: bool, *, number: int) -> Metrics:
        """Leaves the clipped gradients of the losses on ``minibatch`` in the parameters; metrics of both.

        Raises NotFinite, with ``minibatch`` and the present state, if a loss, a KL or a gradient is not finite.
        """
        metrics = self._gradients(minibatch, train_policy)
        checked: Metrics = {}
        if train_policy:
            norm = self.gradient_sum.norm(_gradients_of(self.parameters))
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, norm)
            metrics |= read_numbers({"grad_norm": norm})
        if self.critic is not None:
            norm = self.gradient_sum.norm(_gradients_of(self.critic_parameters))
            checked = read_numbers({"critic_grad_norm": norm})
        suspects: dict[str, Any] = {}
        if not self.gradient_sum.divided:
            suspects = {
                "optimizer": self.optimizer, "critic optimizer": self.critic_optimizer,
                "policy weight": self.policy, "critic weight": self.critic,
            }  # fmt: skip
        try:
            check_metrics(metrics | checked, where=f"minibatch {number}", batch=minibatch, suspects=suspects)
        except NotFinite as error:
            error.update = {"state": self.state_dict(), "train_policy": train_policy}
            raise
        return metrics

    def _gradients(self, minibatch: Experience, train_policy: bool) -> Metrics:
        self._zero_grad()
        size, at_once = len(minibatch), self.config.micro_batch

        def backward(part: Experience) -> Metrics:
            share = len(part) / size
            loss, metrics = self.gradient_sum.compute(self._losses, part, train_policy)
            (loss * share).backward()
            return {name: value * share for name, value in read_numbers(metrics).items()}

        whole = size <= at_once
        parts = [minibatch] if whole else [minibatch[first : first + at_once] for first in range(0, size, at_once)]
        return self.gradient_sum(parts, backward, [*self.parameters, *self.critic_parameters])

    def _minibatches(self, batch: Experience) -> Iterator[Experience]:
        """Of every epoch, with normalized advantages."""
        size = self.config.minibatch
        assert batch.weight is not None
        with crossing("metrics"):
            all_count = bool((batch.weight > 0).all())
        for _ in range(self.config.epochs):
            order = torch.randperm(len(batch), generator=self.generator, device=self.device)
            for index in order.split(size) if len(order) else ():
                if len(index) * 2 < min(size, len(batch)):  # the gradient of a small remainder is mostly noise
                    continue
                minibatch = batch[index]
                advantage = minibatch.advantage
                assert advantage is not None
                if self.config.normalize_advantage:
                    advantage = _normalized(advantage, None if all_count else minibatch.weight)
                yield dataclasses.replace(minibatch, advantage=advantage)

    def _audit_once(self, minibatch: Experience) -> None:
        if not self.audited:
            self.gradient_sum.compute(self.audit, minibatch[: self.config.micro_batch])
            self.audited = True

    def audit(self, batch: Experience) -> list[StepDifference]:
        """Differences between the log-probs of ``batch``, drawn with the present weights, and those of the update.

        Raises LogProbMismatch beyond ``audit_tolerance``.
        """
        with torch.no_grad():
            context = self.policy.restore(batch.inputs)
        configured = self.config.audit_tolerance
        tolerance = AUDIT_TOLERANCE[self.policy.scored_in(batch.inputs)] if configured is None else configured
        with crossing("metrics"):
            return audit_log_prob(self.policy, context, batch, tolerance=tolerance)

    def _kl_exceeded(self, metrics: Mapping[str, float]) -> bool:
        return self.config.target_kl is not None and metrics.get("kl", 0.0) > self.config.target_kl

    def _adapt_rate(self, *, exceeded: bool, kl: float) -> None:
        """After an update whose last minibatch had this ``kl``, ``exceeded`` if that ended it."""
        config = self.config
        if not config.adaptive_rate or config.target_kl is None:
            return
        factor = 1 / 1.5 if exceeded else 1.2 if kl < 0.75 * config.target_kl else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = min(max(group["lr"] * factor, config.learning_rate / 10), 10 * config.learning_rate)

    # -- losses ----------------------------------------------------------------------------------------------------

    def _losses(self, batch: Experience, train_policy: bool) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.set_grad_enabled(train_policy):
            context = self.policy.restore(batch.inputs)
        metrics: dict[str, Tensor] = {}
        loss = torch.zeros((), device=self.device)
        if train_policy:
            policy_loss, metrics = self._policy_loss(context, batch)
            loss = loss + policy_loss
        if self.critic is not None:
            critic_loss, critic_metrics = self._critic_loss(context, batch, self.critic)
            loss, metrics = loss + critic_loss, metrics | critic_metrics
        return loss, metrics

    def _policy_loss(self, context: TensorDataclass, batch: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        assert batch.advantage is not None and batch.weight is not None
        old = batch.log_prob if batch.proximal_log_prob is None else batch.proximal_log_prob
        difference = self.policy.log_prob(context, batch.trace) - old
        counted = self.policy.counted(batch.trace, batch.num_executed)
        log_ratio = reduce_log_ratio(difference, counted, config.reduction)
        units = log_ratio.shape[1]
        low, high = self._clips(units)
        surrogate = clipped_surrogate(
            log_ratio,
            batch.advantage[:, None] * self._discounts(units),
            clip_low=low,
            clip_high=high,
            dual_clip=config.dual_clip,
        )
        if batch.behavior_weight is not None:
            surrogate = surrogate * batch.behavior_weight
        loss = (surrogate.mean(1) * batch.weight).mean()
        with torch.no_grad():
            total = reduce_log_ratio(difference, counted, "chunk_sum")
            clipped = ((log_ratio.exp() < 1 - low) | (log_ratio.exp() > 1 + high)).float().mean()
            metrics = {"policy_loss": loss, "kl": approximate_kl(total), "clip_fraction": clipped}
        if config.entropy_weight:
            # of the executed actions, as the ratio
            entropy = reduce_log_ratio(self.policy.entropy(context, batch.trace), counted, "chunk_mean").mean()
            loss = loss - config.entropy_weight * entropy
            metrics["entropy"] = entropy
        if self.reference is not None:
            drift = self._reference_loss(context, batch, self.reference)
            loss = loss + config.reference_weight * drift
            metrics["reference_loss"] = drift
        return loss, metrics

    def _clips(self, units: int) -> tuple[Tensor, Tensor]:
        first, (low, high) = self.config.clip_first_step, (self.config.clip_low, self.config.clip_high)
        if first is None or units == 1:
            return torch.full((), low, device=self.device), torch.full((), high, device=self.device)
        growth = torch.linspace(0, 1, units, device=self.device)
        return first * (low / first) ** growth, first * (high / first) ** growth

    def _discounts(self, units: int) -> Float[Tensor, " units"]:
        return self.config.denoising_discount ** torch.arange(
            units - 1, -1, -1, dtype=torch.float32, device=self.device
        )

    def _reference_loss(self, context: TensorDataclass, batch: Experience, reference: Policy) -> Tensor:
        """Behavior cloning of what the frozen reference would do for the same observation."""
        with torch.no_grad():
            action = reference.act(reference.restore(batch.inputs), self.generator)
        targets = Targets(action=action, mask=action.new_ones(action.shape[:2]))
        return self.policy.bc_loss(context, targets, self.generator)

    def _critic_loss(
        self, context: TensorDataclass, batch: Experience, critic: ValueCritic
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.value_target is not None
        config, value = critic.config, critic(self.policy.value_features(context))
        loss = value_loss(
            value, batch.value, batch.value_target, clip=config.value_clip, huber_delta=config.huber_delta
        ).mean()
        return loss, {"value_loss": loss, "value_mean": value.mean()}

    # -- steps -----------------------------------------------------------------------------------------------------

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic_optimizer is not None:
            self.critic_optimizer.zero_grad(set_to_none=True)

    def _step(self, train_policy: bool) -> None:
        if train_policy:
            self.optimizer.step()
            if self.average is not None:
                self.average.update(self.policy)
        if self.critic_optimizer is not None:
            self.critic_optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """What a collector needs to act with the present policy: the trained tensors, by name."""
        return named_weights(self.policy, self.critic)

    def deployed(self) -> Policy:
        """With the averaged weights where an average is kept."""
        return self.policy if self.average is None else self.average.policy

    def state_dict(self) -> dict[str, Any]:
        """Of what is in this process."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "critic_optimizer": None if self.critic_optimizer is None else self.critic_optimizer.state_dict(),
            "policy": self.policy.state_dict(),
            "critic": None if self.critic is None else self.critic.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "shuffle": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        restore_optimizer(self.optimizer, state["optimizer"])
        if self.critic_optimizer is not None:
            restore_optimizer(self.critic_optimizer, state["critic_optimizer"])
        for part, saved in (
            (self.critic, state["critic"]),
            (self.average, state["average"]),
            (self.reference, state["reference"]),
        ):
            if part is not None:
                part.load_state_dict(saved)
        restore_generator(self.generator, state["shuffle"])


def update_of(algorithm: object) -> ClippedUpdate | None:
    """Of an algorithm whose log-probs can be audited and whose gradients can be shared; others have none."""
    update = getattr(algorithm, "update", None)
    return update if isinstance(update, ClippedUpdate) else None
