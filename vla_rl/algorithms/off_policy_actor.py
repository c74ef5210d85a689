"""The actor's side of off-policy learning: its next actions, its losses, the entropy's temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from episodes.sampler import Targets
from episodes.schema import ACTORS
from policies.device import has_fused_adam
from policies.policy import Policy, executed_mask, masked_mean, trained_parameters
from policies.residual.best_of import BestOfPolicy
from policies.residual.conditioned import ConditionedPolicy
from policies.residual.critic_guided import CriticGuided
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass
from vla_rl.algorithms.off_policy_critics import Alternatives, Critics, Proposals
from vla_rl.algorithms.off_policy_settings import UpdatesConfig
from vla_rl.algorithms.offline_losses import cloning_weights, drop_labels, positive_labels
from vla_rl.algorithms.td_target import temperature_loss
from vla_rl.replay.replay import Windows

LEAST_Q = 1e-3  # mean size of Q that the actor's loss is divided by
TARGET_NOISE_LIMIT = 0.3  # Fujimoto et al. 2018 (TD3) clip at .5 of a range that is as large


class Actor:
    """Of a residual policy the residual follows the gradient of Q; with IQL and RECAP any policy clones what was good,
    and with the best of samples all of it.

    UserError where the policy and the settings do not go together.
    """

    def __init__(self, config: UpdatesConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.guided = policy if isinstance(policy, CriticGuided) else None
        check_policy(config, policy)
        if self.guided is not None:
            self.parameters = list(policy.parameter_groups()["residual"])
        else:
            self.parameters = trained_parameters(policy.base if isinstance(policy, BestOfPolicy) else policy)
        device = policy.device
        groups: list[dict[str, Any]] = [{"params": self.parameters}]
        self.log_temperature = torch.zeros((), device=device)
        if config.entropy is not None:
            self.log_temperature.fill_(math.log(config.entropy.temperature)).requires_grad_(True)
            groups.append({"params": [self.log_temperature], "lr": config.entropy.learning_rate})
        self.optimizer = torch.optim.Adam(groups, lr=config.actor_learning_rate, fused=has_fused_adam(device))

    # -- actions ------------------------------------------------------------------------------------------------------

    def propose(
        self,
        context: TensorDataclass,
        following: TensorDataclass,
        batch: Windows,
        critics: Critics,
        generator: torch.Generator,
        *,
        compare: bool,
    ) -> Proposals:
        """What the losses of this batch need to know. ``compare``: alternatives for Cal-QL too.

        IQL and RECAP ask for no action.
        """
        if self.config.iql is not None:
            return Proposals(recorded_q=critics.recorded_q(context, batch, generator))
        if self.config.recap is not None:
            return Proposals()
        if self.config.best_of is not None:
            best = self.policy.act(following, generator)
            return Proposals(next_action=best, bonus=best.new_zeros(1))
        with torch.no_grad():
            action, bonus = self._next_action(following, generator)
            alternatives = self._alternatives(context, following, generator) if compare else None
        return Proposals(next_action=action, bonus=bonus, alternatives=alternatives)

    def _next_action(
        self, following: TensorDataclass, generator: torch.Generator
    ) -> tuple[Float[Tensor, "B H A"], Float[Tensor, " #B"]]:
        """The present actor's action at the window's end, and the entropy bonus of a target."""
        entropy, policy = self.config.entropy, self._guided()
        if entropy is not None:
            drawn, log_prob = policy.rsample(following, generator)
            return drawn[0], -self.log_temperature.exp() * log_prob[0].sum((1, 2)) * entropy.backup
        action = policy.mean_action(following)
        noise = torch.randn(action.shape, generator=generator, device=action.device) * self.config.target_noise
        noise = noise.clamp(-TARGET_NOISE_LIMIT, TARGET_NOISE_LIMIT) * policy.action_scale
        return (action + noise).clamp(-1, 1), action.new_zeros(1)

    def _alternatives(
        self, context: TensorDataclass, following: TensorDataclass, generator: torch.Generator
    ) -> Alternatives:
        assert self.config.cal_ql is not None
        policy, draws = self._guided(), self.config.cal_ql.draws
        shape = (draws, len(context), *policy.critic_action_shape)
        uniform = 2 * torch.rand(shape, generator=generator, device=self.policy.device) - 1
        here, here_log = policy.rsample(context, generator, draws)
        there, there_log = policy.rsample(following, generator, draws)
        return Alternatives(
            uniform=policy.within_range(context, uniform),
            uniform_log_density=math.prod(policy.critic_action_shape) * math.log(0.5),  # of a draw from [-1, 1]
            policy=torch.cat([here, there]),
            policy_log_density=torch.cat([here_log, there_log]).sum((-2, -1)),
        )

    def _guided(self) -> CriticGuided:
        assert self.guided is not None, "check_policy"
        return self.guided

    # -- learning -----------------------------------------------------------------------------------------------------

    def gradients(
        self,
        context: TensorDataclass,
        batch: Windows,
        proposals: Proposals,
        critics: Critics,
        generator: torch.Generator,
    ) -> dict[str, Tensor]:
        """Of this batch's loss, clipped."""
        if self.config.clones:
            loss, metrics = self._clone(context, batch, proposals, critics, generator)
        else:
            loss, metrics = self._follow_q(context.detach(), batch, critics, generator)
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        gradients = torch.autograd.grad(loss, trained, allow_unused=self.config.clones)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        return {"actor_loss": loss, "actor_grad_norm": norm, **metrics}

    def _follow_q(
        self, context: TensorDataclass, batch: Windows, critics: Critics, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Maximize the mean or the least of the ensemble (``actor_value``), with SAC's entropy bonus."""
        config, policy, features = self.config, self._guided(), critics.features(context)
        if config.entropy is None:
            action, log_prob = policy.mean_action(context), features.new_zeros(len(features))
        else:
            drawn, elements = policy.rsample(context, generator)
            action, log_prob = drawn[0], elements[0].sum((1, 2))
        members = critics.members(critics.q, features, action)
        q = members.mean(0) if config.actor_value == "mean" else members.amin(0)
        loss = (self.log_temperature.detach().exp() * log_prob - q).mean()
        correction = policy.correction(context, action).square().mean()
        metrics = {"actor_q": q.mean(), "correction": correction.sqrt()}
        if config.correction_weight or config.cloning_weight:
            chosen = chosen_by(batch, config.cloned_actors)
            distance = distance_from_recorded((action - batch.action) / policy.action_scale, batch, chosen)
            loss = loss / q.detach().abs().mean().clamp(min=LEAST_Q)
            loss = loss + config.correction_weight * correction + config.cloning_weight * distance
            metrics["distance"] = distance.sqrt()
        if (entropy := config.entropy) is not None:
            loss = loss + temperature_loss(self.log_temperature, log_prob, entropy.target * action[0].numel())
            metrics |= {"temperature": self.log_temperature.exp(), "entropy": -log_prob.mean()}
        return loss, metrics

    def _clone(
        self,
        context: TensorDataclass,
        batch: Windows,
        proposals: Proposals,
        critics: Critics,
        generator: torch.Generator,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy's own cloning loss with a weight for each chunk: its mask of valid actions holds it."""
        targets = batch.targets
        if self.config.best_of is not None:
            return self.policy.bc_loss(context, targets, generator), {}
        with torch.no_grad():
            advantage = critics.advantage(context, batch, proposals)
        weight = self._cloning_weight(advantage, batch)
        if isinstance(self.policy, ConditionedPolicy):
            return self._clone_labelled(self.policy, context, targets, weight, generator)
        weighted = targets.mask * weight[:, None]
        loss = self.policy.bc_loss(context, Targets(action=targets.action, mask=weighted), generator)
        share = weighted.sum().clamp(min=1) / targets.mask.sum().clamp(min=1)  # bc_loss divides by the sum of its mask
        return loss * share, {"advantage": advantage.mean(), "cloning_weight": weight.mean()}

    def _clone_labelled(
        self,
        policy: ConditionedPolicy,
        context: TensorDataclass,
        targets: Targets,
        good: Float[Tensor, " B"],
        generator: torch.Generator,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All of it, each chunk under its label, which is dropped at random."""
        assert self.config.recap is not None and self.config.recap.condition is not None, "check_policy"
        label = drop_labels(good, self.config.recap.condition.dropped, generator)
        return policy.labelled_loss(context, targets, label, generator), {"positive": good.mean()}

    def _cloning_weight(self, advantage: Float[Tensor, " B"], batch: Windows) -> Float[Tensor, " B"]:
        if (recap := self.config.recap) is not None:
            cloned, forced = batch.num_cloned > 0, chosen_by(batch, recap.positive_actors)
            return positive_labels(advantage.where(cloned, torch.nan), recap.positive, forced & cloned)
        assert self.config.iql is not None
        return cloning_weights(advantage, self.config.iql.temperature, self.config.iql.max_weight)

    def apply(self) -> None:
        self.optimizer.step()


def check_policy(config: UpdatesConfig, policy: Policy) -> None:
    """UserError where the policy cannot be trained with these settings."""
    if isinstance(policy, BestOfPolicy) and config.best_of is None:
        raise UserError("the policy chooses among samples by a critic: set algorithm.best_of: {}")
    told = config.recap is not None and config.recap.condition is not None
    if told != isinstance(policy, ConditionedPolicy):
        raise UserError(
            "a policy that is told what is good learns by algorithm.recap with condition: {}, and no other does"
        )
    if isinstance(policy, CriticGuided):
        if config.best_of is not None:
            raise UserError("algorithm.best_of trains the policy itself: leave start.residual out")
        if policy.squashed != (config.entropy is not None):
            raise UserError(
                "start.residual.noise and algorithm.entropy belong together: squashed noise needs entropy: {}, "
                "fixed noise none"
            )
        if policy.acts_in_noise and config.reads_actions:
            raise UserError(
                "start.residual.around noise learns from what it acts itself, as recorded actions have no noise: set "
                "algorithm.demonstration_share, offline_iterations, cloning_weight and warmup_noise to 0"
            )
    elif not config.clones:
        raise UserError(
            "algorithm off_policy trains a residual on the policy it starts from: add start.residual: {}; "
            "only with algorithm.iql, recap or best_of: {} it trains the policy itself"
        )


def chosen_by(batch: Windows, actors: Sequence[str] | None) -> Bool[Tensor, " B"]:
    """Where one of these chose the whole chunk; None: everywhere."""
    if actors is None:
        return torch.ones_like(batch.actor, dtype=torch.bool)
    chosen = torch.zeros_like(batch.actor, dtype=torch.bool)
    for actor in actors:
        chosen |= batch.actor == ACTORS.index(actor)
    return chosen


def distance_from_recorded(
    error: Float[Tensor, "B H A"], batch: Windows, chosen: Bool[Tensor, " B"]
) -> Float[Tensor, ""]:
    """Mean square over the actions of the ``chosen`` chunks that may be cloned; 0 where there are none."""
    mask = executed_mask(batch.num_cloned, error.shape[1]) & chosen[:, None]
    return masked_mean(error.square(), mask)
