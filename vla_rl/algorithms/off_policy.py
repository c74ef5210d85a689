"""Off-policy learning of a residual policy with a critic ensemble: one learner whose settings are the methods.

Top to bottom: settings, act, draw, critic loss, actor loss, step. ``configs/off_policy`` has ResFiT, RLPD and others as
settings. With squashed noise and ``entropy`` it is SAC (Haarnoja et al. 2018), with fixed noise and ``target_noise``
TD3 without delayed actor (Fujimoto et al. 2018; as DrQ-v2, Yarats et al. 2022).
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from episodes.schema import POLICY
from policies.device import make_generator, restore_generator
from policies.policy import Policy, set_frozen
from policies.residual.critic_guided import CriticGuided
from sims.devices.crossing import crossing, read_numbers
from sims.errors import UserError
from sims.numbers.finite import check_metrics
from sims.numbers.ranges import Count, NonNegativeFloat, PositiveFloat, PositiveInt, Share
from sims.numbers.seeding import spawn_seed
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import MIN_INSTRUCTION_BYTES, Observation, VectorEnv
from vla_rl.algorithms.algorithm import AlgorithmConfig, Metrics
from vla_rl.algorithms.td_target import td_target, temperature_loss
from vla_rl.critics.ensemble import EnsembleConfig, QEnsemble, follow
from vla_rl.replay.augmentation import shift_images
from vla_rl.replay.demonstrations import recorded_replay
from vla_rl.replay.replay import Entries, Replay, Windows
from vla_rl.rollouts.collector import ActedChunk, Collector
from vla_rl.rollouts.experience import Experience, reward_errors
from vla_rl.rollouts.weights import load_weights, named_weights


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
class OffPolicyConfig(AlgorithmConfig):
    """An iteration acts ``chunks`` chunks in every environment; ``utd_ratio`` updates of the critic follow each chunk
    of an environment, and every ``actor_every``th update also changes the actor. ``actor_learning_rate``: of its Adam.

    Before that ``warmup`` chunks of all environments together are acted without updates, with uniform noise of up to
    ``warmup_noise`` added (1 is half of the range that demonstrations span), then ``critic_warmup`` updates train the
    critic alone. ``n_step``: chunks per target. ``stores``: recorded episodes; null: those that start cloned.
    ``demonstration_share`` of every batch is drawn from them. ``capacity``: chunks of the replay. ``target_noise``: std
    of the noise on the next action of a target, clipped at 0.3, for fixed noise. ``shift``: pixels by which stored
    images are shifted at random; without effect where the replay holds features.

    ``correction_weight``: of the mean squared correction, in units of the largest, in the actor's loss, whose Q is then
    divided by its mean size. The policy corrects only where Q gains by it (TD3+BC, Fujimoto and Gu 2021, Eq. 5).
    """

    name: Literal["off_policy"] = "off_policy"
    iterations: Count = 100
    chunks: PositiveInt = 50
    utd_ratio: PositiveFloat = 1.0
    n_step: PositiveInt = 3
    batch_size: PositiveInt = 256
    stores: tuple[Path, ...] | None = None
    demonstration_share: Share = 0.5
    capacity: PositiveInt = 100_000
    warmup: PositiveInt = 500
    warmup_noise: NonNegativeFloat = 0.0
    critic_warmup: Count = 500
    actor_every: PositiveInt = 2
    actor_learning_rate: PositiveFloat = 3e-4
    correction_weight: NonNegativeFloat = 0.0
    target_noise: NonNegativeFloat = 0.05
    entropy: EntropyConfig | None = None
    shift: Count = 4
    max_grad_norm: PositiveFloat = 10.0
    critic: EnsembleConfig = field(default_factory=EnsembleConfig)

    def with_demonstrations(self, stores: Sequence[Path]) -> OffPolicyConfig:
        return self if self.stores is not None else replace(self, stores=tuple(stores))


FITTED = 1024  # observations that the scale of features is measured on
LEAST_Q = 1e-3  # mean size of Q that the actor's loss is divided by
TARGET_NOISE_LIMIT = 0.3  # Fujimoto et al. 2018 (TD3) clip at .5 of a range that is as large


class OffPolicy:
    """One iteration: chunks of every environment into the replay, with updates after each of them."""

    def __init__(self, config: OffPolicyConfig, policy: Policy, env: VectorEnv, *, seed: int) -> None:
        self.config, self.policy, self.iteration = config, policy, 0
        if not isinstance(policy, CriticGuided):
            raise UserError(
                "algorithm off_policy trains a residual on the policy it starts from: add start.residual: {}"
            )
        self.guided: CriticGuided = policy
        if policy.squashed != (config.entropy is not None):
            raise UserError(
                "start.residual.noise and algorithm.entropy belong together: squashed noise needs entropy: {}, "
                "fixed noise none"
            )
        device = policy.device
        set_frozen(policy, ())
        self.collector = Collector(
            env, policy, critic=None, gamma=config.gamma, failure_weight=config.failure_weight, seed=seed
        )
        example, action_shape = _example(policy), (policy.spec.action_horizon, policy.spec.robot.action_dim)
        self.replay = Replay(
            example, action_shape, streams=env.spec.num_envs, capacity=config.capacity, gamma=config.gamma,
            seed=spawn_seed(seed, "replay"), device=device,
        )  # fmt: skip
        self.demonstrations = self._load_demonstrations(example, seed)
        torch.manual_seed(spawn_seed(seed, "critic"))
        with crossing("weights"):
            self.critic = QEnsemble(
                config.critic, feature_dim=policy.spec.value_dim, action_numbers=math.prod(action_shape)
            ).to(device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.actor_parameters = list(policy.parameter_groups()["residual"])
        self.critic_parameters = [*self.critic.parameters(), *policy.parameter_groups().get("encoder", ())]
        fused = device.type in ("cpu", "cuda")
        self.actor_optimizer = torch.optim.Adam(self.actor_parameters, lr=config.actor_learning_rate, fused=fused)
        self.critic_optimizer = torch.optim.Adam(self.critic_parameters, lr=config.critic.learning_rate, fused=fused)
        self.log_temperature = torch.zeros((), device=device)
        self.temperature_optimizer: torch.optim.Optimizer | None = None
        if config.entropy is not None:
            self.log_temperature.fill_(math.log(config.entropy.temperature)).requires_grad_(True)
            self.temperature_optimizer = torch.optim.Adam([self.log_temperature], lr=config.entropy.learning_rate)
        self.generator = make_generator(device, spawn_seed(seed, "updates"))
        self.chunks_acted = self.updates = 0

    def _load_demonstrations(self, example: TensorDataclass, seed: int) -> Replay | None:
        """None where none are drawn, and where the stores are not known yet (the check of a run's settings)."""
        config = self.config
        if config.demonstration_share == 0 or config.stores is None:
            return None
        if not config.stores:
            raise UserError(
                "algorithm.demonstration_share is not 0, but the run starts from a bundle and has no demonstrations: "
                "give algorithm.stores"
            )
        return recorded_replay(
            self.policy, config.stores, example, gamma=config.gamma, seed=spawn_seed(seed, "demonstrations")
        )

    def iterate(self) -> Metrics:
        collector, totals = self.collector, defaultdict[str, list[float]](list)
        acted: list[Experience] = []
        collector.take_weights()
        for _ in range(self.config.chunks):
            acted.append(self._act().experience)
            with collector.timer.section("learn"):
                while self.updates < self._updates_due():
                    for name, value in self._update().items():
                        totals[name].append(value)
        self.iteration += 1
        collector.publish(self.iteration, self._trained())
        rollout = Experience.stack(acted)
        collector.starts.learn(rollout)
        return {
            **{name: sum(values) / len(values) for name, values in totals.items()},
            "updates": float(self.updates),
            "replayed": float(min(int(self.replay.count.sum()), self.config.capacity)),
            "success": rollout.success_rate(),
            "control_steps": float(rollout.control_steps()),
            **reward_errors([rollout.reward_counts()]),
            **collector.timer.take(),
        }

    # -- act ----------------------------------------------------------------------------------------------------------

    def _act(self) -> ActedChunk:
        """One chunk of every environment, into the replay."""
        chunk = self.collector.act(self._explore_more)
        experience = chunk.experience
        known = experience.actor == POLICY  # a person's actions are not: such a chunk is an observation only
        self.replay.append(
            range(len(experience)),
            Entries(
                inputs=experience.inputs,
                action=chunk.action,
                reward=experience.reward * known,
                num_executed=experience.num_executed * known,
                terminated=experience.terminated & known,
            ),
        )
        if chunk.final is not None:
            empty = chunk.action.new_zeros(len(chunk.timed_out))
            self.replay.append(
                chunk.timed_out,
                Entries(
                    inputs=chunk.final,
                    action=chunk.action[: len(chunk.timed_out)],
                    reward=empty,
                    num_executed=empty.long(),
                    terminated=empty.bool(),
                ),
            )
        self.chunks_acted += len(experience)
        return chunk

    def _explore_more(self, action: Float[Tensor, "N H A"]) -> Float[Tensor, "N H A"]:
        """Uniform noise during the warm-up."""
        noise = self.config.warmup_noise
        if not noise or self.chunks_acted >= self.config.warmup:
            return action
        uniform = torch.rand(action.shape, generator=self.generator, device=action.device)
        return (action + noise * self.guided.normalizer.action_scale * (2 * uniform - 1)).clamp(-1, 1)

    def _updates_due(self) -> int:
        """By now: none during the warm-up, then the critic's own, then ``utd_ratio`` per chunk."""
        since = self.chunks_acted - self.config.warmup
        return self.config.critic_warmup + int(since * self.config.utd_ratio) if since >= 0 else 0

    # -- learn --------------------------------------------------------------------------------------------------------

    def _update(self) -> dict[str, float]:
        """One of the critic, and of the actor where it is its turn. Raises NotFinite."""
        if not self.updates:
            self.guided.fit_features(self._draw(FITTED).inputs)
        batch = self._draw(self.config.batch_size)
        context = self.policy.restore(batch.inputs)
        metrics = self._critic_step(context, batch)
        self.updates += 1
        if self.updates > self.config.critic_warmup and self.updates % self.config.actor_every == 0:
            metrics |= self._actor_step(context, batch)
        return metrics

    def _draw(self, size: int) -> Windows:
        """Demonstrations and own experience in their shares; images are shifted at random."""
        config, recorded = self.config, self.demonstrations
        share = round(size * config.demonstration_share) if recorded is not None else 0
        parts = [] if recorded is None else [recorded.sample(share, chunks=config.n_step)]
        if share < size:
            parts.append(self.replay.sample(size - share, chunks=config.n_step))
        batch = Windows.cat(parts)
        return shift_images(batch, config.shift, self.generator) if config.shift else batch

    def _critic_step(self, context: TensorDataclass, batch: Windows) -> dict[str, float]:
        features = self.guided.critic_features(context)
        with torch.no_grad():
            target = self._target(batch)
        q = self._q(self.critic, features, batch.action)
        loss = (q - target).square().mean()
        self.critic_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.critic_parameters, self.config.max_grad_norm)
        metrics = {"q_loss": loss, "q": q.mean(), "q_spread": q.std(0).mean(), "critic_grad_norm": norm}
        checked = self._check(metrics, batch)
        self.critic_optimizer.step()
        follow(self.target, self.critic, self.config.critic.polyak_tau)
        return checked

    def _q(
        self, critic: QEnsemble, features: Float[Tensor, "B F"], action: Float[Tensor, "B H A"]
    ) -> Float[Tensor, "members B"]:
        return critic(features, self.guided.normalizer.normalize_action(action))

    def _target(self, batch: Windows) -> Float[Tensor, " B"]:
        following = self.policy.restore(batch.next_inputs)
        action, bonus = self._next_action(following, batch.action)
        next_q = self._q(self.target, self.guided.critic_features(following), action)
        chosen = next_q[self.target.draw(self.generator, next_q.device)]
        return td_target(batch.reward, batch.discount, chosen + bonus)

    def _next_action(
        self, following: TensorDataclass, like: Float[Tensor, "B H A"]
    ) -> tuple[Float[Tensor, "B H A"], Float[Tensor, " #B"]]:
        """The present actor's action at the window's end, and the entropy bonus of a target."""
        entropy, policy = self.config.entropy, self.guided
        if entropy is not None:
            action, log_prob = policy.rsample(following, self.generator)
            return action, -self.log_temperature.exp() * log_prob.sum((1, 2)) * entropy.backup
        action = policy.act_from_noise(following, like)
        noise = torch.randn(action.shape, generator=self.generator, device=action.device) * self.config.target_noise
        noise = noise.clamp(-TARGET_NOISE_LIMIT, TARGET_NOISE_LIMIT) * policy.normalizer.action_scale
        return (action + noise).clamp(-1, 1), action.new_zeros(1)

    def _actor_step(self, context: TensorDataclass, batch: Windows) -> dict[str, float]:
        """Maximize the mean of the ensemble (REDQ, Chen et al. 2021), with SAC's entropy bonus."""
        context = context.detach()
        features, policy = self.guided.critic_features(context), self.guided
        if self.config.entropy is None:
            action, log_prob = policy.act_from_noise(context, batch.action), features.new_zeros(len(features))
        else:
            action, elements = policy.rsample(context, self.generator)
            log_prob = elements.sum((1, 2))
        q = self._q(self.critic, features, action).mean(0)
        loss = (self.log_temperature.detach().exp() * log_prob - q).mean()
        correction = policy.correction(context, action).square().mean()
        if weight := self.config.correction_weight:
            loss = loss / q.detach().abs().mean().clamp(min=LEAST_Q) + weight * correction
        gradients = torch.autograd.grad(loss, self.actor_parameters)
        for parameter, gradient in zip(self.actor_parameters, gradients, strict=True):
            parameter.grad = gradient
        norm = nn.utils.clip_grad_norm_(self.actor_parameters, self.config.max_grad_norm)
        metrics = {"actor_loss": loss, "actor_grad_norm": norm, "actor_q": q.mean(), "correction": correction.sqrt()}
        if (tuned := self.temperature_optimizer) is not None and (entropy := self.config.entropy) is not None:
            self.log_temperature.grad = None
            temperature_loss(self.log_temperature, log_prob, entropy.target * action[0].numel()).backward()
            metrics |= {"temperature": self.log_temperature.exp(), "entropy": -log_prob.mean()}
        checked = self._check(metrics, batch)
        self.actor_optimizer.step()
        if tuned is not None:
            tuned.step()
        return checked

    def _check(self, metrics: dict[str, Tensor], batch: Windows) -> Metrics:
        """``metrics`` as numbers. Raises NotFinite, with ``batch``, if one of them is not finite."""
        numbers = read_numbers({name: value.float() for name, value in metrics.items()})
        suspects = {
            "critic optimizer": self.critic_optimizer, "actor optimizer": self.actor_optimizer,
            "policy weight": self.policy, "critic weight": self.critic, "target weight": self.target,
        }  # fmt: skip
        check_metrics(numbers, where=f"update {self.updates}", batch=batch, suspects=suspects)
        return numbers

    # -- exact state --------------------------------------------------------------------------------------------------

    def deployed(self) -> Policy:
        return self.policy

    def _trained(self) -> dict[str, Tensor]:
        """Weights that are trained, and the scale of their inputs."""
        scales = {name: value for name, value in self.policy.named_buffers() if name.startswith("feature_")}
        return named_weights(self.policy, None) | scales

    def _stateful(self) -> dict[str, Any]:
        """Everything with a ``state_dict`` of its own."""
        parts = {
            "critic": self.critic, "target": self.target, "replay": self.replay,
            "actor_optimizer": self.actor_optimizer, "critic_optimizer": self.critic_optimizer,
        }  # fmt: skip
        if self.temperature_optimizer is not None:
            parts["temperature_optimizer"] = self.temperature_optimizer
        return parts

    def state_dict(self) -> dict[str, Any]:
        recorded = self.demonstrations
        return {
            "iteration": self.iteration,
            "chunks_acted": self.chunks_acted,
            "updates": self.updates,
            "policy": {name: value.detach() for name, value in self._trained().items()},
            "log_temperature": self.log_temperature.detach(),
            "generator": self.generator.get_state(),
            "demonstrations": None if recorded is None else recorded.position(),
            **{name: part.state_dict() for name, part in self._stateful().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError if the demonstrations are others."""
        self.iteration, self.chunks_acted, self.updates = (
            state[name] for name in ("iteration", "chunks_acted", "updates")
        )
        load_weights(self.policy, None, state["policy"])
        with torch.no_grad():
            self.log_temperature.copy_(state["log_temperature"])
        restore_generator(self.generator, state["generator"])
        if self.demonstrations is not None:
            self.demonstrations.go_on_from(state["demonstrations"])
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])


@torch.no_grad()
def _example(policy: Policy) -> TensorDataclass:
    """A stored record of one observation, all zeros: its shapes."""
    robot, device = policy.spec.robot, policy.device
    obs = Observation(
        images=torch.zeros(1, len(robot.cameras), *robot.image_size, 3, dtype=torch.uint8, device=device),
        state=torch.zeros(1, robot.state_dim, device=device),
        instruction=torch.zeros(1, MIN_INSTRUCTION_BYTES, dtype=torch.uint8, device=device),
    )
    context, _ = policy.encode(obs, policy.initial_state(1))
    return policy.store(context)
