"""Clips of recorded episodes: a moment, and the looks that followed it, at most an action chunk apart.

    look at step   0        8        16 18        an episode of 18 steps, looked at every step or every chunk
    a clip of 2:            ^ moment  ^  ^        actions 8..15, then 16..17; previous = the look a chunk earlier

Where an episode was looked at more often than once per chunk, some gaps are drawn shorter, so that a model learns
every length of 1..H. Clips that reach an episode's end are padded with length 0.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from episodes.catalog import Entry
from episodes.packing import Arrays, frame, frame_sizes
from episodes.store import EVERYTHING, EpisodeStore, Selection
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import encode_instructions
from world_models.world_model import WorldModelError

Part = Literal["all", "fit", "calibration", "held_out"]
RUNNING, SUCCESS, FAILED = range(3)  # how a look finds the episode; FAILED: ended without success, time-outs excluded
FULL_SHARE = 0.6  # of gaps that are as long as the looks allow


def part_of(entry: Entry) -> Part:
    """By task and seed: a tenth of the starts is held out to judge the model, a tenth calibrates it (thresholds)."""
    tenth = zlib.crc32(f"{entry.task}/{entry.seed}".encode()) % 10
    return "held_out" if tenth == 0 else "calibration" if tenth == 1 else "fit"


@dataclass(frozen=True, kw_only=True)
class Clip(TensorDataclass):
    """M predictions in a row. ``frames[:, 0]`` is the present; ``length`` 0 marks padding behind an episode's end."""

    first: UInt8[Tensor, "*B cameras height width 3"]
    first_state: Float[Tensor, "*B state_dim"]
    previous: UInt8[Tensor, "*B cameras height width 3"]
    previous_state: Float[Tensor, "*B state_dim"]
    past_action: Float[Tensor, "*B H A"]
    past_length: Int[Tensor, "*B"]
    frames: UInt8[Tensor, "*B M_plus_1 cameras height width 3"]
    state: Float[Tensor, "*B M_plus_1 state_dim"]
    action: Float[Tensor, "*B M H A"]
    length: Int[Tensor, "*B M"]
    outcome: Int[Tensor, "*B M_plus_1"]
    number: Int[Tensor, "*B M_plus_1"]  # of the looks
    text: UInt8[Tensor, "*B text_bytes"]


@dataclass(frozen=True, kw_only=True)
class Transitions(TensorDataclass):
    """A chunk from each of N moments, without pictures."""

    previous_state: Float[Tensor, "*N state_dim"]
    state: Float[Tensor, "*N state_dim"]
    next_state: Float[Tensor, "*N state_dim"]
    past_action: Float[Tensor, "*N H A"]
    past_length: Int[Tensor, "*N"]
    action: Float[Tensor, "*N H A"]
    length: Int[Tensor, "*N"]


class ClipSampler:
    """Draws clips from the episodes of some stores; images stay in their memory-mapped files.

    ``part``: of the starts, as ``part_of`` says, so no start is in two parts.
    Raises WorldModelError when nothing matches, when a camera or a dimension differs, or for NaN.
    """

    def __init__(
        self,
        stores: Sequence[EpisodeStore],
        *,
        action_horizon: int,
        cameras: Sequence[str] | None = None,
        where: Selection = EVERYTHING,
        part: Part = "all",
    ) -> None:
        chosen = [(s, e) for s in stores for e in s.select(where) if part in ("all", part_of(e))]
        names = ", ".join(str(store.path) for store in stores)
        if not chosen:
            raise WorldModelError(
                f"{names}: no episode matches {where} (part {part}); record some with: vla-rl collect"
            )
        self.action_horizon = action_horizon
        self._arrays: list[Arrays] = [store.map(entry) for store, entry in chosen]
        self.entries = entries = [entry for _, entry in chosen]
        sizes = frame_sizes(self._arrays[0])
        self.cameras = tuple(sizes) if cameras is None else tuple(cameras)
        for (store, entry), arrays in zip(chosen, self._arrays, strict=True):
            _check(f"{store.file(entry.id)}", arrays, self._arrays[0], self.cameras)
        self.image_size = sizes[self.cameras[0]]
        self._text = encode_instructions([entry.instruction for entry in entries])
        self._outcome = [_outcomes(arrays) for arrays in self._arrays]
        self._look_steps = [np.asarray(arrays["observation_steps"], dtype=np.int64) for arrays in self._arrays]
        gaps = max(int(np.diff(steps).max(initial=0)) for steps in self._look_steps)
        if gaps > action_horizon:
            raise WorldModelError(
                f"{names}: looks lie up to {gaps} control steps apart, the model predicts at most "
                f"{action_horizon}; record episodes with a look at least every {action_horizon} steps"
            )
        looks = [len(steps) for steps in self._look_steps]
        self._first_look = np.cumsum([0, *looks[:-1]])
        self._episode = np.repeat(np.arange(len(looks)), looks)
        self._look = np.concatenate([np.arange(count) for count in looks])
        self._starts = np.flatnonzero(np.concatenate([np.arange(n) < n - 1 for n in looks]))
        self._by_outcome = np.concatenate(self._outcome)
        self._to_end = np.concatenate([steps[-1] - steps for steps in self._look_steps])

    def __len__(self) -> int:
        """Moments that something follows."""
        return len(self._starts)

    @property
    def state_dim(self) -> int:
        return self._arrays[0]["state"].shape[1]

    @property
    def action_dim(self) -> int:
        return self._arrays[0]["action"].shape[1]

    def look_steps(self, episode: int) -> Int[np.ndarray, " L"]:
        """Control steps before each look of an episode."""
        return self._look_steps[episode]

    def actions(self, episode: int) -> Float[Tensor, "T A"]:
        """All actions of an episode."""
        return torch.from_numpy(np.array(self._arrays[episode]["action"]))

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """All states, all actions, and changes of state over (up to) a chunk."""
        state = torch.from_numpy(np.concatenate([np.array(a["state"]) for a in self._arrays]))
        action = torch.from_numpy(np.concatenate([np.array(a["action"]) for a in self._arrays]))
        changes = []
        for arrays, steps in zip(self._arrays, self._look_steps, strict=True):
            later = np.searchsorted(steps, steps + self.action_horizon, side="right") - 1
            changes.append(np.array(arrays["state"])[later] - np.array(arrays["state"]))
        return state, action, torch.from_numpy(np.concatenate(changes))

    def draw(self, rng: np.random.Generator, batch: int, chunks: int) -> Clip:
        """``batch`` clips of ``chunks`` predictions, every moment alike likely."""
        return self.at(self.starts(rng, batch), chunks, rng)

    def starts(self, rng: np.random.Generator, count: int) -> Int[np.ndarray, " count"]:
        """Numbers of looks that something follows, each alike likely."""
        return self._starts[rng.integers(len(self._starts), size=count)]

    def has_next(self, rows: Int[np.ndarray, " B"]) -> Bool[np.ndarray, " B"]:
        """Whether something follows these looks."""
        return self._to_end[rows] > 0

    def at(self, rows: Int[np.ndarray, " B"], chunks: int, rng: np.random.Generator) -> Clip:
        """Clips that start at these looks, by number."""
        return Clip.stack([self.clip(int(self._episode[r]), int(self._look[r]), chunks, rng) for r in rows])

    def draw_near_ends(self, rng: np.random.Generator, batch: int, chunks: int, *, within: int) -> Clip:
        """Clips that start at most ``within`` control steps before an episode's end: near successes and failures."""
        near = self._starts[self._to_end[self._starts] <= within]
        return self.at(near[rng.integers(len(near), size=batch)], chunks, rng)

    def clip(self, episode: int, look: int, chunks: int, rng: np.random.Generator | None = None) -> Clip:
        """The clip from this look on; without ``rng`` every gap is as long as the looks allow."""
        arrays, steps = self._arrays[episode], self._look_steps[episode]
        path = [look]
        for _ in range(chunks):
            path.append(self._after(steps, path[-1], rng))
        before = self._before(steps, look)
        length = np.diff(steps[path])
        state = np.array(arrays["state"])
        return Clip(
            first=self._frame(arrays, 0),
            first_state=torch.from_numpy(state[0]),
            previous=self._frame(arrays, before),
            previous_state=torch.from_numpy(state[before]),
            past_action=self._actions(arrays, steps[before], steps[look]),
            past_length=torch.tensor(steps[look] - steps[before]),
            frames=torch.stack([self._frame(arrays, at) for at in path]),
            state=torch.from_numpy(state[path]),
            action=self._chunks(arrays, steps[path]),
            length=torch.from_numpy(length),
            outcome=torch.from_numpy(self._outcome[episode][path]),
            number=torch.from_numpy(self._first_look[episode] + np.array(path)),
            text=self._text[episode],
        )

    def transitions(self, rng: np.random.Generator) -> Transitions:
        """One chunk from every moment that something follows, in numbers alone."""
        return Transitions.stack(
            [self._transition(int(self._episode[r]), int(self._look[r]), rng) for r in self._starts]
        )

    def _transition(self, episode: int, look: int, rng: np.random.Generator) -> Transitions:
        arrays, steps = self._arrays[episode], self._look_steps[episode]
        before, after = self._before(steps, look), self._after(steps, look, rng)
        states = torch.from_numpy(np.array(arrays["state"][[before, look, after]]))
        return Transitions(
            previous_state=states[0],
            state=states[1],
            next_state=states[2],
            past_action=self._actions(arrays, steps[before], steps[look]),
            past_length=torch.tensor(steps[look] - steps[before]),
            action=self._actions(arrays, steps[look], steps[after]),
            length=torch.tensor(steps[after] - steps[look]),
        )

    def _before(self, steps: np.ndarray, look: int) -> int:
        """The look a chunk earlier, or the first one."""
        return int(np.searchsorted(steps, steps[look] - self.action_horizon))

    def _after(self, steps: np.ndarray, look: int, rng: np.random.Generator | None) -> int:
        """The look a chunk later or the last one; with ``rng``, some gaps are shorter."""
        farthest = int(np.searchsorted(steps, steps[look] + self.action_horizon, side="right")) - 1
        if rng is not None and farthest > look + 1 and rng.random() > FULL_SHARE:
            farthest = int(rng.integers(look + 1, farthest + 1))
        return farthest

    def looks(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Single looks by number: frames [B, cameras, h, w, 3], state, text, outcome."""
        pairs = [(int(self._episode[r]), int(self._look[r])) for r in rows]
        frames = torch.stack([self._frame(self._arrays[e], look) for e, look in pairs])
        state = torch.from_numpy(np.stack([self._arrays[e]["state"][look] for e, look in pairs]))
        return frames, state, self._text[self._episode[rows]], torch.from_numpy(self._by_outcome[rows])

    def first_looks(self, rows: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Numbers of the first looks of the episodes that these looks belong to."""
        return self._first_look[self._episode[rows]]

    def ends(self, rows: Int[np.ndarray, " B"]) -> tuple[Float[Tensor, "B state_dim"], Bool[Tensor, " B"]]:
        """The state at the last look of these looks' episodes, and whether it was a success."""
        episodes = self._episode[rows]
        states = np.stack([self._arrays[e]["state"][-1] for e in episodes])
        return torch.from_numpy(states), torch.tensor([self.entries[e].success for e in episodes])

    def looks_by_outcome(self, outcome: int) -> np.ndarray:
        """Numbers of the looks that found their episode so."""
        return np.flatnonzero(self._by_outcome == outcome)

    def looks_near_end(self, *, within: int) -> np.ndarray:
        """Numbers of running looks at most ``within`` control steps before their episode's end."""
        return np.flatnonzero((self._by_outcome == RUNNING) & (self._to_end <= within) & (self._to_end > 0))

    def _chunks(self, arrays: Arrays, at: np.ndarray) -> Float[Tensor, "M H A"]:
        if len(at) == 1:
            return torch.zeros(0, self.action_horizon, self.action_dim)
        return torch.stack([self._actions(arrays, a, b) for a, b in itertools.pairwise(at)])

    def _actions(self, arrays: Arrays, begin: int, end: int) -> Tensor:
        out = np.zeros((self.action_horizon, arrays["action"].shape[1]), dtype=np.float32)
        out[: end - begin] = arrays["action"][begin:end]
        return torch.from_numpy(out)

    def _frame(self, arrays: Arrays, look: int) -> Tensor:
        return torch.from_numpy(np.stack([frame(arrays, camera, look) for camera in self.cameras]))


def _outcomes(arrays: Arrays) -> np.ndarray:
    """Of every look: what the step before it reported."""
    steps = np.asarray(arrays["observation_steps"], dtype=np.int64)
    before = np.maximum(steps - 1, 0)
    success = np.asarray(arrays["success"])[before]
    ended = np.asarray(arrays["terminated"])[before]
    return np.where(steps == 0, RUNNING, np.where(success, SUCCESS, np.where(ended, FAILED, RUNNING))).astype(np.int64)


def _check(name: str, arrays: Arrays, first: Arrays, cameras: Sequence[str]) -> None:
    """One robot, one set of cameras, numbers that are numbers."""
    sizes = frame_sizes(arrays)
    if missing := [camera for camera in cameras if camera not in sizes]:
        raise WorldModelError(f"{name}: no camera {missing[0]!r}; recorded are {', '.join(sizes)}")
    for what in ("state", "action"):
        got, expected = arrays[what].shape[1], first[what].shape[1]
        if got != expected:
            raise WorldModelError(f"{name}: {got} {what} dimensions, the other episodes have {expected}")
        if not np.isfinite(arrays[what]).all():
            raise WorldModelError(f"{name}: {what} has NaN or infinite entries; delete the episode from the store")
    if len({sizes[camera] for camera in cameras} | {frame_sizes(first)[cameras[0]]}) > 1:
        raise WorldModelError(f"{name}: cameras differ in size {sizes}; select episodes of one size")
