"""Updates of a critic ensemble and an actor from windows, wherever these come from.

``OffPolicy`` (off_policy.py) acts between them, ``RecordedUpdates`` (below) has recorded episodes alone. Losses are in
``off_policy_critics.py`` and ``off_policy_actor.py``, settings in ``off_policy_settings.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.device import make_generator, restore_generator, restore_optimizer
from policies.policy import Policy
from policies.residual.conditioned import conditioned
from policies.residual.on_base import context_of_zeros
from sims.devices.crossing import read_numbers
from sims.errors import UserError
from sims.numbers.finite import check_metrics
from sims.numbers.seeding import spawn_seed
from sims.tensor_dataclass import TensorDataclass
from vla_rl.algorithms.algorithm import Metrics
from vla_rl.algorithms.off_policy_actor import Actor
from vla_rl.algorithms.off_policy_critics import Critics
from vla_rl.algorithms.off_policy_settings import RecordedUpdatesConfig, UpdatesConfig
from vla_rl.replay.augmentation import shift_images
from vla_rl.replay.replay import Replay, Windows
from vla_rl.rollouts.weights import load_weights, named_weights

FITTED = 1024  # observations that the scale of features is measured on


class OffPolicyUpdates(ABC):
    """Critics, actor and their one random stream; subclasses draw the windows."""

    config: UpdatesConfig
    fit_features = True  # whether the scale of features is measured

    def __init__(self, config: UpdatesConfig, policy: Policy, *, seed: int) -> None:
        self.config, self.policy = config, policy
        torch.manual_seed(spawn_seed(seed, "critic"))
        self.critics = Critics(config, policy)
        self.actor = Actor(config, policy)
        for name, parameters in (("critic", self.critics.parameters), ("actor", self.actor.parameters)):
            if not any(parameter.requires_grad for parameter in parameters):
                raise UserError(f"algorithm.frozen leaves the {name} nothing to train, got {', '.join(config.frozen)}")
        self.generator = make_generator(policy.device, spawn_seed(seed, "updates"))
        self.shift = config.shift if _learns_to_see(policy) else 0
        self.updates = 0

    @abstractmethod
    def _draw(self, size: int) -> Windows:
        """A batch of windows."""

    @abstractmethod
    def _conservative_weight(self) -> float:
        """Cal-QL's, of the next update."""

    def _update(self) -> dict[str, float]:
        """One of the critic, and of the actor where it is its turn. Raises NotFinite."""
        config, critics, actor = self.config, self.critics, self.actor
        self._fit_features()
        batch = self._draw(config.batch_size)
        context, following = self.policy.restore(batch.inputs), self.policy.restore(batch.next_inputs)
        conservative = self._conservative_weight()
        proposals = actor.propose(context, following, batch, critics, self.generator, compare=conservative > 0)
        found = critics.gradients(context, following, batch, proposals, self.generator, conservative=conservative)
        metrics = self._check(found, batch)
        critics.apply()
        self.updates += 1
        if self.updates > config.critic_warmup and self.updates % config.actor_every == 0:
            metrics |= self._check(actor.gradients(context, batch, proposals, critics, self.generator), batch)
            actor.apply()
        return metrics

    def _fit_features(self) -> None:
        """Before the first update, unless the policy was trained before and knows the scale of its features."""
        if self.fit_features and not self.updates and self.critics.features_are_unscaled():
            self.critics.fit_features(self._draw(FITTED).inputs)

    def _check_returns(self, *replays: Replay, whose: str = "the recorded episodes'") -> None:
        """UserError where a return is outside a histogram, to which all beyond its ends is alike."""
        scale, histograms = self.config.reward_scale, self.critics.histograms()
        for replay in replays if histograms else ():
            if (found := replay.return_range()) is None:
                continue
            least, largest = (scale * value for value in found)
            for setting, histogram in histograms.items():
                rounding = 1e-5 * (histogram.high - histogram.low)
                if least < histogram.low - rounding or largest > histogram.high + rounding:
                    raise UserError(
                        f"{whose} returns are from {least:.4g} to {largest:.4g} (with reward_scale {scale:g}), and "
                        f"the values of {setting} from {histogram.low:g} to {histogram.high:g}: set {setting}.low and "
                        "high to hold them, or change reward_scale"
                    )

    def _drawn(self, parts: Sequence[tuple[Replay | None, int]]) -> Windows:
        """So many windows of each, rewards scaled; images of an encoder that is trained are shifted at random.

        RECAP's V is of returns that end at a time limit, so nothing follows it in an advantage either.
        """
        config, recap, spec = self.config, self.config.recap is not None, self.policy.spec
        returns = self._conservative_weight() > 0 or recap
        further = spec.cloned_horizon - spec.action_horizon if config.clones else 0
        drawn = [
            source.sample(number, chunks=config.n_step, returns=returns, time_limit_ends=recap, further=further)
            for source, number in parts
            if source is not None and number
        ]
        batch = (Windows.cat(drawn) if len(drawn) > 1 else drawn[0]).scaled(config.reward_scale)
        return shift_images(batch, self.shift, self.generator) if self.shift else batch

    def _check(self, metrics: dict[str, Tensor], batch: Windows) -> Metrics:
        """``metrics`` as numbers. Raises NotFinite, with ``batch``, if one of them is not finite."""
        numbers = read_numbers({name: value.float() for name, value in metrics.items()})
        suspects = {
            "critic optimizer": self.critics.optimizer, "actor optimizer": self.actor.optimizer,
            "policy weight": self.policy,
            **{f"{name} weight": network for name, network in self.critics.networks.items()},
        }  # fmt: skip
        check_metrics(numbers, where=f"update {self.updates}", batch=batch, suspects=suspects)
        return numbers

    # -- exact state --------------------------------------------------------------------------------------------------

    def _trained(self) -> dict[str, Tensor]:
        """Weights that are trained, and the scale of their inputs."""
        buffers = self.policy.named_buffers()
        scales = {name: value for name, value in buffers if name.rpartition(".")[2].startswith("feature_")}
        return named_weights(self.policy, None) | scales

    def _parts(self) -> dict[str, Any]:
        """Everything with a ``state_dict`` of its own."""
        return {**self.critics.parts(), "actor_optimizer": self.actor.optimizer}

    def _parts_of_policy(self) -> dict[str, Any]:
        """Those that go back where the policy goes back: the critics too if their optimizer trains some of it."""
        critics = self.critics.parts() if self.critics.train_policy else {}
        return {**critics, "actor_optimizer": self.actor.optimizer}

    def _state_of(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """The policy's state, and that of these parts."""
        return {
            "policy": {name: value.detach() for name, value in self._trained().items()},
            "log_temperature": self.actor.log_temperature.detach(),
            **{name: part.state_dict() for name, part in parts.items()},
        }

    def _restore(self, parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """``state``: as of ``_state_of``."""
        load_weights(self.policy, None, state["policy"])
        with torch.no_grad():
            self.actor.log_temperature.copy_(state["log_temperature"])
        for name, part in parts.items():
            if isinstance(part, torch.optim.Optimizer):
                restore_optimizer(part, state[name])
            else:
                part.load_state_dict(state[name])

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "generator": self.generator.get_state(), **self._state_of(self._parts())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        restore_generator(self.generator, state["generator"])
        self._restore(self._parts(), state)


class RecordedUpdates(OffPolicyUpdates):
    """One fit (vla_rl/runners/fit.py) of recorded episodes: ``config.steps`` updates.

    ``own``: episodes in which the policy acted; ``demonstrations``: chunks that people chose, of which
    ``config.demonstration_share`` of a batch is drawn; either may hold windows of the other. What ``config.frozen``
    names is frozen before anything is stored.
    """

    config: RecordedUpdatesConfig

    def __init__(
        self, config: RecordedUpdatesConfig, policy: Policy, own: Replay, demonstrations: Replay, *, seed: int
    ) -> None:
        super().__init__(config, policy, seed=seed)
        self.own, self.demonstrations = own, demonstrations
        self._check_returns(own, demonstrations)

    @property
    def step(self) -> int:
        return self.updates

    @property
    def steps(self) -> int:
        return self.config.steps

    def update(self) -> dict[str, float]:
        return self._update()

    def _draw(self, size: int) -> Windows:
        count = round(size * self.config.demonstration_share)
        return self._drawn([(self.demonstrations, count), (self.own, size - count)])

    def _conservative_weight(self) -> float:
        return 0.0 if self.config.cal_ql is None else self.config.cal_ql.weight

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "own": self.own.position(), "demonstrations": self.demonstrations.position()
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError if the episodes are others."""
        super().load_state_dict(state)
        self.own.go_on_from(state["own"])
        self.demonstrations.go_on_from(state["demonstrations"])


def _learns_to_see(policy: Policy) -> bool:
    """Not where its encoder is frozen: whether a replay then holds images or features is a matter of room."""
    groups = policy.parameter_groups()
    encoder = [parameter for name in ("encoder", "lora") for parameter in groups.get(name, ())]
    return not encoder or any(parameter.requires_grad for parameter in encoder)


def made_conditional(policy: Policy, config: UpdatesConfig) -> Policy:
    """``policy`` as RECAP's condition needs it, where that is set."""
    if config.recap is None or config.recap.condition is None:
        return policy
    return conditioned(policy, guidance=config.recap.condition.guidance)


@torch.no_grad()
def stored_example(policy: Policy) -> TensorDataclass:
    """A stored record of one observation, all zeros: its shapes."""
    return policy.store(context_of_zeros(policy))
