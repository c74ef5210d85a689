"""Off-policy and offline learning with a critic ensemble: one learner whose settings are the methods.

Here it acts; its updates are in ``off_policy_updates.py``, settings in ``off_policy_settings.py``;
``configs/off_policy`` has the methods as settings. With squashed noise and ``entropy`` it
is SAC (Haarnoja et al. 2018), with fixed noise and ``target_noise`` TD3 without delayed actor (Fujimoto et al. 2018;
as DrQ-v2, Yarats et al. 2022).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from episodes.schema import POLICY
from episodes.store import Selection
from policies.normalizer import normalizer_of
from policies.policy import Policy, set_frozen
from policies.residual.best_of import BestOfPolicy, best_of
from policies.residual.critic_guided import CriticGuided
from policies.residual.on_base import acts_without_noise
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from sims.starts import StartSequence
from sims.vector_env import VectorEnv
from vla_rl.algorithms.algorithm import Metrics
from vla_rl.algorithms.gate import Gate
from vla_rl.algorithms.off_policy_actor import check_policy
from vla_rl.algorithms.off_policy_critics import critic_action_shape
from vla_rl.algorithms.off_policy_settings import OffPolicyConfig
from vla_rl.algorithms.off_policy_updates import OffPolicyUpdates, made_conditional, stored_example
from vla_rl.algorithms.on_policy import ages
from vla_rl.replay.demonstrations import ChunkSequence, recorded_chunk_sequences, replay_of
from vla_rl.replay.replay import SEVERAL, Entries, Replay, Windows
from vla_rl.rollouts.collector import ActedChunk, Collector
from vla_rl.rollouts.experience import Experience, reward_errors
from vla_rl.rollouts.sharded import MakeRollouts


class OffPolicy(OffPolicyUpdates):
    """One iteration: chunks of every environment into the replay, with updates after each of them."""

    config: OffPolicyConfig

    def __init__(
        self,
        config: OffPolicyConfig,
        policy: Policy,
        env: VectorEnv,
        *,
        seed: int,
        make_rollouts: MakeRollouts = Collector,
    ) -> None:
        policy = made_conditional(policy, config)
        check_policy(config, policy)
        if config.best_of is not None:
            torch.manual_seed(spawn_seed(seed, "best of"))
            policy = best_of(policy, samples=config.best_of.samples, critic=config.critic)
            _check_samples(policy)
        set_frozen(policy, config.frozen)
        super().__init__(config, policy, seed=seed)
        self.iteration = self.chunks_acted = 0
        self.num_tasks = len(env.spec.tasks)
        found = self._demonstrated()
        kept = config.capacity + sum(map(len, found))
        policy.plan_storage(kept, in_host=True)
        example, device = stored_example(policy), policy.device
        self.replay = Replay(
            example, critic_action_shape(policy), streams=env.spec.num_envs,
            capacity=config.capacity, gamma=config.gamma, seed=spawn_seed(seed, "replay"), device=device,
        )  # fmt: skip
        self.demonstrations: Replay | None = None
        if found:
            seeded = spawn_seed(seed, "demonstrations")
            self.demonstrations = replay_of(found, policy, example, gamma=config.gamma, seed=seeded)
            self._check_returns(self.demonstrations)
        self.collector = make_rollouts(
            env, policy, critic=None,
            gamma=config.gamma, failure_weight=config.failure_weight, seed=seed, kept=kept,
        )  # fmt: skip
        self.gate = None if config.gate is None else Gate(config.gate)
        self.gate_seed = spawn_seed(seed, "gate")
        self._publish()

    def _demonstrated(self) -> list[ChunkSequence]:
        """None where none are drawn, and where the stores are not known yet (the check of a run's settings)."""
        config = self.config
        needed = config.demonstration_share > 0 or config.offline_iterations > 0
        if not needed or config.stores is None:
            return []
        if not config.stores:
            raise UserError(
                "algorithm.demonstration_share or offline_iterations is not 0, but the run starts from a bundle and "
                "has no demonstrations: give algorithm.stores"
            )
        where, horizon = Selection(folds=config.folds), self.policy.spec.action_horizon
        return recorded_chunk_sequences(config.stores, where, action_horizon=horizon, gamma=config.gamma)

    @property
    def offline(self) -> bool:
        """Whether this iteration learns from recorded episodes alone."""
        return self.iteration < self.config.offline_iterations

    def iterate(self) -> Metrics:
        metrics = self._learn_offline() if self.offline else self._act_and_learn()
        self.iteration += 1
        return {**metrics, "updates": float(self.updates), **self.collector.timer.take()}

    def _act_and_learn(self) -> Metrics:
        collector, totals = self.collector, defaultdict[str, list[float]](list)
        acted: list[Experience] = []
        age: list[Tensor] = []
        for _ in range(self.config.chunks):
            acted.append(self._act().experience)
            age.append(self.updates - acted[-1].policy_version)
            with collector.timer.section("learn"):
                while self.updates < self._updates_due():
                    self._update_into(totals)
            self._publish()
        self._check_returns(self.replay, whose="the policy's own")
        rollout = Experience.stack(acted)
        return {
            **_means(totals),
            "replayed": float(min(int(self.replay.count.sum()), self.config.capacity)),
            "replayed_age": self.replay.mean_age(self.updates),
            "success": rollout.success_rate(),
            "control_steps": float(rollout.control_steps()),
            **reward_errors([rollout.reward_counts()]),
            **(ages(torch.stack(age)) if self.config.staleness else {}),
        }

    def _publish(self) -> None:
        """The next chunk that is asked for is acted by the present weights, whose version is the number of updates."""
        self.collector.publish(self.updates, {**self._trained(), **self._renewed()})

    def _renewed(self) -> dict[str, Tensor]:
        """The copies with which a policy takes the denoising steps that ``explore`` does not train, of present weights:
        cloning trains them all."""
        if not self.config.clones:
            return {}
        before = dict(self.policy.named_parameters())
        self.policy.prepare_to_explore()
        return {name: value for name, value in self.policy.named_parameters() if value is not before[name]}

    def _learn_offline(self) -> Metrics:
        """``offline_updates`` updates, which the gate keeps or takes back."""
        totals = defaultdict[str, list[float]](list)
        self._fit_features()  # weights that the gate takes back have the scale of features too
        acted = 0
        if self.gate is not None and self.gate.is_open:
            outcomes, acted = self._outcomes(self.gate.config.episodes)
            self.gate.accept(outcomes, self._state_of(self._parts_of_policy()))
        with self.collector.timer.section("learn"):
            for _ in range(self.config.offline_updates):
                self._update_into(totals)
        self._publish()
        metrics = _means(totals) | {"control_steps": 0.0}
        if self.gate is None:
            return metrics
        parts = self._parts_of_policy()
        outcomes, more = self._outcomes(self.gate.config.episodes)
        kept, found = self.gate.accept(outcomes, self._state_of(parts))
        self._restore(parts, kept)
        self._publish()
        return metrics | found | {"control_steps": float(acted + more)}

    def _outcomes(self, episodes: int) -> tuple[Bool[Tensor, " episodes"], int]:
        """Success of the acting policy from as many starts, always the same ones; control steps of all environments.

        The collector is left as it was: training learns nothing from these episodes, and as nothing is acted between
        them, the policy explores by the same draws each time.
        """
        collector, size = self.collector, self.collector.num_envs
        starts = StartSequence("train", seed=self.gate_seed, num_tasks=self.num_tasks)
        outcomes, control_steps, before = list[Tensor](), 0, collector.state_dict()
        with crossing("outcomes"):
            for _ in range(-(-episodes // size)):
                rollout = collector.episodes(starts.take(size))
                outcomes.append(rollout.success.any(0).cpu())
                control_steps += rollout.control_steps()
            collector.load_state_dict(before)
        return torch.cat(outcomes)[:episodes], control_steps

    # -- act ----------------------------------------------------------------------------------------------------------

    def _act(self) -> ActedChunk:
        """One chunk of every environment, into the replay."""
        chunk = self.collector.act(self._warmup_noise)
        experience, action = chunk.experience, chunk.action
        if isinstance(self.policy, CriticGuided):
            action = self.policy.critic_action(experience.trace, action)
        self.replay.cut_off(chunk.cut_off)
        known = experience.actor == POLICY  # a person's actions are not: such a chunk is an observation only
        self.replay.append(
            range(len(experience)),
            Entries(
                inputs=experience.inputs,
                action=action,
                reward=experience.reward * known,
                num_executed=experience.num_executed * known,
                terminated=experience.terminated & known,
                policy_version=experience.policy_version,
                timed_out=torch.zeros_like(known),
                actor=experience.actor,
                num_cloned=experience.num_executed * known,
            ),
        )
        if chunk.final is not None:
            empty = action.new_zeros(len(chunk.timed_out))
            self.replay.append(
                chunk.timed_out,
                Entries(
                    inputs=chunk.final,
                    action=action[: len(chunk.timed_out)],
                    reward=empty,
                    num_executed=empty.long(),
                    terminated=empty.bool(),
                    policy_version=experience.policy_version[: len(chunk.timed_out)],
                    timed_out=~empty.bool(),
                    actor=torch.full_like(empty, SEVERAL).long(),
                    num_cloned=empty.long(),
                ),
            )
        self.chunks_acted += len(experience)
        return chunk

    def _warmup_noise(self, ahead: int) -> Float[Tensor, "N H A"] | None:
        """Uniform noise on the actions of a chunk during the warm-up. ``ahead``: chunks of each environment that are
        acted before it and not in the replay yet."""
        noise, spec = self.config.warmup_noise, self.policy.spec
        if not noise or self.chunks_acted + ahead * self.collector.num_envs >= self.config.warmup:
            return None
        shape = self.collector.num_envs, spec.action_horizon, spec.robot.action_dim
        uniform = torch.rand(shape, generator=self.generator, device=self.policy.device)
        return noise * self._action_scale() * (2 * uniform - 1)

    def _action_scale(self) -> Tensor | float:
        normalizer = normalizer_of(self.policy)
        return 1.0 if normalizer is None else normalizer.action_scale

    def _updates_due(self) -> int:
        """By now: none during the warm-up, nor before a transition is complete, then the critic's own, then
        ``utd_ratio`` per chunk."""
        config, since = self.config, self.chunks_acted - self.config.warmup
        before = max(config.critic_warmup, config.all_offline_updates)
        return before + int(since * config.utd_ratio) if since >= 0 and len(self.replay) else 0

    # -- learn --------------------------------------------------------------------------------------------------------

    def _update_into(self, totals: dict[str, list[float]]) -> None:
        for name, value in self._update().items():
            totals[name].append(value)

    def _conservative_weight(self) -> float:
        cal_ql = self.config.cal_ql
        return 0.0 if cal_ql is None else cal_ql.weight if self.offline else cal_ql.online_weight

    def _draw(self, size: int) -> Windows:
        """Demonstrations and own experience in their shares."""
        share = 1.0 if self.offline else self.config.demonstration_share
        count = round(size * share) if self.demonstrations is not None else 0
        return self._drawn([(self.demonstrations, count), (self.replay, size - count)])

    # -- exact state --------------------------------------------------------------------------------------------------

    def deployed(self) -> Policy:
        return self.policy

    def _parts(self) -> dict[str, Any]:
        parts = {"replay": self.replay, **super()._parts()}
        return parts if self.gate is None else parts | {"gate": self.gate}

    def state_dict(self) -> dict[str, Any]:
        recorded = self.demonstrations
        return super().state_dict() | {
            "iteration": self.iteration,
            "chunks_acted": self.chunks_acted,
            "demonstrations": None if recorded is None else recorded.position(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError if the demonstrations are others."""
        if self.demonstrations is not None:
            self.demonstrations.go_on_from(state["demonstrations"])
        super().load_state_dict(state)
        self.iteration, self.chunks_acted = state["iteration"], state["chunks_acted"]
        self._publish()


def _means(totals: Mapping[str, Sequence[float]]) -> Metrics:
    return {name: sum(values) / len(values) for name, values in totals.items()}


def _check_samples(policy: BestOfPolicy) -> None:
    """UserError where the base's chunk is the same whatever its noise."""
    if acts_without_noise(policy.base):
        raise UserError(
            "algorithm.best_of chooses among samples, but the policy acts without noise: start from a flow or "
            "diffusion policy with start.policy.initial_noise above 0"
        )
