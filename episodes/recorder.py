"""Records the episodes of an environment into a store, whatever acts in it.

``RecordedEnv`` wraps a VectorEnv and is one itself, so an expert, ``step_chunk``, an evaluation or a person steps it as
any other environment. Every episode that ends is committed to the store:

    reset    begins an episode in these environments; an unfinished one is dropped
    observe  keeps images and state of the environments that it returns, on the CPU
    step     keeps action and result of the environments whose episode has not ended; drops the episode of an
             environment that failed (``Step.valid`` is False)

An ended episode waits for its final observation and is committed by the ``observe`` that returns it, or else by the
next ``reset`` of its environment, or by ``commit``. Chunks are executed step by step (``advance`` of a ChunkedEnv is
not used, since it does not return the single steps).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from episodes.schema import ACTORS, HUMAN, SOURCES, Episode, EpisodeError
from episodes.store import EpisodeStore
from sims.env_wrapper import EnvWrapper
from sims.vector_env import EnvSpec, Observation, StartState, Step, VectorEnv, decode_instructions

_STEP_FIELDS = ("reward", "terminated", "truncated", "success")


def keep_all(_: Episode) -> bool:
    return True


def keep_successes(episode: Episode) -> bool:
    return episode.succeeded


class RecordedEnv(EnvWrapper):
    """A VectorEnv that commits every ended episode for which ``keep`` holds.

    ``source``: the actor where ``Step.intervened`` is False, one of ``SOURCES`` (a person acts where it is True).
    ``policy_version`` may be set at any time; an episode carries the one that it began with.
    ``recorded`` counts the committed episodes and ``ended`` all that ended, kept or not.
    Raises EpisodeError for an unknown ``source``, and what ``EpisodeStore.add`` raises when an episode is committed.

    Memory: the low-dimensional arrays of ``max_steps`` steps of every environment, and the frames of unfinished
    episodes.
    """

    def __init__(
        self,
        env: VectorEnv,
        store: EpisodeStore,
        *,
        source: str,
        split: str,
        policy_version: str = "",
        keep: Callable[[Episode], bool] = keep_all,
    ):
        if source not in SOURCES:
            raise EpisodeError(f"source is {source!r}, allowed are {', '.join(SOURCES)}")
        super().__init__(env)
        self.store = store
        self.source, self.split, self.policy_version, self.keep = source, split, policy_version, keep
        self.recorded = self.ended = 0
        self._unfinished = [_Unfinished() for _ in range(env.spec.num_envs)]
        self._steps = _StepBuffer(env.spec)

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        ids = self.spec.ids(env_ids)
        self.commit(ids)
        self.env.reset(env_ids, start=start)
        for env_id, state in zip(ids, start, strict=True):
            self._unfinished[env_id] = _Unfinished(start=state, policy_version=self.policy_version)
            self._steps.begin(env_id)

    def step(self, action: Float[Tensor, "N A"]) -> Step:
        step = self.env.step(action)
        for env_id in self._steps.drop_failed(step):
            self._unfinished[env_id] = _Unfinished()
        self._steps.append(action, step, actor=ACTORS.index(self.source))
        return step

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        obs = self.env.observe(env_ids)
        ids = self.spec.ids(env_ids)
        images, state = obs.images.cpu().numpy(), obs.state.cpu().numpy()
        for i, env_id in enumerate(ids):
            self._unfinished[env_id].observe(int(self._steps.count[env_id]), images[i], state[i], obs.instruction[i])
        self.commit(ids)
        return obs

    def close(self) -> None:
        """Commit ended episodes, drop unfinished ones, close the environment. The store stays open."""
        self.commit()
        super().close()

    def commit(self, env_ids: Sequence[int] | None = None) -> None:
        """Commit the ended episodes of these environments (default: all)."""
        ids = self.spec.ids(env_ids)
        ended = [env_id for env_id in ids if self._steps.ended(env_id)]
        # one at a time through a generator: an episode holds a second copy of its frames
        self.recorded += len(self.store.add_all(filter(self.keep, map(self._take_episode, ended))))
        self.ended += len(ended)

    def _take_episode(self, env_id: int) -> Episode:
        """The ended episode of this environment, whose buffers are empty afterwards."""
        unfinished, self._unfinished[env_id] = self._unfinished[env_id], _Unfinished()
        arrays = self._steps.take(env_id)
        start = unfinished.start
        if start is None or not unfinished.observed_at:
            raise EpisodeError(
                f"environment {env_id} ended an episode that was never observed; call observe() after reset()"
            )
        frames = np.stack(unfinished.images)
        return Episode(
            images={camera: frames[:, i] for i, camera in enumerate(self.spec.cameras)},
            observation_steps=np.array(unfinished.observed_at, dtype=np.int32),
            state=np.stack(unfinished.states),
            instruction=unfinished.instruction,
            task=self.spec.tasks[start.task],
            split=self.split,
            seed=start.seed,
            source=self.source,
            control_hz=self.spec.control_hz,
            action_delay=self.spec.action_delay,
            policy_version=unfinished.policy_version,
            fingerprint={"environment": self.spec.name, **self.spec.fingerprint},
            **arrays,
        )


class _Unfinished:
    """Start and observations of the current episode of one environment."""

    def __init__(self, *, start: StartState | None = None, policy_version: str = ""):
        self.start, self.policy_version, self.instruction = start, policy_version, ""
        self.observed_at: list[int] = []
        self.images: list[np.ndarray] = []
        self.states: list[np.ndarray] = []

    def observe(
        self,
        step: int,
        images: UInt8[np.ndarray, "cameras height width 3"],
        state: Float[np.ndarray, " state_dim"],
        instruction: UInt8[Tensor, " instruction_bytes"],
    ) -> None:
        if self.start is None or step in self.observed_at[-1:]:  # no current episode, or observed again at this step
            return
        if not self.observed_at:
            self.instruction = decode_instructions(instruction[None])[0]
        self.observed_at.append(step)
        self.images.append(images.copy())  # the environment may reuse its buffers
        self.states.append(state.astype(np.float32))


class _StepBuffer:
    """The steps of every environment since its episode began: arrays [N, max_steps, ...] filled up to ``count``."""

    def __init__(self, spec: EnvSpec):
        shape = (spec.num_envs, spec.max_steps)
        self.count = np.zeros(spec.num_envs, dtype=np.int64)
        self._running = np.zeros(spec.num_envs, dtype=bool)
        self._arrays = {
            "action": np.zeros((*shape, spec.action_dim), dtype=np.float32),
            "reward": np.zeros(shape, dtype=np.float32),
            **{name: np.zeros(shape, dtype=bool) for name in ("terminated", "truncated", "success")},
            "actor": np.zeros(shape, dtype=np.uint8),
        }

    def begin(self, env_id: int) -> None:
        self.count[env_id], self._running[env_id] = 0, True

    def drop_failed(self, step: Step) -> list[int]:
        """Drop the episodes of the environments that failed in this step, and return their numbers."""
        failed = np.flatnonzero(self._running & ~step.valid.cpu().numpy())
        self.count[failed], self._running[failed] = 0, False
        return failed.tolist()

    def append(self, action: Float[Tensor, "N A"], step: Step, *, actor: int) -> None:
        ids = np.flatnonzero(self._running)
        at = self.count[ids]
        if len(at) and at.max() >= len(self._arrays["reward"][0]):
            raise EpisodeError(f"environment {ids[at.argmax()]} did not end at max_steps ({at.max()}) of its EnvSpec")
        for name, tensor in {"action": action, **{name: getattr(step, name) for name in _STEP_FIELDS}}.items():
            self._arrays[name][ids, at] = tensor.detach().cpu().numpy()[ids]
        self._arrays["actor"][ids, at] = np.where(step.intervened.cpu().numpy()[ids], HUMAN, actor)
        self.count[ids] += 1
        self._running[ids] = ~step.done.cpu().numpy()[ids]

    def ended(self, env_id: int) -> bool:
        return bool(not self._running[env_id] and self.count[env_id])

    def take(self, env_id: int) -> dict[str, Any]:
        """The arrays of the ended episode of this environment, whose buffer is empty afterwards."""
        count, self.count[env_id] = self.count[env_id], 0
        return {name: array[env_id, :count].copy() for name, array in self._arrays.items()}
