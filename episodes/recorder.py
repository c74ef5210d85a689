"""Record what happens in a world while anything acts in it: the recorder is itself the world.

``RecordedEnv`` wraps a VectorEnv and is one. Whoever steps it (an expert, ``step_chunk``, an evaluation, a person) does
not know; every episode that ends is cut from its row and committed to a store:

    reset    begins an episode in its rows; one that had not ended there is dropped
    observe  is a look: its images and state are kept (on the CPU) for the rows it shows
    step     appends action and outcome to the rows that have not ended

An ended episode waits for its final look and is committed by the ``observe`` that shows it, else by the row's next
``reset``, or by ``commit``. Chunks are stepped one by one (``advance`` of a ChunkedEnv is not used: its steps would
be lost).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from episodes.schema import HUMAN, SOURCES, Episode, EpisodeError
from episodes.store import EpisodeStore
from sims.vector_env import EnvSpec, Observation, StartState, Step, VectorEnv, decode_instructions


def keep_all(_: Episode) -> bool:
    return True


def keep_successes(episode: Episode) -> bool:
    return episode.succeeded


class RecordedEnv:
    """A VectorEnv that commits every ended episode for which ``keep`` holds.

    ``source``: who acts where ``Step.intervened`` is false (a person does where it is true).
    ``policy_version`` may be set at any time; an episode carries the one it began with.
    ``recorded`` counts committed episodes and ``ended`` all that ended, kept or not.

    Memory: low-dimensional arrays for ``max_steps`` of every row, and the frames of episodes under way.
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
        self.env, self.store, self.spec = env, store, env.spec
        self.source, self.split, self.policy_version, self.keep = source, split, policy_version, keep
        self.recorded = self.ended = 0
        self._rows = [_Row() for _ in range(env.spec.num_envs)]
        self._steps = _Steps(env.spec)

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        rows = range(self.spec.num_envs) if env_ids is None else env_ids
        self.commit(rows)
        self.env.reset(env_ids, start=start)
        for row, state in zip(rows, start, strict=True):
            self._rows[row] = _Row(start=state, policy_version=self.policy_version)
            self._steps.begin(row)

    def step(self, action: Float[Tensor, "N A"]) -> Step:
        step = self.env.step(action)
        self._steps.append(action, step, actor=SOURCES.index(self.source))
        return step

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        obs = self.env.observe(env_ids)
        rows = range(self.spec.num_envs) if env_ids is None else env_ids
        images, state = obs.images.cpu().numpy(), obs.state.cpu().numpy()
        for i, row in enumerate(rows):
            self._rows[row].look(int(self._steps.count[row]), images[i], state[i], obs.instruction[i])
        self.commit(rows)
        return obs

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        return self.env.capture(env_ids)

    def close(self) -> None:
        """Commit what has ended, drop what has not, close the world. The store stays open."""
        self.commit()
        self.env.close()

    def commit(self, rows: Sequence[int] | None = None) -> None:
        """Commit the ended episodes of these rows (default: all)."""
        ended = [row for row in (range(self.spec.num_envs) if rows is None else rows) if self._steps.ended(row)]
        # one at a time through a generator: a cut episode holds a second copy of its frames
        self.recorded += len(self.store.add_all(filter(self.keep, map(self._cut, ended))))
        self.ended += len(ended)

    def _cut(self, row: int) -> Episode:
        under_way, self._rows[row] = self._rows[row], _Row()
        arrays = self._steps.cut(row)
        start = under_way.start
        if start is None or not under_way.looks:
            raise EpisodeError(f"row {row} ended an episode that was never looked at; call observe() after reset()")
        frames = np.stack(under_way.images)
        return Episode(
            images={camera: frames[:, i] for i, camera in enumerate(self.spec.cameras)},
            look_steps=np.array(under_way.looks, dtype=np.int32),
            state=np.stack(under_way.states),
            instruction=under_way.instruction,
            task=self.spec.tasks[start.task],
            split=self.split,
            seed=start.seed,
            source=self.source,
            control_hz=self.spec.control_hz,
            policy_version=under_way.policy_version,
            fingerprint={"world": self.spec.name, **self.spec.fingerprint},
            **arrays,
        )


class _Row:
    """The episode under way in one row: where it began, and its looks."""

    def __init__(self, *, start: StartState | None = None, policy_version: str = ""):
        self.start, self.policy_version, self.instruction = start, policy_version, ""
        self.looks: list[int] = []
        self.images: list[np.ndarray] = []
        self.states: list[np.ndarray] = []

    def look(self, step: int, images: np.ndarray, state: np.ndarray, text: Tensor) -> None:
        if self.start is None or step in self.looks[-1:]:  # nothing under way, or a second look at the same moment
            return
        if not self.looks:
            self.instruction = decode_instructions(text[None])[0]
        self.looks.append(step)
        self.images.append(images.copy())  # the world may reuse its buffers
        self.states.append(state.astype(np.float32))


class _Steps:
    """What happened in every row since its episode began: arrays [N, max_steps, ...] filled to ``count``."""

    def __init__(self, spec: EnvSpec):
        shape = (spec.num_envs, spec.max_steps)
        self.count = np.zeros(spec.num_envs, dtype=np.int64)
        self._live = np.zeros(spec.num_envs, dtype=bool)
        self._arrays = {
            "action": np.zeros((*shape, spec.action_dim), dtype=np.float32),
            "reward": np.zeros(shape, dtype=np.float32),
            **{name: np.zeros(shape, dtype=bool) for name in ("terminated", "truncated", "success")},
            "actor": np.zeros(shape, dtype=np.uint8),
        }

    def begin(self, row: int) -> None:
        self.count[row], self._live[row] = 0, True

    def append(self, action: Tensor, step: Step, *, actor: int) -> None:
        rows = np.flatnonzero(self._live)
        at = self.count[rows]
        if len(at) and at.max() >= len(self._arrays["reward"][0]):
            raise EpisodeError(f"row {rows[at.argmax()]} went on past max_steps ({at.max()}) of its world's spec")
        values = {
            "action": action,
            **{name: getattr(step, name) for name in ("reward", "terminated", "truncated", "success")},
        }
        for name, tensor in values.items():
            self._arrays[name][rows, at] = tensor.detach().cpu().numpy()[rows]
        self._arrays["actor"][rows, at] = np.where(step.intervened.cpu().numpy()[rows], HUMAN, actor)
        self.count[rows] += 1
        self._live[rows] = ~(step.terminated | step.truncated).cpu().numpy()[rows]

    def ended(self, row: int) -> bool:
        return bool(not self._live[row] and self.count[row])

    def cut(self, row: int) -> dict[str, Any]:
        """The arrays of the row's ended episode, and the row empty again."""
        count, self.count[row] = self.count[row], 0
        return {name: array[row, :count].copy() for name, array in self._arrays.items()}
