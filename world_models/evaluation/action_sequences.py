"""Recorded action sequences, executed again in the environment that recorded them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from episodes.overlays import recorded_id
from sims.devices.crossing import crossing
from sims.starts import Restarts
from sims.vector_env import StartState, Step, VectorEnv
from world_models.data.clip_sampler import ClipSampler
from world_models.world_model import WorldModelError

EXTRA_STEPS = 8  # control steps that an imagined episode may take longer than the recorded one


@dataclass(frozen=True, kw_only=True)
class ActionSequence:
    """Recorded actions [T, A], and the episode (of the clips) from whose start they are executed."""

    episode: int
    action: Float[Tensor, "T A"]


@dataclass(frozen=True, kw_only=True)
class Executed:
    """What sequences led to. ``success``: of each, within EXTRA_STEPS of its end. ``control_steps``: of all their
    episodes until these ended, in attempts in which the simulator failed too."""

    success: Bool[Tensor, " N"]
    control_steps: int


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


@torch.no_grad()
@crossing("evaluation")
def execute(
    env: VectorEnv,
    clips: ClipSampler,
    sequences: Sequence[ActionSequence],
    *,
    after_step: Callable[[int], None] | None = None,
) -> Executed:
    """The sequences in the environment that recorded the episodes, where their recordings start (``startable``).

    One in which the simulator fails is executed again; UserError where that goes on (``Restarts``). ``after_step``:
    called with the number of steps since the sequences' start, after each of them.
    """
    starts = [_start(env, clips, sequence) for sequence in sequences]
    success, taken = torch.zeros(len(sequences), dtype=torch.bool), 0
    waiting, restarts = list(range(len(sequences))), Restarts()
    while waiting:
        rows, waiting = waiting[: env.spec.num_envs], waiting[env.spec.num_envs :]
        part = [sequences[row] for row in rows]
        limit = torch.tensor([len(sequence.action) for sequence in part]) + EXTRA_STEPS
        done = torch.zeros(len(rows), dtype=torch.bool)
        reached, failed = done.clone(), done.clone()
        for i, step in enumerate(_replay(env, part, [starts[row] for row in rows], int(limit.max()))):
            taken += int((~done).sum())
            done |= step.done
            failed |= ~step.valid
            reached |= step.success & (i < limit)
            if after_step is not None:
                after_step(i + 1)
        success[rows] = reached & ~failed
        again = [row for row, once_more in zip(rows, failed.tolist(), strict=True) if once_more]
        restarts.add([starts[row] for row in again])
        waiting += again
    return Executed(success=success, control_steps=taken)


def _start(env: VectorEnv, clips: ClipSampler, sequence: ActionSequence) -> StartState:
    entry = clips.entries[sequence.episode]
    return StartState(task=env.spec.tasks.index(entry.task), seed=entry.seed)


def _replay(
    env: VectorEnv, sequences: Sequence[ActionSequence], starts: Sequence[StartState], steps: int
) -> Iterator[Step]:
    """Execute up to ``env.spec.num_envs`` sequences for ``steps``; after its end the last action repeats.

    Yields each step, on the host.
    """
    env_ids = list(range(len(sequences)))
    env.reset(env_ids, start=starts)
    action = torch.zeros(env.spec.num_envs, steps, env.spec.action_dim)
    action[env_ids] = torch.stack([repeat_last(sequence.action, steps)[:steps] for sequence in sequences])
    for i in range(steps):
        yield env.step(action[:, i].to(env.spec.device))[env_ids].to("cpu")
