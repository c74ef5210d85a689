"""Draws clips from recorded episodes.

    observation at step   0        8        16 18    an episode of 18 steps, observed every step or once per chunk
    a clip of 2:                   ^ start  ^  ^     actions 8..15, then 16..17; previous = a chunk before the start

Where an episode was observed more often than once per chunk, some gaps are drawn shorter, so that a model is fitted to
every length in 1..H. Clips that reach the end of an episode are padded with length 0. Where the steps between
observations do not divide H, hardly any gap is H long, the length that imagined episodes are made of: episodes for a
fit are checked for that (``check_full_gaps``).

Labels on episodes count, as for success classifiers (``labelled_success``). An episode that is labelled a failure shows
no success; where the environment ended it, it failed there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from episodes.catalog import Entry
from episodes.outcomes.success import labelled_success
from episodes.overlays import LabelValue, outcome_unknown
from episodes.packing import Arrays, frame, frame_size, frame_sizes
from episodes.store import EpisodeStore, select_among
from sims.vector_env import encode_instructions
from world_models.data.clip import FAILED, RUNNING, SUCCESS, Clip, Part, RecordedObservations, Transitions, part_of
from world_models.world_model import WorldModelError

FULL_LENGTH_SHARE = 0.6  # of gaps that are as long as possible
REACHING_SHARE = 0.5  # of observations; see check_full_gaps


class ClipSampler:
    """Clips of the episodes of some stores; images stay in their memory-mapped files.

    Observations are numbered across all episodes. ``part``: of the starts, see ``part_of``; no start is in two parts.
    An episode that several stores hold counts once, as in the first of them.
    Raises WorldModelError when there are no episodes, when cameras, dimensions or control rates differ, and for NaN;
    CorruptEpisode if a file is damaged.
    """

    def __init__(
        self,
        stores: Sequence[EpisodeStore],
        *,
        action_horizon: int,
        cameras: Sequence[str] | None = None,
        part: Part = "all",
    ) -> None:
        chosen = [one for one in select_among(stores) if part in ("all", part_of(one[1]))]
        names = ", ".join(str(store.path) for store in stores)
        if not chosen:
            among = "" if part == "all" else f" in the part {part!r}, a tenth or more of all starts, by task and seed"
            raise WorldModelError(f"{names}: no episodes{among}; record some with: vla-rl collect")
        for store, entry, _ in chosen:
            store.verify([entry])
        self.action_horizon = action_horizon
        self._arrays: list[Arrays] = [store.map(entry) for store, entry, _ in chosen]
        self.entries = [entry for _, entry, _ in chosen]
        self._labels = [labels for _, _, labels in chosen]
        first, file = self._arrays[0], f"{chosen[0][0].file(self.entries[0].id)}"
        self.cameras = tuple(frame_sizes(first) if cameras is None else cameras)
        if not self.cameras:
            raise WorldModelError(f"{file}: recorded without images; a world model needs them")
        self.image_size = frame_size(first, self.cameras, file, error=WorldModelError)
        for (store, entry, _), arrays in zip(chosen, self._arrays, strict=True):
            file = f"{store.file(entry.id)}"
            frame_size(arrays, self.cameras, file, expected=self.image_size, error=WorldModelError)
            _check(file, arrays, first)
            if entry.control_hz != (hz := self.entries[0].control_hz):
                raise WorldModelError(f"{file}: {entry.control_hz} Hz, the other episodes have {hz} Hz")
        self._steps = [np.asarray(arrays["observation_steps"], dtype=np.int64) for arrays in self._arrays]
        gaps = max(int(np.diff(steps).max(initial=0)) for steps in self._steps)
        if gaps > action_horizon:
            raise WorldModelError(
                f"{names}: observations are up to {gaps} control steps apart, the model predicts at most "
                f"{action_horizon}; record episodes with an observation at least every {action_horizon} steps"
            )
        self._instructions = encode_instructions([entry.instruction for entry in self.entries])
        self._index()

    def _index(self) -> None:
        """Tables over the observations of all episodes."""
        episodes = list(zip(self._arrays, self.entries, self._labels, strict=True))
        self._labelled = [_labelled(*episode) for episode in episodes]
        self._status_of = [
            _status(arrays, labelled, known=not outcome_unknown(labels))
            for (arrays, _, labels), labelled in zip(episodes, self._labelled, strict=True)
        ]
        self._outcomes = [
            None if outcome_unknown(labels) else bool((arrays["success"] if labelled is None else labelled).any())
            for (arrays, _, labels), labelled in zip(episodes, self._labelled, strict=True)
        ]
        counts = [len(steps) for steps in self._steps]
        self._first = np.cumsum([0, *counts[:-1]])  # of each episode
        self._episode = np.repeat(np.arange(len(counts)), counts)
        self._position = np.concatenate([np.arange(count) for count in counts])  # within its episode
        self._starts = np.flatnonzero(np.concatenate([np.arange(n) < n - 1 for n in counts]))
        self._status = np.concatenate(self._status_of)
        self._to_end = np.concatenate([steps[-1] - steps for steps in self._steps])
        self._undecided = np.array([self.undecided_steps(e) for e in range(len(counts))])[self._episode]
        self._undecided -= np.concatenate(self._steps)

    def __len__(self) -> int:
        """Number of observations that another one follows."""
        return len(self._starts)

    @property
    def state_dim(self) -> int:
        return self._arrays[0]["state"].shape[1]

    @property
    def action_dim(self) -> int:
        return self._arrays[0]["action"].shape[1]

    @property
    def instruction_bytes(self) -> int:
        """Width of the instructions of all clips."""
        return self._instructions.shape[1]

    # -- whole episodes --------------------------------------------------------------------------------------------

    def observation_steps(self, episode: int) -> Int[np.ndarray, " L"]:
        """Control steps before each observation of an episode."""
        return self._steps[episode]

    def outcome(self, episode: int) -> bool | None:
        """Whether an episode shows success, and not just another part of what it was split from; None: unknown."""
        return self._outcomes[episode]

    def undecided_steps(self, episode: int) -> int:
        """Control steps of an episode before its first observation that shows success; all where none does."""
        shows = self._status_of[episode] == SUCCESS
        return int(self._steps[episode][shows][0]) if shows.any() else self.entries[episode].steps

    def outcomes(self) -> str:
        """A line on every episode: its id, its span, its outcome, and the observations that labels say show success."""
        shown = ["" if one is None else f" {np.flatnonzero(one).tolist()}" for one in self._labelled]
        spans = ["" if entry.span is None else f" {entry.span}" for entry in self.entries]
        lines = zip(self.entries, spans, self._outcomes, shown, strict=True)
        return "".join(f"{entry.id}{span} {outcome}{labelled}\n" for entry, span, outcome, labelled in lines)

    def actions(self, episode: int) -> Float[Tensor, "T A"]:
        """All actions of an episode."""
        return torch.from_numpy(np.array(self._arrays[episode]["action"]))

    def statistics(
        self,
    ) -> tuple[Float[Tensor, "observations state_dim"], Float[Tensor, "steps A"], Float[Tensor, "changes state_dim"]]:
        """All states, all actions, and changes of state over (up to) a chunk."""
        state = torch.from_numpy(np.concatenate([np.array(a["state"]) for a in self._arrays]))
        action = torch.from_numpy(np.concatenate([np.array(a["action"]) for a in self._arrays]))
        changes = []
        for arrays, steps in zip(self._arrays, self._steps, strict=True):
            later = np.searchsorted(steps, steps + self.action_horizon, side="right") - 1
            changes.append(np.array(arrays["state"])[later] - np.array(arrays["state"]))
        return state, action, torch.from_numpy(np.concatenate(changes))

    # -- clips -----------------------------------------------------------------------------------------------------

    def draw(self, rng: np.random.Generator, batch: int, chunks: int) -> Clip:
        """``batch`` clips of ``chunks`` predictions, every start equally likely."""
        return self.at(self.draw_starts(rng, batch), chunks, rng)

    def draw_near_ends(self, rng: np.random.Generator, batch: int, chunks: int, *, within: int) -> Clip:
        """Clips that start at most ``within`` control steps before an episode's end."""
        near = self._starts[self._to_end[self._starts] <= within]
        return self.at(near[rng.integers(len(near), size=batch)], chunks, rng)

    def draw_starts(self, rng: np.random.Generator, count: int) -> Int[np.ndarray, " count"]:
        """Indices of observations that another one follows, each equally likely."""
        return self._starts[rng.integers(len(self._starts), size=count)]

    def has_next(self, index: Int[np.ndarray, " B"]) -> Bool[np.ndarray, " B"]:
        """Whether another observation follows these."""
        return self._to_end[index] > 0

    def check_full_gaps(self) -> None:
        """WorldModelError unless REACHING_SHARE of the observations with at least ``action_horizon`` control steps left
        are followed by one exactly so many steps later."""
        horizon = self.action_horizon
        reaches = np.concatenate([np.isin(s[s + horizon <= s[-1]] + horizon, s) for s in self._steps])
        if len(reaches) and reaches.mean() < REACHING_SHARE:
            raise WorldModelError(
                f"only {reaches.mean():.0%} of the recorded observations are followed by one {horizon} control steps "
                "later, which the world model predicts in imagined episodes: record with an observe_every that divides "
                f"{horizon}, or set imagination.model.dynamics.action_horizon to a multiple of the steps between them"
            )

    def at(self, index: Int[np.ndarray, " B"], chunks: int, rng: np.random.Generator) -> Clip:
        """Clips that start at these observations."""
        return Clip.stack([self.clip(int(self._episode[i]), int(self._position[i]), chunks, rng) for i in index])

    def clip(self, episode: int, observation: int, chunks: int, rng: np.random.Generator | None = None) -> Clip:
        """One clip, without batch dimension; without ``rng`` every gap is as long as possible."""
        arrays, steps = self._arrays[episode], self._steps[episode]
        positions = [observation]
        for _ in range(chunks):
            positions.append(self._next(steps, positions[-1], rng))
        before = self._previous(steps, observation)
        length = np.diff(steps[positions])
        state = np.array(arrays["state"])
        return Clip(
            first=self._frame(arrays, 0),
            first_state=torch.from_numpy(state[0]),
            previous=self._frame(arrays, before),
            previous_state=torch.from_numpy(state[before]),
            past_action=self._chunk(arrays, steps[before], steps[observation]),
            past_length=torch.tensor(steps[observation] - steps[before]),
            frames=torch.stack([self._frame(arrays, at) for at in positions]),
            state=torch.from_numpy(state[positions]),
            action=self._chunks(arrays, steps[positions]),
            length=torch.from_numpy(length),
            status=torch.from_numpy(self._status_of[episode][positions]),
            index=torch.from_numpy(self._first[episode] + np.array(positions)),
            instruction=self._instructions[episode],
        )

    def transitions(self, rng: np.random.Generator) -> Transitions:
        """One chunk, without images, from every observation that another one follows."""
        return Transitions.stack(
            [self._transition(int(self._episode[i]), int(self._position[i]), rng) for i in self._starts]
        )

    def _transition(self, episode: int, observation: int, rng: np.random.Generator) -> Transitions:
        arrays, steps = self._arrays[episode], self._steps[episode]
        before, after = self._previous(steps, observation), self._next(steps, observation, rng)
        states = torch.from_numpy(np.array(arrays["state"][[before, observation, after]]))
        return Transitions(
            previous_state=states[0],
            state=states[1],
            next_state=states[2],
            past_action=self._chunk(arrays, steps[before], steps[observation]),
            past_length=torch.tensor(steps[observation] - steps[before]),
            action=self._chunk(arrays, steps[observation], steps[after]),
            length=torch.tensor(steps[after] - steps[observation]),
        )

    def _previous(self, steps: np.ndarray, observation: int) -> int:
        """The observation a chunk earlier, or the first one."""
        return int(np.searchsorted(steps, steps[observation] - self.action_horizon))

    def _next(self, steps: np.ndarray, observation: int, rng: np.random.Generator | None) -> int:
        """The observation a chunk later, or the last one; with ``rng``, some gaps are shorter."""
        farthest = int(np.searchsorted(steps, steps[observation] + self.action_horizon, side="right")) - 1
        if rng is not None and farthest > observation + 1 and rng.random() > FULL_LENGTH_SHARE:
            farthest = int(rng.integers(observation + 1, farthest + 1))
        return farthest

    # -- single observations ---------------------------------------------------------------------------------------

    def observations(self, index: Int[np.ndarray, " B"]) -> RecordedObservations:
        pairs = [(int(self._episode[i]), int(self._position[i])) for i in index]
        return RecordedObservations(
            images=torch.stack([self._frame(self._arrays[e], position) for e, position in pairs]),
            state=torch.from_numpy(np.stack([self._arrays[e]["state"][position] for e, position in pairs])),
            instruction=self._instructions[self._episode[index]],
            status=torch.from_numpy(self._status[index]),
        )

    def of_episode(self, episode: int) -> Int[np.ndarray, " L"]:
        """Indices of an episode's observations."""
        return self._first[episode] + np.arange(len(self._steps[episode]))

    def first_of_episode(self, index: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Indices of the first observations of these observations' episodes."""
        return self._first[self._episode[index]]

    def undecided_from(self, index: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """The ``undecided_steps`` that are left at these observations; negative within a success."""
        return self._undecided[index]

    def episode_ends(self, index: Int[np.ndarray, " B"]) -> tuple[Float[Tensor, "B state_dim"], Bool[Tensor, " B"]]:
        """The last state of these observations' episodes, and whether they show success."""
        episodes = self._episode[index]
        states = np.stack([self._arrays[e]["state"][-1] for e in episodes])
        return torch.from_numpy(states), torch.tensor([self._outcomes[e] is True for e in episodes])

    def with_status(self, status: int) -> Int[np.ndarray, " N"]:
        """Indices of the observations with this status."""
        return np.flatnonzero(self._status == status)

    def running_near_end(self, *, within: int) -> Int[np.ndarray, " N"]:
        """Indices of running observations at most ``within`` control steps before their episode was decided."""
        near = np.minimum(self._to_end, self._undecided) <= within
        return np.flatnonzero((self._status == RUNNING) & near & (self._to_end > 0))

    # -- reading ---------------------------------------------------------------------------------------------------

    def _chunks(self, arrays: Arrays, steps: np.ndarray) -> Float[Tensor, "M H A"]:
        if len(steps) == 1:
            return torch.zeros(0, self.action_horizon, self.action_dim)
        return torch.stack([self._chunk(arrays, a, b) for a, b in itertools.pairwise(steps)])

    def _chunk(self, arrays: Arrays, begin: np.integer, end: np.integer) -> Float[Tensor, "H A"]:
        out = np.zeros((self.action_horizon, arrays["action"].shape[1]), dtype=np.float32)
        out[: end - begin] = arrays["action"][begin:end]
        return torch.from_numpy(out)

    def _frame(self, arrays: Arrays, observation: int) -> UInt8[Tensor, "cameras height width 3"]:
        return torch.from_numpy(np.stack([frame(arrays, camera, observation) for camera in self.cameras]))


def _labelled(arrays: Arrays, entry: Entry, labels: Mapping[str, LabelValue]) -> Bool[np.ndarray, " L"] | None:
    """``labelled_success`` of the episode's observations."""
    steps, recorded = np.asarray(arrays["observation_steps"], dtype=np.int64), bool(np.asarray(arrays["success"]).any())
    return labelled_success(labels, steps, entry, recorded=recorded)


def _status(arrays: Arrays, labelled: Bool[np.ndarray, " L"] | None, *, known: bool) -> Int[np.ndarray, " L"]:
    """Status of the episode at every observation: as ``labelled``, else from the flags of the step before it.

    A recorded success lasts from its first step on. ``known``: whether its outcome is; otherwise its end is no failure.
    """
    steps = np.asarray(arrays["observation_steps"], dtype=np.int64)
    before = np.maximum(steps - 1, 0)
    recorded = np.maximum.accumulate(np.asarray(arrays["success"]))[before] & (steps > 0)
    success = recorded if labelled is None else labelled
    ended = np.asarray(arrays["terminated"])[before] & (steps > 0) & known
    return np.where(success, SUCCESS, np.where(ended, FAILED, RUNNING)).astype(np.int64)


def _check(name: str, arrays: Arrays, first: Arrays) -> None:
    """Same dimensions as the first episode; finite numbers."""
    for what in ("state", "action"):
        got, expected = arrays[what].shape[1], first[what].shape[1]
        if got != expected:
            raise WorldModelError(f"{name}: {got} {what} dimensions, the other episodes have {expected}")
        if not np.isfinite(arrays[what]).all():
            raise WorldModelError(f"{name}: {what} has NaN or infinite entries; delete the episode from the store")
