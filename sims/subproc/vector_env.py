"""Simulators in worker processes behind one VectorEnv: parallel, isolated, and replaced when they die."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from sims.chunk import ChunkStep
from sims.errors import UserError
from sims.subproc.shared_memory import SLOTS
from sims.subproc.single_env import SingleEnv, SingleSpec
from sims.subproc.worker_group import PoolConfig, WorkerFailure, WorkerGroup
from sims.vector_env import EnvSpec, Observation, StartState, Step, encode_instructions

TERMINATED, TRUNCATED, SUCCESS = 0, 1, 2
OUTCOME = ("terminated", "truncated", "success", "intervened", "valid")  # of Step and ChunkStep
LENT_BYTES = 1 << 16  # a copy of less costs less than keeping account
STEADY = 2  # so many steps looked at one by one make the next look likely


class SubprocVectorEnv:
    """One simulator per process and row.

    A worker takes a whole chunk by itself and looks at its end, so a chunk costs one exchange and no row waits for
    another between steps. A worker that crashes, raises or exceeds its time-out is killed and started anew while the
    others go on; its chunk comes back invalid and truncated, ``failures`` tells what happened.

    A caller that looks after every step would pay two exchanges for each. After two such steps the pool expects another
    and lets the workers look along with the step; the first step that nobody looks at ends that.

    Pictures are not copied on their way to the caller. A look at all rows is lent: while the caller keeps it, the
    workers write into another of a few slots. Slot 0 is never lent; it is written, and copied, when all others are.
    """

    def __init__(self, config: PoolConfig, simulator: type[SingleEnv]) -> None:
        """Raises UserError when the configuration is wrong or the simulator does not start."""
        n = config.num_envs
        self.workers = config.workers
        self._group = WorkerGroup(config, simulator)
        assert self._group.memory is not None
        self._memory = self._group.memory
        single = self._memory.spec
        self.spec = _vector_spec(single, n)
        self._text = encode_instructions(single.tasks)
        self._starts = [StartState(task=0, seed=0)] * n
        self._words = self._text[[0] * n]  # what each row is asked to do; replaced, never changed
        self._everyone = list(range(n))
        self._flags = np.tile(np.array([[False], [True], [False]]), n)  # terminated, truncated, success
        self._lost = np.zeros(n, dtype=bool)  # the worker failed in the row's running episode
        self._fresh = np.zeros(n, dtype=bool)  # the memory shows the row as it is now
        self._slot = np.zeros(n, dtype=np.int64)  # where each row's last look lies
        self._together: int | None = None  # the slot where all rows lie, if they do and are fresh
        self._lent: set[int] = set()
        self._unseen = 0  # steps since anybody looked
        self._seen_in_a_row = 0  # steps that were looked at one by one

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
        waiting = dict(zip(self._rows(env_ids), start, strict=True))
        for row, state in waiting.items():
            self._write_start(row, state)
        while waiting:
            self._group.make_ready(waiting)
            answered = self._group.ask(list(waiting), "reset", timeout_s=self.workers.reset_timeout_s)
            for row in answered:
                self._starts[row] = waiting.pop(row)
            self._lost[answered] = self._fresh[answered] = False
            self._together = None
            self._flags[:, answered] = self._memory.flags[:, answered]
        self._words = self._text[[start.task for start in self._starts]]

    def step(self, action: Float[Tensor, "N A"]) -> Step:
        blind = not self.spec.cameras  # then looking costs less than asking for it later
        if self._unseen:
            self._seen_in_a_row = 0
        self._unseen += 1
        reward = self._execute(action[:, None], gamma=1.0, look=blind or self._seen_in_a_row >= STEADY)
        return Step(reward=reward, **self._outcome())

    def advance(self, actions: Float[Tensor, "N H A"], gamma: float) -> ChunkStep:
        """A whole chunk (sims/chunk.py); ``observe`` then hands out what the workers saw at its end."""
        self._unseen = self._seen_in_a_row = 0
        before = self._memory.elapsed.copy()
        reward = self._execute(actions, gamma=gamma, look=True)
        executed = np.where(self._lost, 0, self._memory.elapsed - before)
        return ChunkStep(reward=reward, num_executed=torch.from_numpy(executed), **self._outcome())

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """Zeros for a row whose worker fails at this; its next step says that it is not valid."""
        self._seen_in_a_row += self._unseen == 1
        self._unseen = 0
        if self._together is None:
            self._refresh(self._rows(env_ids))
        if env_ids is None and self._together is not None:
            images, state, text = self._lend_or_copy(self._together), self._memory.state.copy(), self._words
        else:
            rows = self._rows(env_ids)
            images, state = self._memory.images[self._slot[rows], rows], self._memory.state[rows]
            text, blank = self._words[rows], ~self._fresh[rows]
            images[blank], state[blank] = 0, 0
        return Observation(images=torch.from_numpy(images), state=torch.from_numpy(state), instruction=text)

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        """The snapshot is the actions since the start: running them again restores a deterministic simulator."""
        return tuple(
            StartState(
                task=self._starts[row].task,
                seed=self._starts[row].seed,
                snapshot=self._memory.actions[row, : self._memory.elapsed[row]].copy(),
            )
            for row in self._rows(env_ids)
        )

    def expert(self, *, noise: float, seed: int) -> PoolExpert:
        """The simulator's own demonstrator; UserError if it has none."""
        if not self._group.workers[0].demonstrates:
            raise UserError(
                f"{self.spec.name} comes without a scripted demonstrator. Record or import demonstrations and name "
                "their store in the configuration (start.store)."
            )
        return PoolExpert(self, noise=noise, generator=torch.Generator().manual_seed(seed))

    def suggestions(self) -> Float[Tensor, "N A"]:
        """The demonstrator's next action in every row; zeros where the row stands still."""
        moving = self._moving()
        out = np.zeros_like(self._memory.suggestion)
        answered = self._ask(moving, "demonstrate") if moving else []
        out[answered] = self._memory.suggestion[answered]
        return torch.from_numpy(out)

    def close(self) -> None:
        self._group.close()

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _refresh(self, rows: Sequence[int]) -> None:
        """Have those of ``rows`` look that have moved since they last did."""
        stale = [row for row in rows if not self._fresh[row] and not self._lost[row]]
        if stale:
            slot = self._free_slot()
            self._saw(self._ask(stale, "look", slot=slot), slot)

    def _saw(self, rows: Sequence[int], slot: int) -> None:
        """These rows' looks lie in ``slot`` now."""
        if len(rows) == self.spec.num_envs:
            self._fresh[:], self._slot[:], self._together = True, slot, slot
            return
        self._fresh[rows], self._slot[rows] = True, slot
        self._together = slot if self._fresh.all() and (self._slot == slot).all() else None

    def _free_slot(self) -> int:
        """Where the next look goes: with the last one, unless somebody keeps that."""
        last = int(self._slot[0])
        if last and last not in self._lent:
            return last
        return next((slot for slot in range(1, SLOTS) if slot not in self._lent), 0)

    def _lend_or_copy(self, slot: int) -> UInt8[np.ndarray, "N cameras height width 3"]:
        """All rows' pictures, in the workers' memory where nobody else has them."""
        images: np.ndarray = self._memory.images[slot]
        if slot == 0 or slot in self._lent or images.nbytes < LENT_BYTES:
            return images.copy()
        self._lent.add(slot)
        weakref.finalize(images, self._lent.discard, slot)
        return images

    def _rows(self, env_ids: Sequence[int] | None) -> list[int]:
        return self._everyone if env_ids is None else [int(row) for row in env_ids]

    def _moving(self) -> list[int]:
        standing = self._flags[TERMINATED] | self._flags[TRUNCATED]
        return np.flatnonzero(~standing).tolist() if standing.any() else self._everyone

    def _outcome(self) -> dict[str, Tensor]:
        """The flags of Step and ChunkStep as they are now."""
        flags = np.zeros((5, len(self._lost)), dtype=bool)
        flags[:3], flags[4] = self._flags, ~self._lost
        return dict(zip(OUTCOME, torch.from_numpy(flags).unbind(), strict=True))

    def _write_start(self, row: int, start: StartState) -> None:
        if not 0 <= start.task < len(self.spec.tasks):
            raise ValueError(f"start names task {start.task}, {self.spec.name} has {len(self.spec.tasks)}")
        count = 0 if start.snapshot is None else len(start.snapshot)
        if start.snapshot is not None:
            self._memory.actions[row, :count] = start.snapshot
        self._memory.start[row] = start.task, start.seed, count

    def _ask(self, rows: Sequence[int], do: str, **arguments: Any) -> Sequence[int]:
        """TensorDataclass that answered; the episodes of the others are lost."""
        answered = self._group.ask(rows, do, timeout_s=self.workers.step_timeout_s, **arguments)
        if len(answered) == len(rows):
            return answered
        lost = sorted(set(rows) - set(answered))
        running = [row for row in lost if not self._flags[:, row].any()]  # an episode that had ended keeps its outcome
        self._lost[running] = True
        self._flags[TRUNCATED, running] = True
        return answered

    def _execute(self, actions: Tensor, *, gamma: float, look: bool) -> Float[Tensor, " N"]:
        """The rewards; flags, validity and freshness are kept."""
        moving, memory, n = self._moving(), self._memory, self.spec.num_envs
        if not moving:
            return torch.zeros(n)
        values, elapsed = actions.detach().to("cpu", torch.float32).numpy(), memory.elapsed.tolist()
        horizon, room = values.shape[1], memory.actions.shape[1]
        for row in moving:
            end = min(elapsed[row] + horizon, room)
            memory.actions[row, elapsed[row] : end] = values[row, : end - elapsed[row]]
        slot = self._free_slot() if look else None
        answered = self._ask(moving, "advance", count=horizon, gamma=gamma, look=slot)
        self._fresh[moving], self._together = False, None
        if len(answered) == n:  # without a list of them, which numpy is slow to follow
            reward, self._flags[:] = memory.reward.copy(), memory.flags
        else:
            reward = np.zeros(n, dtype=np.float32)
            reward[answered], self._flags[:, answered] = memory.reward[answered], memory.flags[:, answered]
        if slot is not None:
            ended = self._flags[TERMINATED]
            self._saw([row for row in answered if not ended[row]] if ended.any() else answered, slot)
        return torch.from_numpy(reward)


class PoolExpert:
    """A simulator's demonstrator, with Gaussian noise of standard deviation ``noise`` on every action."""

    def __init__(self, pool: SubprocVectorEnv, *, noise: float, generator: torch.Generator) -> None:
        self.pool, self.noise, self.generator = pool, noise, generator

    def act(self) -> Float[Tensor, "N A"]:
        action = self.pool.suggestions()
        noise = torch.randn(action.shape, generator=self.generator)
        return (action + self.noise * noise).clamp(-1.0, 1.0)


def _vector_spec(single: SingleSpec, num_envs: int) -> EnvSpec:
    return EnvSpec(
        name=single.name,
        num_envs=num_envs,
        action_dim=single.action_dim,
        state_dim=single.state_dim,
        cameras=single.cameras,
        image_size=single.image_size,
        control_hz=single.control_hz,
        max_steps=single.max_steps,
        tasks=single.tasks,
        device=torch.device("cpu"),
        fingerprint=dict(single.fingerprint),
    )
