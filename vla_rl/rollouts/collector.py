"""Chunked rollouts of a policy in any VectorEnv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.policy import ActionSample, Policy
from sims.chunk import ChunkStep, step_chunk
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, StartState, VectorEnv
from vla_rl.critics.value import ValueCritic
from vla_rl.rollouts.rollout import Rollout
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.runs.metrics import Timer


@dataclass(frozen=True, kw_only=True)
class Look(TensorDataclass):
    """What the policy saw, what it drew and what the critic thought of it."""

    inputs: TensorDataclass
    sample: ActionSample
    value: Tensor


def scatter(rows: TensorDataclass, index: Tensor, num_rows: int) -> TensorDataclass:
    """``rows`` placed at ``index`` among ``num_rows`` rows, zeros elsewhere."""

    def place(tensor: Tensor) -> Tensor:
        if len(tensor) == num_rows:
            return tensor
        out = tensor.new_zeros(num_rows, *tensor.shape[1:])
        out[index] = tensor
        return out

    return rows.map(place)


class Collector:
    """Acts with ``policy`` in ``env`` and keeps what learning needs.

    ``keep_context``: keep the encoded context (the encoder is frozen) instead of the observation.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        *,
        critic: ValueCritic | None,
        gamma: float,
        keep_context: bool,
        generator: torch.Generator,
        timer: Timer,
    ) -> None:
        self.env, self.policy, self.critic = env, policy, critic
        self.gamma, self.keep_context, self.generator, self.timer = gamma, keep_context, generator, timer
        self.task = torch.zeros(env.spec.num_envs, dtype=torch.int64)
        self.policy_version = 0
        self._shown: Observation | None = None  # what every row shows now, where that is known already

    # -- continuing rollouts (PPO) --------------------------------------------------------------------------------

    def start(self, starts: Sequence[StartState]) -> None:
        """Begin an episode in every row; call before the first ``collect``."""
        self._reset(range(self.env.spec.num_envs), starts)

    def collect(self, num_chunks: int, starts: TrainingStarts) -> Rollout:
        """``num_chunks`` chunks of every row; a row that ends goes on with the next of ``starts``."""
        looks, chunks, tasks, final_values = [], [], [], []
        everything = torch.arange(self.env.spec.num_envs)
        for _ in range(num_chunks):
            look = self._look(everything)
            chunk = self._execute(look.sample.action)
            looks.append(look)
            chunks.append(chunk)
            tasks.append(self.task.clone())
            final_values.append(self._truncated_values(chunk))
            ended = chunk.done.nonzero().flatten().tolist()
            if ended:
                self._reset(ended, starts.take(len(ended)))
        self._shown = self._observe(everything)
        last = self._value_of(self._shown)
        values = [look.value for look in looks]
        next_value = torch.stack(
            [
                torch.where(chunk.truncated, final, following)
                for chunk, final, following in zip(chunks, final_values, [*values[1:], last], strict=True)
            ]
        )
        valid = torch.stack([chunk.valid for chunk in chunks])
        # A chunk whose world failed has no advantage and passes none back: delta = 0, and the episode is cut there.
        next_value = torch.where(valid, next_value, torch.stack(values))
        return self._rollout(looks, chunks, tasks, next_value, valid)

    # -- whole episodes (GRPO, evaluation) ------------------------------------------------------------------------

    def episodes(self, starts: Sequence[StartState]) -> Rollout:
        """One episode per row, each to its end: [T, N] with T of the longest; rows that ended are not valid."""
        num_envs = self.env.spec.num_envs
        self._reset(range(num_envs), starts)
        alive = torch.ones(num_envs, dtype=torch.bool)
        looks, chunks, tasks, valid = [], [], [], []
        while alive.any():
            rows = alive.nonzero().flatten()
            look = scatter(self._look(rows), rows, num_envs)
            assert isinstance(look, Look)
            chunk = self._execute(look.sample.action)
            looks.append(look)
            chunks.append(chunk)
            tasks.append(self.task.clone())
            valid.append(alive & chunk.valid)
            failed = alive & ~chunk.valid
            alive = alive & (~chunk.done | failed)
            if failed.any():  # the world broke: its episode starts again, what came of it so far is data of nothing
                again = failed.nonzero().flatten().tolist()
                valid = [row & ~failed for row in valid]
                self._reset(again, [starts[row] for row in again])
        return self._rollout(looks, chunks, tasks, torch.zeros(len(looks), num_envs), torch.stack(valid))

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _reset(self, rows: Sequence[int], starts: Sequence[StartState]) -> None:
        self._shown = None
        with self.timer.section("simulate"):
            self.env.reset(list(rows), start=starts)
        self.task[list(rows)] = torch.tensor([start.task for start in starts])

    def _observe(self, rows: Tensor) -> Observation:
        with self.timer.section("render"):
            return self.env.observe(None if len(rows) == self.env.spec.num_envs else rows.tolist())

    @torch.no_grad()
    def _look(self, rows: Tensor) -> Look:
        obs, self._shown = self._shown or self._observe(rows), None
        with self.timer.section("infer"):
            context = self.policy.encode(obs)
            sample = self.policy.sample(context, self.generator)
            return Look(inputs=context if self.keep_context else obs, sample=sample, value=self._value(context))

    def _value(self, context: TensorDataclass) -> Tensor:
        features = self.policy.value_features(context)
        return self.critic.predict(features) if self.critic is not None else features.new_zeros(len(features))

    @torch.no_grad()
    def _value_of(self, obs: Observation) -> Tensor:
        with self.timer.section("infer"):
            return self._value(self.policy.encode(obs))

    def _truncated_values(self, chunk: ChunkStep) -> Tensor:
        """V of the true successor where time ran out; those rows are looked at before they are reset."""
        values = torch.zeros_like(chunk.reward)
        rows = (chunk.truncated & ~chunk.terminated & chunk.valid).nonzero().flatten()
        if len(rows):
            values[rows] = self._value_of(self._observe(rows))
        return values

    def _execute(self, action: Tensor) -> ChunkStep:
        with self.timer.section("simulate"):
            return step_chunk(self.env, action, self.gamma)

    def _rollout(
        self, looks: list[Look], chunks: list[ChunkStep], tasks: list[Tensor], next_value: Tensor, valid: Tensor
    ) -> Rollout:
        look, chunk = Look.stack(looks), ChunkStep.stack(chunks)
        return Rollout(
            inputs=look.inputs,
            path=look.sample.path,
            log_prob=look.sample.log_prob,
            reward=torch.where(valid, chunk.reward, 0.0),
            num_executed=torch.where(valid, chunk.num_executed, 0),
            terminated=chunk.terminated & valid,
            truncated=chunk.truncated & ~chunk.terminated,
            success=chunk.success & valid,
            valid=valid,
            value=look.value,
            next_value=next_value,
            task=torch.stack(tasks),
            policy_version=torch.full_like(chunk.num_executed, self.policy_version),
        )
