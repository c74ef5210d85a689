"""Windows of recorded experience for imitation: an observation and the action chunk that followed it.

State and actions of all selected episodes are held in memory, end to end; images stay in their files and are copied
from the memory map, one frame per camera and window.

    step          0  1  2  3  4  5  6 | 0  1  2 ...        H = 4, window at step 4 of an episode of 7 steps:
    actor         p  p  p  h  h  h  h |                    action a4 a5 a6 a6, mask 1 1 1 0
    looked        x     x  x     x    |                    window at step 2: a2 a2 a2 a2, mask 1 0 0 0 (a human takes over)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from episodes.catalog import Entry
from episodes.schema import SOURCES, EpisodeError
from episodes.store import EVERYTHING, EpisodeStore, Selection, decode_jpeg
from sims.rows import Rows
from sims.vector_env import Observation, encode_text

_MAPPED_FILES = 16384  # Linux allows 65530 mappings in a process


@dataclass(frozen=True, kw_only=True)
class Batch(Rows):
    """``action[b, i]`` is what was done ``i`` steps after ``obs`` was seen; ``mask`` is 0 where it is padding.

    Padding repeats the last action of the window; it begins where the episode ends or another actor takes over.
    """

    obs: Observation
    action: Float[Tensor, "*B H A"]
    mask: Float[Tensor, "*B H"]


class WindowSampler:
    """Shuffled epochs without replacement; an endless iterator of batches of exactly ``batch_size`` windows.

    A batch may finish one epoch and begin the next. Order depends on ``seed`` and the selected episodes alone, and
    ``state_dict`` is one position in it: a sampler that loads it goes on with exactly the same batches.

    ``actors``: only windows that begin under one of these (``("human",)``: learn from corrections only).
    Raises EpisodeError if nothing matches or episodes differ in shape, CorruptEpisode if a file is torn.
    """

    def __init__(
        self,
        store: EpisodeStore,
        *,
        action_horizon: int,
        batch_size: int,
        seed: int,
        where: Selection = EVERYTHING,
        actors: tuple[str, ...] = SOURCES,
    ):
        if min(action_horizon, batch_size) < 1:
            raise EpisodeError(f"action_horizon {action_horizon} and batch_size {batch_size} must be at least 1")
        entries = store.select(where)
        if not entries:
            raise EpisodeError(f"{store.path}: no episode matches {where}; see what is there with: vla-rl data info")
        self.action_horizon, self.batch_size, self.seed = action_horizon, batch_size, seed
        self.num_episodes = len(entries)
        self._entries = entries
        self._map = lru_cache(_MAPPED_FILES)(lambda episode: store.map(entries[episode]))
        self.cameras, self._image_shape, self._jpeg = _cameras(store, entries, self._map(0))
        self._text = encode_text([entry.instruction for entry in entries])
        self._load(store, actors)
        if not len(self):
            raise EpisodeError(f"{store.path}: no window begins under actors {actors}")
        self._position, self._epoch, self._order = 0, -1, np.empty(0, dtype=np.int64)

    def _load(self, store: EpisodeStore, actors: tuple[str, ...]) -> None:
        """State and actions of all episodes end to end, and the index of windows (looks that an action follows)."""
        wanted = np.array([SOURCES.index(actor) for actor in actors], dtype=np.uint8)
        states, actions, run_ends, windows = [], [], [], []
        first_step = first_look = 0
        for episode, entry in enumerate(self._entries):
            arrays = store.map(entry)
            actor, at = arrays["actor"], arrays["look_steps"]
            changes = np.flatnonzero(np.diff(actor)) + 1
            bounds = np.concatenate([changes, [len(actor)]])
            run_ends.append(first_step + bounds[np.searchsorted(bounds, np.arange(len(actor)), side="right")])
            looks = np.flatnonzero(at < len(actor))
            looks = looks[np.isin(actor[at[looks]], wanted)]
            window = (np.full_like(looks, episode), looks, first_look + looks, first_step + at[looks])
            windows.append(np.stack(window, axis=1))
            states.append(np.array(arrays["state"]))
            actions.append(np.array(arrays["action"]))
            first_step, first_look = first_step + len(actor), first_look + len(at)
        _same_width(store, self._entries, "state", states)
        _same_width(store, self._entries, "action", actions)
        self._state = torch.from_numpy(np.concatenate(states))
        self._action = torch.from_numpy(np.concatenate(actions))
        self._run_end = torch.from_numpy(np.concatenate(run_ends).astype(np.int64))
        self._windows = np.concatenate(windows).astype(np.int64)  # episode, look in it, look overall, step overall

    @property
    def state(self) -> Float[Tensor, "looks state_dim"]:
        """Every state of the selected episodes, to fit a normaliser."""
        return self._state

    @property
    def action(self) -> Float[Tensor, "steps action_dim"]:
        """Every action of the selected episodes, to fit a normaliser."""
        return self._action

    def __len__(self) -> int:
        """Windows in an epoch."""
        return len(self._windows)

    @property
    def epoch(self) -> float:
        """Epochs completed, with the fraction of the present one."""
        return self._position / len(self)

    def __iter__(self) -> WindowSampler:
        return self

    def __next__(self) -> Batch:
        picked = self._next_windows(self.batch_size)
        return self.windows(picked)

    def windows(self, picked: np.ndarray) -> Batch:
        """The windows with these numbers in 0 .. len - 1, in this order."""
        episode, look, state_row, step = self._windows[picked].T
        ahead = torch.from_numpy(step)[:, None] + torch.arange(self.action_horizon)
        end = self._run_end[torch.from_numpy(step)][:, None]
        obs = Observation(
            images=self._images(episode, look),
            state=self._state[torch.from_numpy(state_row)],
            text=self._text[torch.from_numpy(episode)],
        )
        return Batch(obs=obs, action=self._action[torch.minimum(ahead, end - 1)], mask=(ahead < end).float())

    def _next_windows(self, count: int) -> np.ndarray:
        picked = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, offset = divmod(self._position, len(self))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self))
            part = self._order[offset : offset + count - filled]
            picked[filled : filled + len(part)] = part
            filled += len(part)
            self._position += len(part)
        return picked

    def _images(self, episode: np.ndarray, look: np.ndarray) -> Tensor:
        out = torch.empty((len(look), len(self.cameras), *self._image_shape), dtype=torch.uint8)
        frames = out.numpy()
        for row, (e, at) in enumerate(zip(episode.tolist(), look.tolist(), strict=True)):
            arrays = self._map(e)
            for column, camera in enumerate(self.cameras):
                if self._jpeg:
                    frame = decode_jpeg(arrays[f"jpeg/{camera}/blob"], arrays[f"jpeg/{camera}/offsets"], at)
                else:
                    frame = arrays[f"images/{camera}"][at]
                frames[row, column] = frame
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "seed": self.seed, "windows": len(self), "episodes": self._digest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises EpisodeError if the state belongs to other episodes or another seed: order would not be the same."""
        own = self.state_dict()
        for name in ("seed", "windows", "episodes"):
            if own[name] != state[name]:
                raise EpisodeError(
                    f"cannot resume the sampler exactly: {name} was {state[name]}, now it is {own[name]}; "
                    "train on the same store and settings, or start a new run"
                )
        self._position = int(state["position"])

    def _digest(self) -> str:
        return hashlib.sha256("".join(entry.id for entry in self._entries).encode()).hexdigest()


def _cameras(
    store: EpisodeStore, entries: list[Entry], first: dict[str, np.ndarray]
) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Camera names, the shape of a frame, and whether frames are JPEG; the same in all episodes or EpisodeError."""

    def look_at(entry: Entry) -> dict[str, tuple[int, ...]]:
        return {
            name.removesuffix("/blob"): shape[1:] if name.startswith("images/") else ()
            for name, (_, _, shape) in entry.layout.items()
            if name.startswith("images/") or name.endswith("/blob")
        }

    expected = look_at(entries[0])
    for entry in entries:
        if look_at(entry) != expected:
            raise EpisodeError(
                f"{store.file(entry.id)}: images are {look_at(entry)}, but {expected} in {entries[0].id}; "
                "select episodes with the same cameras"
            )
    names = tuple(name.split("/")[1] for name in expected)
    jpeg = any(name.startswith("jpeg/") for name in expected)
    shapes = set(expected.values())
    if jpeg:
        shapes = {decode_jpeg(first[f"jpeg/{n}/blob"], first[f"jpeg/{n}/offsets"], 0).shape for n in names}
    if len(shapes) > 1:
        raise EpisodeError(f"{store.path}: cameras differ in size ({sorted(shapes)}); a batch needs one size")
    return names, (shapes.pop() if shapes else (0, 0, 3)), jpeg


def _same_width(store: EpisodeStore, entries: list[Entry], name: str, arrays: list[np.ndarray]) -> None:
    for entry, array in zip(entries, arrays, strict=True):
        if array.shape[1] != arrays[0].shape[1]:
            raise EpisodeError(
                f"{store.file(entry.id)}: {name} has {array.shape[1]} dimensions, but {arrays[0].shape[1]} in "
                f"{entries[0].id}; select episodes of one robot"
            )
