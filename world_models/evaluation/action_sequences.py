"""Recorded action sequences, executed again in the environment that recorded them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from episodes.overlays import recorded_id
from sims.devices.crossing import crossing
from sims.vector_env import StartState, VectorEnv
from world_models.data.clip_sampler import ClipSampler
from world_models.world_model import WorldModelError

EXTRA_STEPS = 8  # control steps that an imagined episode may take longer than the recorded one


@dataclass(frozen=True, kw_only=True)
class ActionSequence:
    """Recorded actions [T, A], and the episode (of the clips) from whose start they are executed."""

    episode: int
    action: Float[Tensor, "T A"]


def recorded_sequences(clips: ClipSampler) -> list[ActionSequence]:
    """Every episode whose outcome is known, with its own actions. WorldModelError without one."""
    known = [i for i in range(len(clips.entries)) if clips.outcome(i) is not None]
    if not known:
        raise WorldModelError(
            f"of {len(clips.entries)} episodes to compare with, all were aborted or rewound, so their outcome is "
            "unknown: label them (EpisodeStore.label), or record more with: vla-rl collect"
        )
    return [ActionSequence(episode=i, action=clips.actions(i)) for i in known]


def true_outcomes(clips: ClipSampler, sequences: Sequence[ActionSequence]) -> Bool[Tensor, " N"]:
    """Success of the episodes of ``recorded_sequences``."""
    return torch.tensor([clips.outcome(sequence.episode) is True for sequence in sequences])


def startable(clips: ClipSampler, env: VectorEnv | None) -> list[int]:
    """Episodes that begin where ``env`` can be reset to: where their recording begins. Without ``env`` all."""
    return [i for i, entry in enumerate(clips.entries) if env is None or entry.first == 0]


def swapped_sequences(clips: ClipSampler, env: VectorEnv | None, *, seed: int, count: int) -> list[ActionSequence]:
    """Starts of successful episodes with the actions of other successful episodes of the same task.

    Not of another part of the same recording. ``env``: where they are to be executed.
    """
    rng, entries = np.random.default_rng(seed), clips.entries
    succeeded = [i for i in range(len(entries)) if clips.outcome(i)]
    starts = set(startable(clips, env))
    sequences: list[ActionSequence] = []
    for i in rng.permutation([i for i in succeeded if i in starts]).tolist():
        task, recording = entries[i].task, recorded_id(entries[i].id)
        others = [j for j in succeeded if entries[j].task == task and recorded_id(entries[j].id) != recording]
        if others:
            sequences.append(ActionSequence(episode=i, action=clips.actions(int(rng.choice(others)))))
    return sequences[:count]


def repeat_last(action: Float[Tensor, "T A"], length: int) -> Float[Tensor, "T_or_length A"]:
    """The last action repeated until there are at least ``length``."""
    return torch.cat([action, action[-1:].expand(length - len(action), -1)]) if len(action) < length else action


def replay(
    env: VectorEnv, clips: ClipSampler, sequences: Sequence[ActionSequence], steps: int
) -> Iterator[Bool[Tensor, " N"]]:
    """Execute up to ``env.spec.num_envs`` sequences for ``steps`` in the environment that recorded the episodes.

    They start where their episodes' recordings do (``startable``). After its end the last action repeats. Yields after
    every step which environments report success.
    """
    env_ids, entries = list(range(len(sequences))), [clips.entries[sequence.episode] for sequence in sequences]
    env.reset(env_ids, start=[StartState(task=env.spec.tasks.index(e.task), seed=e.seed) for e in entries])
    action = torch.zeros(env.spec.num_envs, steps, env.spec.action_dim)
    action[env_ids] = torch.stack([repeat_last(sequence.action, steps)[:steps] for sequence in sequences])
    for i in range(steps):
        yield env.step(action[:, i].to(env.spec.device)).success[env_ids].cpu()


@torch.no_grad()
@crossing("evaluation")
def true_success(env: VectorEnv, clips: ClipSampler, sequences: Sequence[ActionSequence]) -> Bool[Tensor, " N"]:
    """Success of the sequences in the environment that recorded the episodes, within EXTRA_STEPS of their end."""
    success = torch.zeros(len(sequences), dtype=torch.bool)
    for begin in range(0, len(sequences), env.spec.num_envs):
        part = sequences[begin : begin + env.spec.num_envs]
        limit = torch.tensor([len(sequence.action) for sequence in part]) + EXTRA_STEPS
        for i, reported in enumerate(replay(env, clips, part, int(limit.max()))):
            success[begin : begin + len(part)] |= reported & (i < limit)
    return success
