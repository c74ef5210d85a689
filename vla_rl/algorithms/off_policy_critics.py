"""The critics of off-policy learning: Q ensemble and its slow copy, V of IQL and RECAP, and their one optimizer."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from policies.device import has_fused_adam
from policies.normalizer import in_units
from policies.policy import Policy, trained_parameters
from policies.residual.best_of import BestOfPolicy
from policies.residual.critic_guided import CriticGuided
from policies.residual.ensemble import QEnsemble, follow
from policies.residual.histogram import HistogramConfig
from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from vla_rl.algorithms.off_policy_settings import UpdatesConfig
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
    """What the actor would do: next (with its entropy bonus), where targets ask for it; ``alternatives`` for Cal-QL.

    ``recorded_q``: the slow copy's value of what was done, for IQL.
    """

    next_action: Float[Tensor, "B H A"] | None = None
    bonus: Float[Tensor, " #B"] | None = None
    alternatives: Alternatives | None = None
    recorded_q: Float[Tensor, " B"] | None = None


def critic_action_shape(policy: Policy) -> tuple[int, int]:
    """Of what the critics value: action chunks, or the noise they are made from."""
    if isinstance(policy, CriticGuided):
        return policy.critic_action_shape
    return policy.spec.action_horizon, policy.spec.robot.action_dim


class Critics:
    """They read the policy's features, and actions in units of the demonstrations' range.

    Features that a policy does not scale itself are standardized by ``fit_features``. ``networks``: "critic" and its
    slow copy "target", "value"; RECAP learns the value alone, and a policy that chooses by its critic holds that one.
    """

    def __init__(self, config: UpdatesConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.guided = policy if isinstance(policy, CriticGuided) else None
        with crossing("weights"):
            self.networks = self._build()
        trained = [network for name, network in self.networks.items() if name != "target"]
        self.parameters = [parameter for network in trained for parameter in network.parameters()]
        if self.guided is not None:
            self.parameters += policy.parameter_groups().get("encoder", ())
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=config.critic.learning_rate, fused=has_fused_adam(policy.device)
        )

    def _build(self) -> dict[str, QEnsemble]:
        config, policy, networks = self.config, self.policy, dict[str, QEnsemble]()
        feature_dim, device = policy.spec.value_dim, policy.device
        if config.recap is None:
            numbers = math.prod(critic_action_shape(policy))
            q = (
                policy.critic
                if isinstance(policy, BestOfPolicy)
                else QEnsemble(config.critic, feature_dim=feature_dim, action_numbers=numbers).to(device)
            )
            networks |= {"critic": q, "target": copy.deepcopy(q).requires_grad_(False)}
        if config.iql is not None or config.recap is not None:
            histogram = None if config.recap is None else config.recap.histogram
            single = replace(config.critic, members=1, least_of=1, histogram=histogram)
            networks["value"] = QEnsemble(single, feature_dim=feature_dim, action_numbers=0).to(device)
        return networks

    @property
    def train_policy(self) -> bool:
        """Whether their optimizer trains some of the policy: a residual's own encoder, the critic that it acts by."""
        own = {id(parameter) for parameter in self.parameters}
        return any(id(parameter) in own for parameter in trained_parameters(self.policy))

    def parts(self) -> dict[str, Any]:
        """All with a ``state_dict`` of their own."""
        return {**self.networks, "critic_optimizer": self.optimizer}

    def histograms(self) -> dict[str, HistogramConfig]:
        """Of the values, by the setting that says their ends."""
        setting = {"critic": "critic.histogram", "value": "recap.histogram"}
        found = {setting[name]: one.config.histogram for name, one in self.networks.items() if name in setting}
        return {name: histogram for name, histogram in found.items() if histogram is not None}

    @property
    def q(self) -> QEnsemble:
        return self.networks["critic"]

    @property
    def target(self) -> QEnsemble:
        return self.networks["target"]

    # -- values -------------------------------------------------------------------------------------------------------

    def features_are_unscaled(self) -> bool:
        """Whether ``fit_features`` has measured nothing yet: a policy that was trained before comes with its scale."""
        scaled = [self.guided] if self.guided is not None else self.networks.values()
        with crossing("scales"):
            return all(one.features_are_unscaled() for one in scaled)

    def fit_features(self, record: TensorDataclass) -> None:
        """Measure the scale of what the policy stores of some observations, once, before the first update."""
        if self.guided is not None:
            self.guided.fit_features(record)
            return
        features = self.policy.value_features(self.policy.restore(record))
        for critic in self.networks.values():
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
        return critic(features, in_units(self.policy, action), only)

    def least(
        self, features: Float[Tensor, "B F"], action: Float[Tensor, "B H A"], generator: torch.Generator
    ) -> Float[Tensor, "least_of B"]:
        """Of the slow copy, ``least_of`` members that are drawn anew."""
        return self.members(self.target, features, action, self.target.draw(generator, features.device))

    def state_value(self, features: Float[Tensor, "B F"]) -> Float[Tensor, " B"]:
        """V of IQL and RECAP."""
        return self.networks["value"](features, features.new_zeros(len(features), 0, 0))[0]

    @torch.no_grad()
    def recorded_q(self, context: TensorDataclass, batch: Windows, generator: torch.Generator) -> Float[Tensor, " B"]:
        """The least value of what was done, of the slow copy."""
        return self.least(self.features(context), batch.action, generator).amin(0)

    def advantage(self, context: TensorDataclass, batch: Windows, proposals: Proposals) -> Float[Tensor, " B"]:
        """Of recorded actions: IQL's Q - V; RECAP's reward of the window and V at its end, minus V."""
        value = self.state_value(self.features(context))
        if proposals.recorded_q is not None:
            return proposals.recorded_q - value
        following = self.state_value(self.features(self.policy.restore(batch.next_inputs)))
        return td_target(batch.reward, batch.discount, following[None]) - value

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
        output = self.q.output(features, in_units(self.policy, batch.action))
        q, loss = self.q.value(output), self.q.loss(output, target)
        metrics = {"q_loss": loss, "q": q.mean(), "q_spread": q.std(0, correction=0).mean()}
        if (histogram := self.config.critic.histogram) is not None:
            metrics["cut_targets"] = histogram.beyond(target).float().mean()
        if (iql := self.config.iql) is not None and proposals.recorded_q is not None:
            value_loss = expectile_loss(proposals.recorded_q - self.state_value(features), iql.expectile)
            loss, metrics["value_loss"] = loss + value_loss, value_loss
        if (others := proposals.alternatives) is not None:
            gap = self._conservative_gap(features, others, q, batch)
            loss, metrics["conservative_gap"] = loss + conservative * gap, gap
        return metrics | {"critic_grad_norm": self._backward(loss)}

    def _return_loss(
        self, features: Float[Tensor, "B F"], batch: Windows
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """RECAP's: V is the distribution of the recorded episodes' returns from there on, where they are known.

        Where all that was drawn is of episodes that still run, there is nothing to learn.
        """
        assert batch.return_to_go is not None
        critic = self.networks["value"]
        with crossing("batches"):
            known = batch.return_to_go.isfinite().nonzero().flatten()
        if not len(known):
            return features.new_zeros((), requires_grad=True), {}
        seen = features[known]
        output = critic.output(seen, seen.new_zeros(len(seen), 0, 0))
        loss = critic.loss(output, batch.return_to_go[known])
        return loss, {"value_loss": loss, "value": critic.value(output).mean()}

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
        if "target" in self.networks:
            follow(list(self.target.parameters()), list(self.q.parameters()), self.config.critic.polyak_tau)
