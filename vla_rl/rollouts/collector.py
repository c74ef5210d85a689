"""Chunked rollouts of a policy in any VectorEnv."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from episodes.schema import HUMAN, POLICY
from policies.device import make_generator, restore_generator
from policies.policy import ActionSample, Policy
from sims.chunk import ChunkStep, step_chunk
from sims.devices.crossing import crossing
from sims.devices.env_on_device import on_device
from sims.numbers.finite import check_finite, check_observation
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import EnvSpec, Observation, StartState, VectorEnv
from vla_rl.critics.value import ValueCritic
from vla_rl.rollouts.experience import Experience, clear_invalid, index_of
from vla_rl.rollouts.shard import WHOLE, Shard
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.rollouts.timer import Timer
from vla_rl.rollouts.under_way import EpisodesUnderWay
from vla_rl.rollouts.weights import load_weights

R = TypeVar("R", bound=TensorDataclass)
Offset = Callable[[int], Float[Tensor, "N H A"] | None]


def unchanged(ahead: int) -> None:
    """The Offset of actions as the policy chooses them."""


@dataclass(frozen=True, kw_only=True)
class Decision(TensorDataclass):
    """What the policy chose in each environment, what it saw (``Policy.store``) and the critic's value."""

    inputs: TensorDataclass
    sample: ActionSample
    value: Tensor


@dataclass(frozen=True, kw_only=True)
class ActedChunk:
    """One chunk of every environment. ``action``: as it was executed.

    ``timed_out``: where the time limit ended the episode, and ``final`` what the policy stored of its true successor.
    ``cut_off``: where this chunk begins an episode although the one before had not ended, since the environment cannot
    be captured.
    """

    experience: Experience
    action: Float[Tensor, "N H A"]
    timed_out: list[int]
    final: TensorDataclass | None
    cut_off: list[int]

    @classmethod
    def side_by_side(cls, parts: Sequence[ActedChunk]) -> ActedChunk:
        """The environments of several as one."""
        firsts = list(accumulate((len(part.experience) for part in parts), initial=0))[:-1]
        finals = [part.final for part in parts if part.final is not None]
        return cls(
            experience=Experience.cat([part.experience for part in parts]),
            action=torch.cat([part.action for part in parts]),
            timed_out=[first + i for first, part in zip(firsts, parts, strict=True) for i in part.timed_out],
            final=type(finals[0]).cat(finals) if finals else None,
            cut_off=[first + i for first, part in zip(firsts, parts, strict=True) for i in part.cut_off],
        )


class Collector:
    """Acts with ``policy`` in ``env``: rollouts, the starts that they take, and all random state of acting.

    Rollouts stay on the policy's device. Once per chunk the host learns which episodes ended and says where the next
    ones start; observations and actions cross only where the environment is on another device. Before each rollout it
    takes newer weights, if any were published. ``kept``: records that the algorithm keeps together.
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
        kept: int = 0,
        shard: Shard = WHOLE,
    ) -> None:
        self.device = policy.device
        self.env = on_device(env, self.device)
        self.policy, self.critic, self.gamma, self.kept = policy, critic, gamma, kept
        self.timer, self.policy_version = Timer(), 0
        self._published: tuple[int, Mapping[str, Tensor]] = 0, {}  # the newest, by reference
        self.starts = TrainingStarts(
            seed=seed, num_tasks=len(env.spec.tasks), failure_weight=failure_weight, shard=shard
        )
        self.generator = make_generator(self.device, shard.seed(seed, "exploration"))
        self.num_envs = num_envs = env.spec.num_envs
        self.task = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._all = torch.arange(num_envs, device=self.device)
        self._all_ids = list(range(num_envs))
        self._initial_state = policy.initial_state(num_envs)
        self._state = self._initial_state
        self._observation: Observation | None = None  # of all environments, where it is already known
        self._under_way = EpisodesUnderWay(num_envs)  # of ``complete_groups``
        self._cut_off: list[int] = []  # of ``act_chunk``
        self.start(self.starts.take(num_envs))

    # -- exact state ----------------------------------------------------------------------------------------------

    def start(self, starts: Sequence[StartState]) -> None:
        """Begin an episode in every environment."""
        self._reset(self._all_ids, starts)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Lends the environment to somebody else; afterwards the episodes go on, or new ones begin."""
        held = self._capture()
        yield
        self._resume(held)

    def state_dict(self) -> dict[str, Any]:
        held = self._capture()
        under_way = {"under_way": self._under_way.state_dict()} if held is not None and self._under_way.begun else {}
        return {
            "policy_version": self.policy_version,
            "generator": self.generator.get_state(),
            "starts": self.starts.state_dict(),
            "episodes": None if held is None else [asdict(start) for start in held[0]],
            "policy_state": [tensor.clone() for tensor in self._state.tensors()],
        } | under_way

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy_version = state["policy_version"]
        restore_generator(self.generator, state["generator"])
        self.starts.load_state_dict(state["starts"])
        if state["episodes"] is None:
            self._resume(None)
            return
        held = self._state.with_tensors(state["policy_state"])
        self._resume(([StartState(**start) for start in state["episodes"]], held))
        self._under_way = EpisodesUnderWay(self.num_envs)
        if "under_way" in state:
            self._under_way.load_state_dict(state["under_way"])

    def _capture(self) -> tuple[Sequence[StartState], TensorDataclass] | None:
        """The episodes under way and the policy's memory of them; None where the environment cannot capture."""
        with crossing("checkpoint"):
            return (self.env.capture(), self._state) if self.env.spec.can_capture else None

    def _resume(self, held: tuple[Sequence[StartState], TensorDataclass] | None) -> None:
        if held is None:
            self._under_way, self._cut_off = EpisodesUnderWay(self.num_envs), self._all_ids
            self.start(self.starts.take(self.env.spec.num_envs))
            return
        self.start(held[0])
        self._state = held[1]

    # -- continuing rollouts (PPO) --------------------------------------------------------------------------------

    def collect(self, num_chunks: int) -> Experience:
        """``num_chunks`` chunks of every environment [T, N]; where an episode ends the next one begins."""
        self._plan(num_chunks)
        chunks, final_values = [], []
        for _ in range(num_chunks):
            decision = self._decide(self._all_ids)
            chunk = self._execute(decision.sample.action)
            chunks.append(self._experience(decision, chunk))
            done, timed_out = _on_host(chunk.done, chunk.truncated & ~chunk.terminated & chunk.valid)
            final_values.append(self._values_at(_indices(timed_out), like=chunk.reward))
            if ended := _indices(done):
                self._reset(ended, self.starts.take(len(ended)))
        last = self._observe(self._all_ids)
        self._observation = last if self.env.spec.can_capture else None  # on a robot time goes on while others learn
        rollout = Experience.stack(chunks)
        rollout = clear_invalid(rollout, rollout.valid)
        following = torch.cat([rollout.value[1:], self._value_of(last, self._all_ids)[None]])
        next_value = torch.where(rollout.truncated, torch.stack(final_values), following)
        # Where the simulator failed: delta = 0, and the accumulation stops.
        rollout = dataclasses.replace(rollout, next_value=torch.where(rollout.valid, next_value, rollout.value))
        self._check(rollout)
        self.starts.learn(rollout)
        return rollout

    # -- chunk by chunk (off-policy) --------------------------------------------------------------------------------

    def act(self, offset: Offset = unchanged) -> ActedChunk:
        return self.act_chunk(offset(0))

    def act_chunk(self, offset: Float[Tensor, "N H A"] | None) -> ActedChunk:
        """One chunk in every environment; where an episode ends the next begins.

        ``offset`` is added to what the policy chose, which stays within [-1, 1].
        """
        self.policy.plan_storage(self.kept, in_host=True)
        self._take_weights()
        decision = self._decide(self._all_ids)
        action = decision.sample.action if offset is None else (decision.sample.action + offset).clamp(-1, 1)
        chunk = self._execute(action)
        experience = self._experience(decision, chunk)
        done, timed_out = _on_host(chunk.done, chunk.truncated & ~chunk.terminated & chunk.valid)
        final_ids = _indices(timed_out)
        final = self._stored_of(final_ids) if final_ids else None
        if ended := _indices(done):
            self._reset(ended, self.starts.take(len(ended)))
        check_finite("reward", torch.where(chunk.valid, chunk.reward, 0.0), ("environment",))
        experience = clear_invalid(experience, chunk.valid)
        self.starts.learn(experience)
        cut_off, self._cut_off = self._cut_off, []
        return ActedChunk(experience=experience, action=action, timed_out=final_ids, final=final, cut_off=cut_off)

    @torch.no_grad()
    def _stored_of(self, env_ids: Sequence[int]) -> TensorDataclass:
        obs = self._observe(env_ids)
        with self.timer.section("infer"):
            return self.policy.store(self.policy.encode(obs, self._state[self._index(env_ids)])[0])

    # -- whole episodes (GRPO) ------------------------------------------------------------------------------------

    def episodes(self, starts: Sequence[StartState]) -> Experience:
        """One episode per environment, each to its end: [T, N], T of the longest; after an end ``valid`` is False."""
        self._plan(chunks_of_longest(self.env.spec, self.policy.spec.action_horizon))
        under_way = EpisodesUnderWay(self.num_envs)
        self._begin(under_way, self._all_ids, starts)
        while under_way.alive.any():
            self._advance(under_way)
        return self._learned(under_way.take(self._all_ids, 1))

    def complete_groups(self, take: Callable[[int], Sequence[StartState]], *, size: int, share: float) -> Experience:
        """Groups of ``size`` neighbors that share a start, as soon as a ``share`` of all are complete: [T, N] of these.

        The others go on in the next call, from the chunk that they have come to and by the weights that there are then:
        each chunk has its own ``policy_version`` (Zhou et al. 2025, APRIL, arXiv:2509.18521). ``take``: starts of so
        many new groups. Where the environment cannot capture, a state that is loaded has no groups under way.
        """
        self._plan(chunks_of_longest(self.env.spec, self.policy.spec.action_horizon))
        under_way, free = self._under_way, self._under_way.groups(size, complete=False)
        env_ids = [env_id for g in free for env_id in range(g * size, (g + 1) * size)]
        self._begin(under_way, env_ids, [start for start in take(len(free)) for _ in range(size)])
        while len(complete := under_way.groups(size, complete=True)) < share * (self.num_envs // size):
            self._advance(under_way)
        return self._learned(under_way.take(complete, size))

    def _plan(self, num_chunks: int) -> None:
        """Before a rollout of so many chunks, which is all that is kept where the algorithm named no more."""
        self.policy.plan_storage(max(self.kept, num_chunks * self.num_envs))
        self._take_weights()

    def _begin(self, under_way: EpisodesUnderWay, env_ids: Sequence[int], starts: Sequence[StartState]) -> None:
        self._reset(env_ids, starts)
        under_way.begin(env_ids, starts)

    def _advance(self, under_way: EpisodesUnderWay) -> None:
        """One chunk in the environments that are alive."""
        running = _indices(under_way.alive)
        decision = scatter(self._decide(running), self._index(running), self.num_envs)
        chunk = self._execute(decision.sample.action)
        again = under_way.add(self._experience(decision, chunk), *_on_host(chunk.done, chunk.valid))
        if again:
            self._reset(again, [start for i in again if (start := under_way.starts[i]) is not None])

    def _learned(self, rollout: Experience) -> Experience:
        self._check(rollout)
        self.starts.learn(rollout)
        return rollout

    def _check(self, rollout: Experience) -> None:
        """Raises NotFinite where a reward, log-prob or value of ``rollout`` [T, N] is not finite."""
        axes = ("chunk", "environment", "denoising step", "step", "dimension")
        weights = {"policy weight": self.policy, "critic weight": self.critic}
        check_finite("reward", rollout.reward, axes)
        for name in ("log_prob", "value", "next_value"):
            check_finite(name, getattr(rollout, name), axes, suspects=weights)

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Act with these weights (``named_weights``) from the next rollout on."""
        self._published = version, tensors

    def close(self) -> None:
        """The environment belongs to the caller: nothing is open."""

    # -- steps ----------------------------------------------------------------------------------------------------

    def _take_weights(self) -> None:
        """Act with the newest weights from now on."""
        version, tensors = self._published
        if version > self.policy_version:
            with self.timer.section("sync"):
                self.policy_version = version
                load_weights(self.policy, self.critic, tensors)

    def _reset(self, env_ids: Sequence[int], starts: Sequence[StartState]) -> None:
        self._observation = None
        with self.timer.section("simulate"), crossing("starts"):
            self.env.reset(env_ids, start=starts)
        index = self._index(env_ids)
        with crossing("starts"):
            self.task[index] = torch.tensor([start.task for start in starts]).to(self.device)
        begun = torch.zeros_like(self.task, dtype=torch.bool).index_fill(0, index, True)
        self._state = self._initial_state.where(begun, self._state)

    def _observe(self, env_ids: Sequence[int]) -> Observation:
        with self.timer.section("render"):
            obs = self.env.observe(None if len(env_ids) == self.env.spec.num_envs else env_ids)
        check_observation(obs, env_ids, self.env.spec.name)
        return obs

    def _index(self, env_ids: Sequence[int]) -> Int[Tensor, " n"]:
        """These environments, as an index on the device."""
        if len(env_ids) == self.env.spec.num_envs:
            return self._all
        with crossing("starts"):
            return torch.tensor(env_ids).to(self.device)

    @torch.no_grad()
    def _decide(self, env_ids: Sequence[int]) -> Decision:
        obs, self._observation = self._observation, None
        if obs is None:
            obs = self._observe(env_ids)
        index = self._index(env_ids)
        with self.timer.section("encode"):
            context, state = self.policy.encode(obs, self._state[index])
            self._state = put(state, index, self._state)
        with self.timer.section("infer"):
            sample = self.policy.sample(context, self.generator)
            axes = ("decision", "step", "dimension")
            check_finite("action", sample.action, axes, suspects={"policy weight": self.policy})
            return Decision(inputs=self.policy.store(context), sample=sample, value=self._value(context))

    def _value(self, context: TensorDataclass) -> Tensor:
        features = self.policy.value_features(context)
        return self.critic.predict(features) if self.critic is not None else features.new_zeros(len(features))

    @torch.no_grad()
    def _value_of(self, obs: Observation, env_ids: Sequence[int]) -> Tensor:
        with self.timer.section("encode"):
            return self._value(self.policy.encode(obs, self._state[self._index(env_ids)])[0])

    def _values_at(self, env_ids: Sequence[int], *, like: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """V of the true successor where time ran out, ``env_ids``, which are observed before they are reset; else 0."""
        values = torch.zeros_like(like)
        if env_ids:
            values[self._index(env_ids)] = self._value_of(self._observe(env_ids), env_ids)
        return values

    def _execute(self, action: Tensor) -> ChunkStep:
        with self.timer.section("simulate"):
            chunk = step_chunk(self.env, action, self.gamma)
        void = self.policy.forget_plan(self._state)
        if void is not self._state:
            self._state = void.where(chunk.intervened, self._state)
        return chunk

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
            true_success=chunk.true_success,
        )


def chunks_of_longest(env: EnvSpec, action_horizon: int) -> int:
    """Of an episode that ends by the time limit."""
    return -(-env.max_steps // action_horizon)


def _on_host(*flags: Bool[Tensor, " N"]) -> tuple[Tensor, ...]:
    """``flags`` on the host, in one transfer."""
    with crossing("outcomes"):
        return torch.stack(flags).cpu().unbind()


def _indices(flags: Bool[Tensor, " N"]) -> list[int]:
    """Where ``flags``, on the host, are True."""
    return flags.nonzero().flatten().tolist()


def scatter(record: R, env_ids: Tensor, num_envs: int) -> R:
    """``record`` placed at ``env_ids`` among ``num_envs`` environments, zeros elsewhere."""
    return record.map(
        lambda tensor: tensor.new_zeros(num_envs, *tensor.shape[1:]).index_copy(0, index_of(tensor, env_ids), tensor)
    )


def put(record: R, env_ids: Tensor, into: R) -> R:
    """``into`` with its entries at ``env_ids`` replaced by ``record``."""
    flat = iter(record.tensors())
    return into.map(lambda tensor: tensor.index_copy(0, index_of(tensor, env_ids), next(flat)))
