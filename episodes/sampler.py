"""Windows of recorded episodes for imitation: an observation and the action chunk that followed it.

A chunk ends where the episode ends or another actor takes over; the rest is padding.

    step      0  1  2  3  4  5  6      an episode of 7 steps (p: policy, h: human), action horizon 4:
    actor     p  p  p  h  h  h  h      window at step 2: actions 2 2 2 2, mask 1 0 0 0
    observed  x     x  x     x         window at step 5: actions 5 6 6 6, mask 1 1 0 0

States and actions of all selected episodes are held in memory, joined along time. Images stay in their files, which are
mapped at the start, so that ``data compact`` may remove them meanwhile; one frame per camera and window is copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from episodes.catalog import Entry
from episodes.packing import Arrays, frame, frame_size, frame_sizes
from episodes.schema import ACTORS, HUMAN, POLICY, SOURCES, EpisodeError
from episodes.store import EVERYTHING, EpisodeStore, Selection
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, encode_instructions

PRE_INTERVENTION = "pre_intervention"
KINDS = (*ACTORS, PRE_INTERVENTION)  # of steps: who acted, or a policy that was about to be corrected
_MAPPED_FILES = 16384  # Linux allows 65530 mappings in a process; of more files, those are mapped that were used last


@dataclass(frozen=True, kw_only=True)
class Targets(TensorDataclass):
    """What a policy learns to predict from an observation.

    ``action[b, i]`` was executed ``i`` control steps after the observation, in [-1, 1]. ``mask`` is 1 for recorded
    actions, or the weight of their window, and 0 for padding, which repeats the last recorded action. ``future``: the
    state at each of the sampler's ``future_steps`` (or at the last observation before it), then the state where this
    actor stopped acting; None if unknown.
    """

    action: Float[Tensor, "*B H A"]
    mask: Float[Tensor, "*B H"]
    future: Float[Tensor, "*B F state_dim"] | None = None


@dataclass(frozen=True, kw_only=True)
class WindowBatch(TensorDataclass):
    """Observations of recorded episodes and what followed each of them.

    ``past``: the observations before ``obs`` at each of the sampler's ``past_steps``; None where it has none.
    """

    obs: Observation  # [B]
    targets: Targets
    past: Observation | None = None  # [B, P]


class WindowSampler:
    """Shuffled epochs without replacement, in batches of exactly ``batch_size`` windows.

    A batch may finish one epoch and begin the next. The order depends only on ``seed`` and the selected episodes;
    ``state_dict`` is a position in it, and a sampler that loads it continues with exactly the same batches.

    ``cameras``: which, and in which order (None: as recorded). ``future_steps``: control steps ahead, of
    ``Targets.future``. ``past_steps``: control steps back, of ``WindowBatch.past``: each is the last observation of the
    episode that is at least so many steps before the window's, or its first one. ``actors``: only windows that begin
    under one of these (``("human",)`` learns from corrections alone). ``pre_intervention_steps``: so many of a policy's
    steps before a person takes over are not the policy's, but of the actor ``PRE_INTERVENTION`` (Liu et al. 2022,
    Sirius), also where the episode is cut in between. Raises EpisodeError if nothing matches or if episodes differ in
    shape or control rate, CorruptEpisode if a file is damaged.
    """

    def __init__(
        self,
        store: EpisodeStore,
        *,
        action_horizon: int,
        batch_size: int,
        seed: int,
        cameras: Sequence[str] | None = None,
        future_steps: Sequence[int] = (),
        past_steps: Sequence[int] = (),
        where: Selection = EVERYTHING,
        actors: Sequence[str] = SOURCES,
        pre_intervention_steps: int = 0,
    ):
        if min(action_horizon, batch_size) < 1:
            raise EpisodeError(f"action_horizon {action_horizon} and batch_size {batch_size} must be at least 1")
        allowed = (*SOURCES, PRE_INTERVENTION)
        if not actors or not set(actors) <= set(allowed):
            raise EpisodeError(f"actors are {list(actors)}, allowed are {', '.join(allowed)}")
        entries = store.select(where)
        if not entries:
            raise EpisodeError(f"{store.path}: no episode matches {where}. See it with: vla-rl data info {store.path}")
        store.verify(entries)
        self.action_horizon, self.batch_size, self.seed = action_horizon, batch_size, seed
        self.future_steps, self.past_steps = tuple(future_steps), np.array(past_steps, dtype=np.int64)
        self._map = lru_cache(_MAPPED_FILES)(lambda episode: store.map(entries[episode]))
        first = self._map(0)
        self.cameras = tuple(frame_sizes(first) if cameras is None else cameras)
        self.image_size = frame_size(first, self.cameras, f"{store.file(entries[0].id)}")
        self._instructions = encode_instructions([entry.instruction for entry in entries])
        read = "".join(f"{entry.id}{entry.span or ''}" for entry in entries)
        self._digest = hashlib.sha256(read.encode()).hexdigest()
        self._pre_intervention_steps = pre_intervention_steps
        self._index(store, entries, [KINDS.index(actor) for actor in actors])
        if not len(self):
            raise EpisodeError(f"{store.path}: no window begins under {', '.join(actors)}")
        self._position, self._epoch, self._order = 0, -1, np.empty(0, dtype=np.int64)

    def _index(self, store: EpisodeStore, entries: list[Entry], actors: list[int]) -> None:
        """Join the arrays of all episodes and list the windows: observations followed by an action of ``actors``.

        A window is (observation among all, step among all).
        """
        parts = [self._read_arrays(store, entries, episode) for episode in range(len(entries))]
        state, action, actor, observed_at = (np.concatenate(part) for part in zip(*parts, strict=True))
        steps, observations = np.array([e.steps for e in entries]), np.array([e.observations for e in entries])
        step_episode, episode = (np.repeat(np.arange(len(entries)), count) for count in (steps, observations))
        changes = np.flatnonzero(np.diff(actor) | np.diff(step_episode)) + 1
        run_ends = np.append(changes, len(actor))  # a run: consecutive steps of one episode by one actor
        step = observed_at + (np.cumsum(steps) - steps)[episode]
        frame_index = np.arange(len(observed_at)) - (np.cumsum(observations) - observations)[episode]
        chosen = np.flatnonzero(observed_at < steps[episode])
        chosen = chosen[np.isin(actor[step[chosen]], actors)]
        self._state, self._action = torch.from_numpy(state), torch.from_numpy(action)
        self._run_end = torch.from_numpy(run_ends[np.searchsorted(run_ends, np.arange(len(actor)), side="right")])
        self._windows = np.stack([np.arange(len(step)), step], axis=1)[chosen]
        self._observations = np.stack([episode, frame_index], axis=1)
        # An episode of T steps can be observed at T + 1 times, so the times of all episodes increase strictly.
        self._time, self._last_time = step + episode, self._run_end.numpy()[step[chosen]] + episode[chosen]
        ahead = [self.ahead(np.arange(len(chosen)), steps_ahead) for steps_ahead in self.future_steps]
        last = np.searchsorted(self._time, self._last_time, side="right") - 1
        self._future = torch.from_numpy(np.stack([*ahead, last], axis=1))
        self._weights = torch.ones(len(chosen))

    def ahead(self, indices: Int64[np.ndarray, " B"], steps: int) -> Int64[np.ndarray, " B"]:
        """The last of all observations up to ``steps`` control steps after these windows' own, under the same actor."""
        at = np.minimum(self._time[self._windows[indices, 0]] + steps, self._last_time[indices])
        return np.searchsorted(self._time, at, side="right") - 1

    def _read_arrays(self, store: EpisodeStore, entries: list[Entry], episode: int) -> tuple[np.ndarray, ...]:
        """Copies of state, action, actor and observation steps of one episode, checked against the first's shapes."""
        entry, arrays, first = entries[episode], self._map(episode), self._map(0)
        file = f"{store.file(entry.id)}"
        frame_size(arrays, self.cameras, file, expected=self.image_size)
        for name, got, expected in (
            ("state dimensions", arrays["state"].shape[1], first["state"].shape[1]),
            ("action dimensions", arrays["action"].shape[1], first["action"].shape[1]),
            ("control rate", entry.control_hz, entries[0].control_hz),
        ):
            if got != expected:
                raise EpisodeError(f"{file}: {name} {got}, but {expected} expected; select episodes of one robot")
        state, action, at = (np.array(arrays[name]) for name in ("state", "action", "observation_steps"))
        return state, action, _kinds(store, entry, self._pre_intervention_steps), at

    def __len__(self) -> int:
        """Windows in an epoch."""
        return len(self._windows)

    @property
    def num_observations(self) -> int:
        return len(self._observations)

    def statistics(self) -> tuple[Float[Tensor, "observations state_dim"], Float[Tensor, "steps action_dim"]]:
        """All states and all actions of the selected episodes, to fit a normalizer."""
        return self._state, self._action

    def next_batch(self) -> WindowBatch:
        return self.windows(self.next_indices())

    def next_indices(self) -> Int64[np.ndarray, " B"]:
        """The indices of the next batch's windows; the position moves on."""
        return self._next_windows(self.batch_size)

    def windows(self, indices: Int64[np.ndarray, " B"]) -> WindowBatch:
        """The windows with these indices, each in 0 .. len - 1, in this order."""
        observation, step = self._windows[indices].T
        ahead = torch.from_numpy(step)[:, None] + torch.arange(self.action_horizon)
        end = self._run_end[torch.from_numpy(step)][:, None]
        obs = self.observed(observation)
        targets = Targets(
            action=self._action[torch.minimum(ahead, end - 1)],
            mask=(ahead < end) * self._weights[torch.from_numpy(indices)][:, None],
            future=self._state[self._future[torch.from_numpy(indices)]],
        )
        return WindowBatch(obs=obs, targets=targets, past=self._past(observation) if len(self.past_steps) else None)

    def _past(self, observation: Int64[np.ndarray, " B"]) -> Observation:
        """[B, P], of ``past_steps``."""
        first = observation - self._observations[observation, 1]
        at = self._time[observation][:, None] - self.past_steps
        before = np.maximum(np.searchsorted(self._time, at, side="right") - 1, first[:, None])
        return self.observed(before.ravel()).map(lambda rows: rows.unflatten(0, before.shape))

    def weigh(self, weights: Float[Tensor, " windows"]) -> None:
        """Every window counts so much in the losses from now on, by its mask."""
        if len(weights) != len(self):
            raise EpisodeError(f"got {len(weights)} weights for {len(self)} windows")
        self._weights = weights

    def observed(self, observation: Int64[np.ndarray, " B"]) -> Observation:
        """These of all observations, which ``ahead`` names; each in 0 .. num_observations - 1."""
        episode, frame_index = self._observations[observation].T
        return Observation(
            images=self._images(episode, frame_index),
            state=self._state[torch.from_numpy(observation)],
            instruction=self._instructions[torch.from_numpy(episode)],
        )

    def _images(
        self, episode: Int64[np.ndarray, " B"], frame_index: Int64[np.ndarray, " B"]
    ) -> UInt8[Tensor, "B cameras height width 3"]:
        out = torch.empty((len(frame_index), len(self.cameras), *self.image_size, 3), dtype=torch.uint8)
        frames = out.numpy()
        for row, (e, index) in enumerate(zip(episode.tolist(), frame_index.tolist(), strict=True)):
            arrays: Arrays = self._map(e)
            for column, camera in enumerate(self.cameras):
                frames[row, column] = frame(arrays, camera, index)
        return out

    def _next_windows(self, count: int) -> Int64[np.ndarray, " count"]:
        parts: list[np.ndarray] = []
        while count > 0:
            epoch, offset = divmod(self._position, len(self))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self))
            parts.append(self._order[offset : offset + count])
            count -= len(parts[-1])
            self._position += len(parts[-1])
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "seed": self.seed, "windows": len(self), "episodes": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises EpisodeError if the state belongs to other episodes or another seed: the order would differ."""
        own = self.state_dict()
        for name in ("seed", "windows", "episodes"):
            if own[name] != state[name]:
                raise EpisodeError(
                    f"the sampler cannot resume exactly: {name} was {state[name]}, now it is {own[name]}; "
                    "train on the same store with the same settings, or start a new run"
                )
        self._position = int(state["position"])


def mark_pre_intervention(actor: UInt8[np.ndarray, " T"], steps: int) -> UInt8[np.ndarray, " T"]:
    """Indices into ``KINDS``: ``actor``, but for the policy's last ``steps`` before a person begins."""
    kind = actor.copy()
    begins = np.flatnonzero((actor[1:] == HUMAN) & (actor[:-1] != HUMAN)) + 1
    for step in begins:
        before = slice(max(0, step - steps), step)
        kind[before] = np.where(actor[before] == POLICY, KINDS.index(PRE_INTERVENTION), actor[before])
    return kind


def _kinds(store: EpisodeStore, entry: Entry, steps: int) -> UInt8[np.ndarray, " T"]:
    """``mark_pre_intervention`` of an episode; where it is cut, a person may begin behind its end."""
    recorded = np.array(store.map(replace(entry, span=None))["actor"])
    kinds = mark_pre_intervention(recorded, steps)
    return kinds if entry.span is None else kinds[slice(*entry.span)]


def count_windows(
    store: EpisodeStore,
    *,
    where: Selection = EVERYTHING,
    actors: Sequence[str] = SOURCES,
    pre_intervention_steps: int = 0,
) -> int:
    """Windows that a ``WindowSampler`` of these arguments has; 0 where it would refuse."""
    codes, count = [KINDS.index(actor) for actor in actors], 0
    for entry in store.select(where):
        kind = _kinds(store, entry, pre_intervention_steps)
        observed = np.array(store.map(entry)["observation_steps"])
        count += int(np.isin(kind[observed[observed < len(kind)]], codes).sum())
    return count
