"""Chunked rollouts of a policy in any VectorEnv."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from episodes.schema import HUMAN, POLICY
from policies.policy import ActionSample, Policy
from sims.chunk import ChunkStep, step_chunk
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, StartState, VectorEnv
from vla_rl.critics.value import ValueCritic
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.rollouts.timer import Timer
from vla_rl.rollouts.weights import LocalWeights, WeightStore, load_weights

R = TypeVar("R", bound=TensorDataclass)


@dataclass(frozen=True, kw_only=True)
class Decision(TensorDataclass):
    """What the policy chose in each environment, what it saw (``Policy.store``) and the critic's value."""

    inputs: TensorDataclass
    sample: ActionSample
    value: Tensor


class Collector:
    """Acts with ``policy`` in ``env``: rollouts, the starts that they take, and all random state of acting.

    Before each rollout it takes newer weights from ``weights``.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        *,
        critic: ValueCritic | None,
        gamma: float,
        failure_weight: float,
        seed: int,
        weights: WeightStore | None = None,
    ) -> None:
        self.env, self.policy, self.critic, self.gamma = env, policy, critic, gamma
        self.weights: WeightStore = LocalWeights() if weights is None else weights
        self.timer, self.policy_version = Timer(), 0
        self.starts = TrainingStarts(seed=seed, num_tasks=len(env.spec.tasks), failure_weight=failure_weight)
        self.generator = torch.Generator().manual_seed(seed)
        num_envs = env.spec.num_envs
        self.task = torch.zeros(num_envs, dtype=torch.int64)
        self._all = torch.arange(num_envs)
        self._initial_state = policy.initial_state(num_envs)
        self._state = self._initial_state
        self._observation: Observation | None = None  # of all environments, where it is already known
        self.start(self.starts.take(num_envs))

    # -- exact state ----------------------------------------------------------------------------------------------

    def start(self, starts: Sequence[StartState]) -> None:
        """Begin an episode in every environment."""
        self._reset(self._all, starts)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Lends the environment to somebody else; afterwards the episodes go on, or new ones begin."""
        held = self._capture()
        yield
        self._resume(held)

    def state_dict(self) -> dict[str, Any]:
        held = self._capture()
        return {
            "policy_version": self.policy_version,
            "generator": self.generator.get_state(),
            "starts": self.starts.state_dict(),
            "episodes": None if held is None else [asdict(start) for start in held[0]],
            "policy_state": [tensor.clone() for tensor in self._state.tensors()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy_version = state["policy_version"]
        self.generator.set_state(state["generator"])
        self.starts.load_state_dict(state["starts"])
        if state["episodes"] is None:
            self._resume(None)
            return
        saved = iter(state["policy_state"])
        self._resume(([StartState(**start) for start in state["episodes"]], self._state.map(lambda _: next(saved))))

    def _capture(self) -> tuple[Sequence[StartState], TensorDataclass] | None:
        """The episodes under way and the policy's memory of them; None where the environment cannot capture."""
        return (self.env.capture(), self._state) if self.env.spec.can_capture else None

    def _resume(self, held: tuple[Sequence[StartState], TensorDataclass] | None) -> None:
        if held is None:
            self.start(self.starts.take(self.env.spec.num_envs))
            return
        self.start(held[0])
        self._state = held[1]

    # -- continuing rollouts (PPO) --------------------------------------------------------------------------------

    def collect(self, num_chunks: int) -> Experience:
        """``num_chunks`` chunks of every environment [T, N]; where an episode ends the next one begins."""
        self._take_weights()
        chunks, final_values = [], []
        for _ in range(num_chunks):
            decision = self._decide(self._all)
            chunk = self._execute(decision.sample.action)
            chunks.append(self._experience(decision, chunk))
            final_values.append(self._truncated_values(chunk))
            ended = chunk.done.nonzero().flatten()
            if len(ended):
                self._reset(ended, self.starts.take(len(ended)))
        self._observation = self._observe(self._all)
        rollout = Experience.stack(chunks)
        rollout = _clear_invalid(rollout, rollout.valid)
        following = torch.cat([rollout.value[1:], self._value_of(self._observation, self._all)[None]])
        next_value = torch.where(rollout.truncated, torch.stack(final_values), following)
        # Where the simulator failed: delta = 0, and the accumulation stops.
        rollout = dataclasses.replace(rollout, next_value=torch.where(rollout.valid, next_value, rollout.value))
        self.starts.learn(rollout)
        return rollout

    # -- whole episodes (GRPO) ------------------------------------------------------------------------------------

    def episodes(self, starts: Sequence[StartState]) -> Experience:
        """One episode per environment, each to its end: [T, N], T of the longest; after an end ``valid`` is False."""
        self._take_weights()
        num_envs = self.env.spec.num_envs
        self._reset(self._all, starts)
        alive = torch.ones(num_envs, dtype=torch.bool)
        chunks: list[Experience] = []
        valid: list[Tensor] = []
        while alive.any():
            running = alive.nonzero().flatten()
            decision = scatter(self._decide(running), running, num_envs)
            chunk = self._execute(decision.sample.action)
            valid.append(alive & chunk.valid)
            chunks.append(self._experience(decision, chunk))
            failed = alive & ~chunk.valid
            alive = alive & (~chunk.done | failed)
            if failed.any():  # the simulator failed: its episode starts again, and what it gave so far is not used
                again = failed.nonzero().flatten()
                valid = [flags & ~failed for flags in valid]
                self._reset(again, [starts[i] for i in again.tolist()])
        rollout = _clear_invalid(Experience.stack(chunks), torch.stack(valid))
        self.starts.learn(rollout)
        return rollout

    # -- steps ----------------------------------------------------------------------------------------------------

    def _take_weights(self) -> None:
        newer = self.weights.newest(after=self.policy_version)
        if newer is not None:
            self.policy_version, tensors = newer
            load_weights(self.policy, tensors)

    def _reset(self, env_ids: Tensor, starts: Sequence[StartState]) -> None:
        self._observation = None
        with self.timer.section("simulate"):
            self.env.reset(env_ids.tolist(), start=starts)
        self.task[env_ids] = torch.tensor([start.task for start in starts])
        begun = torch.zeros_like(self.task, dtype=torch.bool)
        begun[env_ids] = True
        self._state = self._initial_state.where(begun, self._state)

    def _observe(self, env_ids: Tensor) -> Observation:
        with self.timer.section("render"):
            return self.env.observe(None if len(env_ids) == self.env.spec.num_envs else env_ids.tolist())

    @torch.no_grad()
    def _decide(self, env_ids: Tensor) -> Decision:
        obs, self._observation = self._observation, None
        if obs is None:
            obs = self._observe(env_ids)
        with self.timer.section("infer"):
            context, state = self.policy.encode(obs, self._state[env_ids])
            self._state = put(state, env_ids, self._state)
            sample = self.policy.sample(context, self.generator)
            return Decision(inputs=self.policy.store(context), sample=sample, value=self._value(context))

    def _value(self, context: TensorDataclass) -> Tensor:
        features = self.policy.value_features(context)
        return self.critic.predict(features) if self.critic is not None else features.new_zeros(len(features))

    @torch.no_grad()
    def _value_of(self, obs: Observation, env_ids: Tensor) -> Tensor:
        with self.timer.section("infer"):
            return self._value(self.policy.encode(obs, self._state[env_ids])[0])

    def _truncated_values(self, chunk: ChunkStep) -> Tensor:
        """V of the true successor where time ran out; these environments are observed before they are reset."""
        values = torch.zeros_like(chunk.reward)
        env_ids = (chunk.truncated & ~chunk.terminated & chunk.valid).nonzero().flatten()
        if len(env_ids):
            values[env_ids] = self._value_of(self._observe(env_ids), env_ids)
        return values

    def _execute(self, action: Tensor) -> ChunkStep:
        with self.timer.section("simulate"):
            return step_chunk(self.env, action, self.gamma)

    def _experience(self, decision: Decision, chunk: ChunkStep) -> Experience:
        return Experience(
            inputs=decision.inputs,
            trace=decision.sample.trace,
            log_prob=decision.sample.log_prob,
            value=decision.value,
            next_value=torch.zeros_like(decision.value),
            reward=chunk.reward,
            num_executed=chunk.num_executed,
            terminated=chunk.terminated,
            truncated=chunk.truncated & ~chunk.terminated,
            success=chunk.success,
            valid=chunk.valid,
            task=self.task.clone(),
            policy_version=torch.full_like(chunk.num_executed, self.policy_version),
            actor=torch.where(chunk.intervened, HUMAN, POLICY),
        )


def _clear_invalid(rollout: Experience, valid: Tensor) -> Experience:
    """``rollout`` with rewards, lengths and outcomes cleared where it is not valid."""
    return dataclasses.replace(
        rollout,
        reward=torch.where(valid, rollout.reward, 0.0),
        num_executed=torch.where(valid, rollout.num_executed, 0),
        terminated=rollout.terminated & valid,
        success=rollout.success & valid,
        valid=valid,
    )


def scatter(record: R, env_ids: Tensor, num_envs: int) -> R:
    """``record`` placed at ``env_ids`` among ``num_envs`` environments, zeros elsewhere."""
    return record.map(lambda tensor: tensor.new_zeros(num_envs, *tensor.shape[1:]).index_copy(0, env_ids, tensor))


def put(record: R, env_ids: Tensor, into: R) -> R:
    """``into`` with its entries at ``env_ids`` replaced by ``record``."""
    flat = iter(record.tensors())
    return into.map(lambda tensor: tensor.index_copy(0, env_ids, next(flat)))
