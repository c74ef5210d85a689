"""Recorded episodes as a replay: what the policy stores of each observation, the base's own actions among it.

An episode that was observed at more steps than a policy of action horizon h would observe is cut into several
sequences, one for each remainder of t / h, so that every recorded observation is used and each is followed by the
observation h steps later. A sequence begins with the policy's initial state and, of the observations before it, those
that the policy's memory would hold (``PolicySpec.past_steps``).

    observed at   0  2  4  6  8    h = 4: sequences 0 4 8 and 2 6

A chunk is stored as it was executed, whoever chose its actions; it is a person's only if the person chose them all:

    actor         p  p  p  p  p  h  h  h  h  h  h  h       p: policy, h: human
    observed at   0           4  5  6  7  8  9  10 11 12   h = 4: at 4 of several, from 5 on a person's

Of a chunk the actions before the first step on hold may be cloned, and none of an episode that was given up (aborted or
rewound: ``outcome_unknown``). Both are transitions for the critics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64

from episodes.outcomes.rewards import rewarded
from episodes.overlays import outcome_labelled, outcome_unknown
from episodes.schema import EXPERT, HOLD, HUMAN, POLICY, Episode
from episodes.store import EVERYTHING, EpisodeStore, Selection
from policies.policy import Policy, RobotSpec
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, encode_instructions
from vla_rl.heartbeat import beat
from vla_rl.replay.replay import SEVERAL, Entries, Replay
from vla_rl.rollouts.collector import put

ENCODED_AT_ONCE = 128
DEMONSTRATORS = (EXPERT, HUMAN)


@dataclass(frozen=True, kw_only=True)
class ChunkSequence:
    """Observations of one episode that are a chunk apart (their indices), and the chunks between them.

    The last one may be an observation that no known chunk follows: ``num_executed`` 0. ``timed_out``, ``actor``,
    ``num_cloned``: as of ``Entries``.
    """

    episode: Episode
    observation: Int64[np.ndarray, " n"]
    action: Float32[np.ndarray, "n H A"]
    reward: Float32[np.ndarray, " n"]
    num_executed: Int64[np.ndarray, " n"]
    terminated: Bool[np.ndarray, " n"]
    timed_out: Bool[np.ndarray, " n"]
    actor: Int64[np.ndarray, " n"]
    num_cloned: Int64[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.observation)


def chunk_sequences(
    episode: Episode, *, action_horizon: int, gamma: float, given_up: bool = False
) -> Iterator[ChunkSequence]:
    """All sequences of an episode that hold a transition; none goes on behind the first step that is terminated.

    ``given_up``: nothing of it may be cloned.
    """
    steps, observed = _steps(episode), episode.observation_steps.astype(np.int64)
    for remainder in np.unique(observed % action_horizon):
        index = np.flatnonzero((observed % action_horizon == remainder) & (observed < steps))
        breaks = np.flatnonzero(np.diff(observed[index]) != action_horizon) + 1
        for part in np.split(index, breaks):
            if not len(part):
                continue
            last = observed[part[-1]]
            ends = last + action_horizon >= steps
            if ends and not episode.terminated[steps - 1] and observed[-1] == steps:  # its true successor
                part = np.append(part, len(observed) - 1)
            chunks = _sequence(episode, part, action_horizon, gamma)
            if chunks.num_executed.any():
                yield replace(chunks, num_cloned=chunks.num_cloned * (not given_up))


def _steps(episode: Episode) -> int:
    """Control steps until its first end."""
    return int(np.argmax(episode.terminated)) + 1 if episode.terminated.any() else episode.num_steps


def _sequence(
    episode: Episode, observation: Int64[np.ndarray, " n"], action_horizon: int, gamma: float
) -> ChunkSequence:
    steps = _steps(episode)
    start = episode.observation_steps.astype(np.int64)[observation]
    ahead = start[:, None] + np.arange(action_horizon)
    executed = np.minimum(action_horizon, steps - start)
    terminated = (start + executed == steps) & bool(episode.terminated[steps - 1])
    executed[-1] = executed[-1] if terminated[-1] else 0
    within = np.arange(action_horizon) < executed[:, None]
    inside = np.minimum(ahead, steps - 1)
    reward = (episode.reward[inside] * within * gamma ** np.arange(action_horizon)).sum(1).astype(np.float32)
    first = episode.actor[inside[:, 0]].astype(np.int64)
    held = (episode.actor[inside] == HOLD) | ~within
    alone = ((episode.actor[inside] == first[:, None]) | ~within).all(1)
    return ChunkSequence(
        episode=episode,
        observation=observation,
        action=episode.action[inside],
        reward=reward,
        num_executed=executed,
        terminated=terminated,
        timed_out=(start == steps) & bool(episode.truncated[steps - 1]),
        actor=np.where(alone, first, SEVERAL),
        num_cloned=np.where(held.any(1), held.argmax(1), action_horizon),
    )


def demonstrated(chunks: ChunkSequence) -> ChunkSequence:
    """Only the chunks that an expert or a person chose and that may be cloned; of others the observation is left, the
    true successor."""
    kept = np.isin(chunks.actor, DEMONSTRATORS) & (chunks.num_cloned > 0)
    executed, terminated = chunks.num_executed * kept, chunks.terminated & kept
    return replace(
        chunks,
        reward=chunks.reward * kept,
        num_executed=executed,
        num_cloned=chunks.num_cloned * kept,
        terminated=terminated,
    )


def recorded_chunk_sequences(
    stores: Sequence[Path], where: Selection = EVERYTHING, *, action_horizon: int, gamma: float
) -> list[ChunkSequence]:
    """The episodes ``where`` of ``stores`` with their rewards (``rewarded``).

    UserError where there are none, where none has a transition, and where those of a store were imported and nothing
    tells their outcome.
    """
    found, read = list[ChunkSequence](), 0
    for path in stores:
        with EpisodeStore(path) as store:
            selected = store.select_labelled(where)
            episodes = [rewarded(store, entry) for entry, _ in selected]
            labelled = any(outcome_labelled(labels) for _, labels in selected)
        imported = bool(episodes) and all("imported" in episode.fingerprint for episode in episodes)
        if imported and not labelled and not any(episode.reward.any() for episode in episodes):
            raise UserError(
                f"{path}: the imported episodes have no rewards and no success, so nothing tells what they are worth: "
                "label them (EpisodeStore.label), or import them into a new store with --success end or a rule"
            )
        read += len(episodes)
        for episode, (_, labels) in zip(episodes, selected, strict=True):
            given_up = outcome_unknown(labels)
            found += chunk_sequences(episode, action_horizon=action_horizon, gamma=gamma, given_up=given_up)
    if not read:
        raise UserError(f"{', '.join(map(str, stores))}: no episode matches {where}; record some with: vla-rl collect")
    if not any(len(chunks) > 1 for chunks in found):
        raise UserError(
            f"{', '.join(map(str, stores))}: no recorded observation is followed by one {action_horizon} control steps "
            f"later, the policy's action horizon; record with start.observe_every that divides {action_horizon}"
        )
    return found


def replay_of(
    found: Sequence[ChunkSequence], policy: Policy, example: TensorDataclass, *, gamma: float, seed: int
) -> Replay:
    """These sequences, each observation encoded once. ``example``: as of ``Replay``. UserError if one is of another
    robot than the policy's."""
    _check_robots(found, policy.spec.robot)
    actions = (policy.spec.action_horizon, policy.spec.robot.action_dim)
    replay = Replay(
        example, actions, streams=1, capacity=sum(map(len, found)), gamma=gamma, seed=seed, device=policy.device
    )
    for first in range(0, len(found), ENCODED_AT_ONCE):
        group = found[first : first + ENCODED_AT_ONCE]
        replay.extend(_entries(group, _encode(policy, group)))
        beat()
    return replay


def _check_robots(found: Sequence[ChunkSequence], robot: RobotSpec) -> None:
    for chunks in found:
        if differences := RobotSpec.recorded(chunks.episode, robot.cameras).differences(robot):
            raise UserError(
                f"episode {chunks.episode.id}: recorded with another robot than the policy's: {differences}; give "
                "stores of one robot, or delete it: EpisodeStore.delete"
            )


@torch.no_grad()
def _encode(policy: Policy, group: Sequence[ChunkSequence]) -> TensorDataclass:
    """What the policy stores of all observations, one sequence after the other; encoded side by side."""
    state = policy.initial_state(len(group))
    records: list[TensorDataclass] = []
    place: list[tuple[int, int]] = []
    for steps in policy.spec.past_steps:
        with crossing("batches"):
            obs = _observe(policy, [(chunks.episode, _before(chunks, steps)) for chunks in group]).to(policy.device)
        state = policy.remember(obs, state)
    for k in range(max(map(len, group))):
        active = [i for i, chunks in enumerate(group) if len(chunks) > k]
        with crossing("batches"):
            index = torch.tensor(active).to(policy.device)
            seen = [(group[i].episode, int(group[i].observation[k])) for i in active]
            obs = _observe(policy, seen).to(policy.device)
            resumed = torch.tensor([k > 0 and _resumes(chunks, k) for chunks in group]).to(policy.device)
        void = policy.forget_plan(state)
        if void is not state:
            state = void.where(resumed, state)
        context, after = policy.encode(obs, state[index])
        state = put(after, index, state)
        record = policy.store(context)
        with crossing("replay"):
            records.append(record.to("cpu"))
        place += [(i, k) for i in active]
    order = sorted(range(len(place)), key=place.__getitem__)
    joined: TensorDataclass = type(records[0]).cat(records)
    return joined[torch.tensor(order)]


def _resumes(chunks: ChunkSequence, k: int) -> bool:
    """Whether the policy acts at observation ``k``, and somebody else did since the one before."""
    if k >= len(chunks):
        return False
    start, actor = chunks.episode.observation_steps.astype(np.int64)[chunks.observation], chunks.episode.actor
    return bool((actor[start[k] :][:1] == POLICY).all() and (actor[start[k - 1] : start[k]] != POLICY).any())


def _before(chunks: ChunkSequence, steps: int) -> int:
    """The last observation of the episode at least so many control steps before the first of these, or the first."""
    observed = chunks.episode.observation_steps.astype(np.int64)
    at = observed[chunks.observation[0]] - steps
    return max(0, int(np.searchsorted(observed, at, side="right")) - 1)


def _observe(policy: Policy, seen: Sequence[tuple[Episode, int]]) -> Observation:
    """Of each episode the observation with this index."""
    cameras = policy.spec.robot.cameras
    frames = [[np.asarray(episode.images[camera][index]) for camera in cameras] for episode, index in seen]
    states = [episode.state[index] for episode, index in seen]
    height, width = policy.spec.robot.image_size
    images = np.array(frames, dtype=np.uint8).reshape(len(seen), len(cameras), height, width, 3)
    return Observation(
        images=torch.from_numpy(images),
        state=torch.from_numpy(np.stack(states)),
        instruction=encode_instructions([episode.instruction for episode, _ in seen]),
    )


def _entries(group: Sequence[ChunkSequence], inputs: TensorDataclass) -> Entries:
    def join(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(chunks, name) for chunks in group]))

    return Entries(
        inputs=inputs,
        action=join("action"),
        reward=join("reward"),
        num_executed=join("num_executed"),
        terminated=join("terminated"),
        policy_version=torch.full((len(inputs),), -1),
        timed_out=join("timed_out"),
        actor=join("actor"),
        num_cloned=join("num_cloned"),
    )
