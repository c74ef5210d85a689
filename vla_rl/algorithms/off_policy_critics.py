"""The critics of off-policy learning: Q ensemble, its slow copy, V where IQL asks for it, and their one optimizer."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from policies.normalizer import HasNormalizer
from policies.policy import Policy
from policies.residual.critic_guided import CriticGuided
from policies.residual.ensemble import QEnsemble, follow
from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from vla_rl.algorithms.off_policy_settings import OffPolicyConfig
from vla_rl.algorithms.offline_losses import conservative_gap, expectile_loss
from vla_rl.algorithms.td_target import td_target
from vla_rl.replay.replay import Windows


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    """Actions to compare with the recorded one: ``uniform``, drawn from all that the policy can do with this density,
    and the ``policy``'s, at s and at the window's end, with their log densities."""

    uniform: Float[Tensor, "draws B H A"]
    uniform_log_density: float
    policy: Float[Tensor, "more B H A"]
    policy_log_density: Float[Tensor, "more B"]


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """What the actor would do: next (with its entropy bonus), where targets ask for it; ``alternatives`` for Cal-QL."""

    next_action: Float[Tensor, "B H A"] | None = None
    bonus: Float[Tensor, " #B"] | None = None
    alternatives: Alternatives | None = None


def valued_shape(policy: Policy) -> tuple[int, int]:
    """Of what the critics value: action chunks, or the noise they are made from."""
    if isinstance(policy, CriticGuided):
        return policy.valued_shape
    return policy.spec.action_horizon, policy.spec.robot.action_dim


class Critics:
    """They read the policy's features, and actions in units of the demonstrations' range.

    Features that a policy does not scale itself are standardized by ``fit_features``.
    """

    def __init__(self, config: OffPolicyConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.guided = policy if isinstance(policy, CriticGuided) else None
        self.normalizer = policy.normalizer if isinstance(policy, HasNormalizer) else None
        spec, device = policy.spec, policy.device
        numbers = math.prod(valued_shape(policy))
        with crossing("weights"):
            self.q = QEnsemble(config.critic, feature_dim=spec.value_dim, action_numbers=numbers).to(device)
            self.value: QEnsemble | None = None
            if config.clones:
                histogram = None if config.recap is None else config.recap.histogram
                single = replace(config.critic, members=1, least_of=1, histogram=histogram)
                self.value = QEnsemble(single, feature_dim=spec.value_dim, action_numbers=0).to(device)
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self._followed = list[Tensor](self.target.parameters()), list[Tensor](self.q.parameters())
        self.parameters = [*self.q.parameters(), *(() if self.value is None else self.value.parameters())]
        if self.guided is not None:
            self.parameters += policy.parameter_groups().get("encoder", ())
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=config.critic.learning_rate, fused=device.type in ("cpu", "cuda")
        )

    # -- values -------------------------------------------------------------------------------------------------------

    def fit_features(self, record: TensorDataclass) -> None:
        """Measure the scale of what the policy stores of some observations, once, before the first update."""
        if self.guided is not None:
            self.guided.fit_features(record)
            return
        features = self.policy.value_features(self.policy.restore(record))
        for critic in self._networks().values():
            critic.fit_features(features)

    def features(self, context: TensorDataclass) -> Float[Tensor, "B value_dim"]:
        return self.policy.value_features(context) if self.guided is None else self.guided.critic_features(context)

    def members(
        self,
        critic: QEnsemble,
        features: Float[Tensor, "B F"],
        action: Float[Tensor, "*draws B H A"],
        only: Int[Tensor, " some"] | None = None,
    ) -> Float[Tensor, "members *draws B"]:
        return critic(features, self._unit(action), only)

    def _unit(self, action: Float[Tensor, "*draws B H A"]) -> Float[Tensor, "*draws B H A"]:
        return action if self.normalizer is None else self.normalizer.normalize_action(action)

    def least(
        self, features: Float[Tensor, "B F"], action: Float[Tensor, "B H A"], generator: torch.Generator
    ) -> Float[Tensor, "least_of B"]:
        """Of the slow copy, ``least_of`` members that are drawn anew."""
        return self.members(self.target, features, action, self.target.draw(generator, features.device))

    def state_value(self, features: Float[Tensor, "B F"]) -> Float[Tensor, " B"]:
        """V of IQL and RECAP."""
        assert self.value is not None
        return self.value(features, features.new_zeros(len(features), 0, 0))[0]

    def advantage(self, context: TensorDataclass, batch: Windows, generator: torch.Generator) -> Float[Tensor, " B"]:
        """Of recorded actions: IQL's Q - V; RECAP's reward of the window and V at its end, minus V."""
        features = self.features(context)
        if self.config.recap is None:
            return self.least(features, batch.action, generator).amin(0) - self.state_value(features)
        following = self.state_value(self.features(self.policy.restore(batch.next_inputs)))
        return td_target(batch.reward, batch.discount, following[None]) - self.state_value(features)

    # -- learning -----------------------------------------------------------------------------------------------------

    def gradients(
        self,
        context: TensorDataclass,
        following: TensorDataclass,
        batch: Windows,
        proposals: Proposals,
        generator: torch.Generator,
        *,
        conservative: float,
    ) -> dict[str, Tensor]:
        """Of this batch's losses, clipped. ``following``: at the windows' ends. ``conservative``: Cal-QL's weight."""
        features = self.features(context)
        if self.config.recap is not None:
            loss, metrics = self._return_loss(features, batch)
            return metrics | {"critic_grad_norm": self._backward(loss)}
        with torch.no_grad():
            target = self.target_value(following, batch, proposals, generator)
        output = self.q.output(features, self._unit(batch.action))
        q, loss = self.q.value(output), self.q.loss(output, target)
        metrics = {"q_loss": loss, "q": q.mean(), "q_spread": q.std(0, correction=0).mean()}
        if (iql := self.config.iql) is not None:
            with torch.no_grad():
                done = self.least(features, batch.action, generator).amin(0)
            value_loss = expectile_loss(done - self.state_value(features), iql.expectile)
            loss, metrics["value_loss"] = loss + value_loss, value_loss
        if (others := proposals.alternatives) is not None:
            gap = self._conservative_gap(features, others, q, batch)
            loss, metrics["conservative_gap"] = loss + conservative * gap, gap
        return metrics | {"critic_grad_norm": self._backward(loss)}

    def _return_loss(
        self, features: Float[Tensor, "B F"], batch: Windows
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """RECAP's: V is the distribution of the recorded episodes' returns from there on, where they are known."""
        assert self.value is not None and batch.return_to_go is not None
        known = batch.return_to_go.isfinite()
        seen = features[known]
        output = self.value.output(seen, seen.new_zeros(len(seen), 0, 0))
        loss = self.value.loss(output, batch.return_to_go[known])
        return loss, {"value_loss": loss, "value": self.value.value(output).mean()}

    def _backward(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Gradients, clipped; their norm."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)

    def target_value(
        self, following: TensorDataclass, batch: Windows, proposals: Proposals, generator: torch.Generator
    ) -> Float[Tensor, " B"]:
        features = self.features(following)
        if proposals.next_action is None or proposals.bonus is None:
            return td_target(batch.reward, batch.discount, self.state_value(features)[None])
        next_q = self.least(features, proposals.next_action, generator)
        return td_target(batch.reward, batch.discount, next_q + proposals.bonus)

    def _conservative_gap(
        self, features: Float[Tensor, "B F"], others: Alternatives, q: Float[Tensor, "members B"], batch: Windows
    ) -> Float[Tensor, ""]:
        assert batch.return_to_go is not None
        values = self.members(self.q, features, torch.cat([others.uniform, others.policy]))
        uniform, policy = values.split([len(others.uniform), len(others.policy)], dim=1)
        return conservative_gap(
            uniform, others.uniform_log_density, policy, others.policy_log_density, q, batch.return_to_go
        )

    def apply(self) -> None:
        self.optimizer.step()
        follow(*self._followed, self.config.critic.polyak_tau)

    # -- exact state --------------------------------------------------------------------------------------------------

    def _networks(self) -> dict[str, QEnsemble]:
        networks = {"critic": self.q, "target": self.target}
        return networks if self.value is None else networks | {"value": self.value}

    def stateful(self) -> dict[str, Any]:
        """Everything with a ``state_dict`` of its own."""
        return {**self._networks(), "critic_optimizer": self.optimizer}
