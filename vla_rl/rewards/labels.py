"""Recorded observations, labeled: does this one show success?

    step of the observation            0   8   16  24  30    an episode of 30 steps, which succeeded at its 30th
    success_steps 0, early_steps 0     -   -   -   -   +
    success_steps 6, early_steps 0     -   -   -   +   +
    success_steps 0, early_steps 6     -   -   -   ?   +     ?: unclear, not used as either

Labels on episodes count (episodes/overlays.py): ``success`` False makes all of an episode negative; True makes the last
observation of an episode positive that was recorded as a failure (of a split one: of its last part); ``success_from``
gives the control step from which its observations are positive. An episode that was aborted or rewound is left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from episodes.catalog import Entry
from episodes.outcomes.success import labelled_success
from episodes.overlays import LabelValue, outcome_unknown
from episodes.packing import Arrays, frame, frame_size, frame_sizes
from episodes.store import EpisodeStore, select_among
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, encode_instructions
from vla_rl.rewards.scorer import RewardModelError, Sensors

Part = Literal["fit", "threshold", "report"]
NEVER = 10**12  # a control step that no episode reaches
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, kw_only=True)
class LabeledBatch(TensorDataclass):
    """``obs.images``: of the chosen cameras."""

    obs: Observation
    success: Bool[Tensor, "*B"]


class LabeledEpisodes:
    """All observations of the episodes of some stores, numbered; images stay in their memory-mapped files.

    ``cameras``: None: those of the first episode. Of each observation: ``episode``, ``step`` (control steps before it),
    ``success`` and ``unclear``; of each episode: ``succeeded``, whether any of them shows success, ``earliest``, the
    step from which success may be declared, and ``terminated``, whether it ended otherwise than by its time limit.
    An episode that several stores hold counts once, as in the first of them; one of unknown outcome not at all.
    Raises RewardModelError where there is no other episode or cameras differ, CorruptEpisode if a file is damaged.
    """

    def __init__(
        self,
        stores: Sequence[EpisodeStore],
        *,
        cameras: Sequence[str] | None = None,
        success_steps: int = 0,
        early_steps: int = 0,
    ) -> None:
        chosen = [found for found in select_among(stores) if not outcome_unknown(found[2])]
        if not chosen:
            names = ", ".join(str(store.path) for store in stores)
            raise RewardModelError(
                f"{names}: no episodes; record some with: vla-rl collect CONFIG --failures (aborted and rewound ones "
                "count once they are labelled a success or a failure)"
            )
        for store, entry, _ in chosen:
            store.verify([entry])
        self.entries: list[Entry] = [entry for _, entry, _ in chosen]
        self._arrays: list[Arrays] = [store.map(entry) for store, entry, _ in chosen]
        self.sensors = _sensors(self._arrays[0], cameras, f"{chosen[0][0].file(chosen[0][1].id)}")
        for (store, entry, _), arrays in zip(chosen, self._arrays, strict=True):
            _check(f"{store.file(entry.id)}", arrays, self.sensors)
        self.instructions = encode_instructions([entry.instruction for entry in self.entries])  # of each episode
        steps = [np.asarray(arrays["observation_steps"], dtype=np.int64) for arrays in self._arrays]
        labels = [
            _labels(arrays, at, labels, entry, success_steps)
            for (_, entry, labels), arrays, at in zip(chosen, self._arrays, steps, strict=True)
        ]
        self.episode: Int[np.ndarray, " F"] = np.repeat(np.arange(len(steps)), [len(at) for at in steps])
        self.step: Int[np.ndarray, " F"] = np.concatenate(steps)
        self.success: Bool[np.ndarray, " F"] = np.concatenate(labels)
        self._position = np.concatenate([np.arange(len(at)) for at in steps])  # within its episode
        self.succeeded: Bool[np.ndarray, " E"] = np.array([label.any() for label in labels])
        first = [int(at[label][0]) if label.any() else NEVER for at, label in zip(steps, labels, strict=True)]
        self.earliest: Int[np.ndarray, " E"] = np.array(first) - early_steps
        self.unclear: Bool[np.ndarray, " F"] = ~self.success & (self.step >= self.earliest[self.episode])
        self.terminated: Bool[np.ndarray, " E"] = np.array([bool(a["terminated"][-1]) for a in self._arrays])

    def __len__(self) -> int:
        """Number of observations."""
        return len(self.episode)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Of its episodes, each once, sorted."""
        return tuple(sorted({entry.task for entry in self.entries}))

    def read(self, index: Int[np.ndarray, " B"]) -> LabeledBatch:
        """The observations with these numbers."""
        pairs = list(zip(self.episode[index].tolist(), self._position[index].tolist(), strict=True))
        names = self.sensors.cameras
        images = np.stack([np.stack([frame(self._arrays[e], name, at) for name in names]) for e, at in pairs])
        obs = Observation(
            images=torch.from_numpy(images),
            state=torch.from_numpy(np.stack([self._arrays[e]["state"][at] for e, at in pairs])),
            instruction=self.instructions[torch.from_numpy(self.episode[index])],
        )
        return LabeledBatch(obs=obs, success=torch.from_numpy(self.success[index]))

    def actions(self, episode: int) -> Float[np.ndarray, "T action_dim"]:
        """All that were executed in this episode."""
        return np.asarray(self._arrays[episode]["action"])

    def episode_states(self, episode: int) -> Float[np.ndarray, "L state_dim"]:
        """Of all observations of this episode."""
        return np.asarray(self._arrays[episode]["state"])

    def states(self, index: Int[np.ndarray, " N"]) -> Float[Tensor, "N state_dim"]:
        """Of these observations."""
        every = np.concatenate([np.asarray(arrays["state"]) for arrays in self._arrays])
        return torch.from_numpy(every[index])

    def parts(self, held_out: float) -> Mapping[Part, Int[np.ndarray, " F"]]:
        """Observations to fit to, to choose the threshold on, and to report on; no start of an episode is in two.

        ``held_out``: share of the starts in each of the latter two, of every task's successes and of its failures.
        """
        starts: dict[tuple[str, int], list[int]] = {}
        for episode, entry in enumerate(self.entries):
            starts.setdefault((entry.task, entry.seed), []).append(episode)
        kinds: dict[tuple[str, bool], list[tuple[str, int]]] = {}
        for start in sorted(starts, key=lambda start: zlib.crc32(f"{start[0]}/{start[1]}".encode())):
            kinds.setdefault((start[0], bool(self.succeeded[starts[start]].any())), []).append(start)
        part_of = np.zeros(len(self.entries), dtype=np.int64)
        for members in kinds.values():
            for rank, start in enumerate(members):
                place = (rank + 0.5) / len(members)
                part_of[starts[start]] = 0 if place > 2 * held_out else 1 if place > held_out else 2
        return {part: np.flatnonzero(part_of[self.episode] == i) for i, part in enumerate(PARTS)}


def _labels(
    arrays: Arrays,
    at: Int[np.ndarray, " L"],
    labels: Mapping[str, LabelValue],
    entry: Entry,
    success_steps: int,
) -> Bool[np.ndarray, " L"]:
    """Which of the observations at control steps ``at`` show success."""
    recorded = np.flatnonzero(np.asarray(arrays["success"]))
    labelled = labelled_success(labels, at, entry, recorded=len(recorded) > 0, success_steps=success_steps)
    if labelled is not None:
        return labelled
    if not len(recorded):
        return np.zeros(len(at), dtype=bool)
    return at >= max(1, recorded[0] + 1 - success_steps)  # the observation after the step that succeeded


def _sensors(arrays: Arrays, cameras: Sequence[str] | None, name: str) -> Sensors:
    chosen = tuple(frame_sizes(arrays) if cameras is None else cameras)
    if not chosen:
        raise RewardModelError(f"{name}: recorded without images; a success classifier needs them")
    size = frame_size(arrays, chosen, name, error=RewardModelError)
    return Sensors(cameras=chosen, image_size=size, state_dim=arrays["state"].shape[1])


def _check(name: str, arrays: Arrays, sensors: Sensors) -> None:
    state_dim = arrays["state"].shape[1]
    if state_dim != sensors.state_dim:
        raise RewardModelError(f"{name}: states have {state_dim} numbers, expected {sensors.state_dim}")
    frame_size(arrays, sensors.cameras, name, expected=sensors.image_size, error=RewardModelError)
