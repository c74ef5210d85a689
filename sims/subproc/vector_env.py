"""A VectorEnv whose simulators run in worker processes, in parallel, and are replaced when they fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sims.chunk import ChunkStep
from sims.errors import UserError
from sims.subproc.image_slots import ImageSlots
from sims.subproc.single_env import SimulatorClass, SingleSpec, reward_fingerprint
from sims.subproc.worker_config import WorkerPoolConfig
from sims.subproc.worker_group import WorkerFailure, WorkerGroup
from sims.vector_env import EnvSpec, Observation, StartState, Step, encode_instructions

TERMINATED, TRUNCATED = 0, 1  # rows of ``SharedMemory.flags``
FAILED = np.array([[False], [True], [False]])  # terminated, truncated, success; also before the first reset
FLAGS = ("terminated", "truncated", "success", "intervened", "valid")  # of Step and ChunkStep
OBSERVE_EVERY_STEP_AFTER = 2  # this many consecutive steps that were each followed by an observation


class SubprocVectorEnv:
    """One simulator per process and environment.

    A worker executes a whole chunk by itself and observes at its end: a chunk costs one exchange of messages, and
    environments do not wait for one another between steps. A worker that crashes, raises or exceeds its time-out is
    killed and replaced while the others continue; its chunk comes back invalid and truncated, and ``failures`` has the
    reason.

    A caller that observes after every single step would need two exchanges per step. After two such steps the workers
    observe together with the step; the first step that is not followed by an observation ends that.
    """

    def __init__(self, config: WorkerPoolConfig, simulator: SimulatorClass) -> None:
        """Raises UserError when the configuration is wrong or the simulator does not start."""
        missing = [name for name in ("num_envs", "latency", "workers") if not hasattr(config, name)]
        if missing:
            raise UserError(f"{type(config).__name__} lacks {', '.join(missing)}; see docs/simulators/process_pool.md")
        n = config.num_envs
        self.config, self.workers = config, config.workers
        self._group = WorkerGroup(config, simulator)
        assert self._group.memory is not None
        self._memory = self._group.memory
        single = self._memory.spec
        self.spec = vector_spec(single, n, torch.device("cpu"), **reward_fingerprint(config))
        self._task_instructions = encode_instructions(single.task_instructions)
        self._demonstrates = self._group.workers[0].demonstrates  # a worker that replaces it has not said so at once
        self._starts = [StartState(task=0, seed=0)] * n
        self._instructions = self._task_instructions[[0] * n]  # handed out without a copy: replaced, never changed
        self._all_ids = list(range(n))
        self._flags = np.tile(FAILED, n)
        self._failed = np.zeros(n, dtype=bool)  # the worker failed in the present episode
        self._slots = ImageSlots(self._memory.images)
        self._steps_since_observation = 0
        self._steps_with_observation = 0  # consecutive single steps, each followed by an observation

    @property
    def failures(self) -> Sequence[WorkerFailure]:
        return tuple(self._group.failures)

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._group.workers]

    @property
    def fork_server_pid(self) -> int:
        return self._group.server.pid

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        waiting = dict(zip(self.spec.ids(env_ids), start, strict=True))
        for env_id, state in waiting.items():
            self._write_start(env_id, state)
        self._fail(list(waiting))  # until its worker answers; also where that raises
        self._slots.invalidate(list(waiting))
        for env_id in [env_id for env_id, state in waiting.items() if _is_failed(state)]:
            self._starts[env_id] = waiting.pop(env_id)
        while waiting:
            self._group.make_ready(waiting)
            answered = self._group.ask(list(waiting), "reset", timeout_s=self.workers.reset_timeout_s)
            for env_id in answered:
                self._starts[env_id] = waiting.pop(env_id)
            self._failed[answered] = False
            self._flags[:, answered] = self._memory.flags[:, answered]
        self._instructions = self._task_instructions[[start.task for start in self._starts]]

    def step(self, action: Float[Tensor, "N A"]) -> Step:
        no_cameras = not self.spec.cameras  # then observing now costs less than a second exchange later
        if self._steps_since_observation:
            self._steps_with_observation = 0
        self._steps_since_observation += 1
        observe = no_cameras or self._steps_with_observation >= OBSERVE_EVERY_STEP_AFTER
        reward = self._execute(action[:, None], gamma=1.0, observe=observe)
        return Step(reward=reward, **self._step_flags())

    def advance(self, actions: Float[Tensor, "N H A"], gamma: float) -> ChunkStep:
        """A whole chunk (sims/chunk.py); the next ``observe`` returns what the workers observed at its end."""
        self._steps_since_observation = self._steps_with_observation = 0
        before = self._memory.elapsed.copy()
        reward = self._execute(actions, gamma=gamma, observe=True)
        executed = np.where(self._failed, 0, self._memory.elapsed - before)
        return ChunkStep(reward=reward, num_executed=torch.from_numpy(executed), **self._step_flags())

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """Zeros for an environment whose worker fails during this; its next step is not valid."""
        self._steps_with_observation += self._steps_since_observation == 1
        self._steps_since_observation = 0
        slots = self._slots
        if slots.common is None:
            self._update_images(self.spec.ids(env_ids))
        if env_ids is None and slots.common is not None:
            images, state = slots.lend_or_copy(slots.common), self._memory.state.copy()
            instruction = self._instructions
        else:
            ids = self.spec.ids(env_ids)
            images, state, instruction = slots.copy_of(ids), self._memory.state[ids], self._instructions[ids]
            failed = ~slots.current[ids]
            images[failed], state[failed] = 0, 0
        return Observation(images=torch.from_numpy(images), state=torch.from_numpy(state), instruction=instruction)

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        """The snapshot is all actions since the start; replaying them restores a deterministic simulator.

        Where the worker failed nothing can be replayed: the snapshot is empty, [0, 0], and restores an environment that
        has failed, truncated and not valid.
        """
        return tuple(
            dataclasses.replace(self._starts[env_id], snapshot=self._snapshot(env_id))
            for env_id in self.spec.ids(env_ids)
        )

    def _snapshot(self, env_id: int) -> Float[np.ndarray, "steps A"]:
        actions = self._memory.actions[env_id, : self._memory.elapsed[env_id]]
        return (actions[:0, :0] if self._failed[env_id] else actions).copy()

    def expert(self, *, noise: float, seed: int) -> PoolExpert:
        """The simulator's own scripted expert. UserError if it has none."""
        if not self._demonstrates:
            raise UserError(
                f"{self.spec.name} comes without a scripted demonstrator. Record or import demonstrations and name "
                "their store in the configuration (start.store)."
            )
        return PoolExpert(self, noise=noise, generator=torch.Generator().manual_seed(seed))

    def suggestions(self) -> Float[Tensor, "N A"]:
        """The scripted expert's next action in every environment; zeros where the episode has finished."""
        running = self._running()
        out = np.zeros_like(self._memory.suggestion)
        answered = self._ask(running, "demonstrate") if running else []
        out[answered] = self._memory.suggestion[answered]
        return torch.from_numpy(out)

    def close(self) -> None:
        self._group.close()

    # -- internals ------------------------------------------------------------------------------------------------

    def _update_images(self, env_ids: Sequence[int]) -> None:
        """Let those of ``env_ids`` observe whose images are outdated."""
        outdated = [env_id for env_id in env_ids if not self._slots.current[env_id] and not self._failed[env_id]]
        if outdated:
            slot = self._slots.free()
            self._slots.written(self._ask(outdated, "observe", slot=slot), slot)

    def _running(self) -> list[int]:
        """Environments whose episode has not finished."""
        finished = self._flags[TERMINATED] | self._flags[TRUNCATED]
        return np.flatnonzero(~finished).tolist() if finished.any() else self._all_ids

    def _step_flags(self) -> dict[str, Tensor]:
        """The present flags of Step and ChunkStep."""
        flags = np.zeros((5, len(self._failed)), dtype=bool)
        flags[:3], flags[4] = self._flags, ~self._failed
        return dict(zip(FLAGS, torch.from_numpy(flags).unbind(), strict=True))

    def _write_start(self, env_id: int, start: StartState) -> None:
        if not 0 <= start.task < len(self.spec.tasks):
            raise ValueError(f"start names task {start.task}, {self.spec.name} has {len(self.spec.tasks)}")
        count = 0 if start.snapshot is None else len(start.snapshot)
        if start.snapshot is not None and count:
            self._memory.actions[env_id, :count] = start.snapshot
        self._memory.start[env_id] = start.task, start.seed, count

    def _ask(self, env_ids: Sequence[int], do: str, **arguments: Any) -> Sequence[int]:
        """The environments that answered; the episodes of the others are truncated and invalid."""
        answered = self._group.ask(env_ids, do, timeout_s=self.workers.step_timeout_s, **arguments)
        if len(answered) == len(env_ids):
            return answered
        failed = sorted(set(env_ids) - set(answered))
        running = [env_id for env_id in failed if not self._flags[:, env_id].any()]  # a finished episode stays valid
        self._fail(running)
        return answered

    def _fail(self, env_ids: Sequence[int]) -> None:
        """Their episodes end truncated and invalid."""
        self._failed[env_ids] = True
        self._flags[:, env_ids] = FAILED

    def _execute(self, actions: Tensor, *, gamma: float, observe: bool) -> Float[Tensor, " N"]:
        """The rewards of a chunk [N, H, A]; updates the flags and which images are current."""
        running, memory, n = self._running(), self._memory, self.spec.num_envs
        if not running:
            return torch.zeros(n)
        values, elapsed = actions.detach().to("cpu", torch.float32).numpy(), memory.elapsed.tolist()
        horizon, max_steps = values.shape[1], memory.actions.shape[1]
        for env_id in running:
            end = min(elapsed[env_id] + horizon, max_steps)
            memory.actions[env_id, elapsed[env_id] : end] = values[env_id, : end - elapsed[env_id]]
        slot = self._slots.free() if observe else None
        answered = self._ask(running, "advance", count=horizon, gamma=gamma, observe=slot)
        self._slots.invalidate(running)
        if len(answered) == n:  # the common case without index arrays, which are slow in numpy
            reward, self._flags[:] = memory.reward.copy(), memory.flags
        else:
            reward = np.zeros(n, dtype=np.float32)
            reward[answered], self._flags[:, answered] = memory.reward[answered], memory.flags[:, answered]
        if slot is not None:
            ended = self._flags[TERMINATED]
            self._slots.written([i for i in answered if not ended[i]] if ended.any() else answered, slot)
        return torch.from_numpy(reward)


class PoolExpert:
    """A simulator's scripted expert, with Gaussian noise of standard deviation ``noise`` on every action."""

    def __init__(self, pool: SubprocVectorEnv, *, noise: float, generator: torch.Generator) -> None:
        self.pool, self.noise, self.generator = pool, noise, generator

    def act(self) -> Float[Tensor, "N A"]:
        action = self.pool.suggestions()
        noise = torch.randn(action.shape, generator=self.generator)
        return (action + self.noise * noise).clamp(-1.0, 1.0)


def _is_failed(start: StartState) -> bool:
    """Whether ``SubprocVectorEnv.capture`` was called where the worker had failed."""
    return start.snapshot is not None and not start.snapshot.shape[1]


def vector_spec(single: SingleSpec, num_envs: int, device: torch.device, **fingerprint: str) -> EnvSpec:
    """Of ``num_envs`` such environments on ``device``; ``fingerprint``: what is added to that of one."""
    fields = {field.name: getattr(single, field.name) for field in dataclasses.fields(single)}
    del fields["instructions"]
    fields["fingerprint"] = {**single.fingerprint, **fingerprint}
    return EnvSpec(**fields, num_envs=num_envs, device=device)
