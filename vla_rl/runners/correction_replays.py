"""What a round of off-policy learning from corrections replays: whole episodes, and of these what people chose.

    own               every chunk of the corrected episodes, the policy's, a person's and those that they share
    demonstrations    chunks that an expert or a person chose alone

A person's chunks are in both, as in HIL-SERL (Luo et al. 2024, arXiv:2410.21845). All are stored as executed. Of an
episode that was aborted or rewound nothing is a demonstration and nothing is cloned, nor are steps on hold. Rewards
are of the outcome as it is labelled now: 1 at the first step that shows success.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from episodes.outcomes.rewards import with_outcome
from episodes.overlays import outcome_unknown
from episodes.store import EpisodeStore, Selection
from policies.bundle import Provenance, save_bundle
from policies.policy import Policy, set_frozen
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from vla_rl.algorithms.off_policy_settings import RecordedUpdatesConfig
from vla_rl.algorithms.off_policy_updates import RecordedUpdates, stored_example
from vla_rl.replay.demonstrations import ChunkSequence, chunk_sequences, demonstrated, replay_of
from vla_rl.replay.replay import Replay
from vla_rl.runners.fit import run_fit
from vla_rl.runners.imitation import SUCCESSES
from vla_rl.runs.run_dir import git_revision


class NothingToLearn(UserError):
    """From these episodes no other policy would come."""


@dataclass(frozen=True, kw_only=True)
class Replays:
    """``digest``: of the episodes, their cuts and outcomes."""

    own: Replay
    demonstrations: Replay
    digest: str


def correction_replays(
    policy: Policy,
    episodes: Path,
    demonstrations: Sequence[Path],
    *,
    ids: frozenset[str],
    settings: RecordedUpdatesConfig,
    seed: int,
) -> Replays:
    """Of the corrected ``episodes`` with these ``ids``, and the successes of the stores ``demonstrations``.

    NothingToLearn where no chunk was a person's, or an expert's, alone.
    """
    set_frozen(policy, settings.frozen)  # what a frozen encoder makes of an observation is stored
    gamma, digest = settings.gamma, hashlib.sha256()
    own = list(_sequences(episodes, Selection(ids=ids), policy, gamma, digest))
    given = [chunks for path in demonstrations for chunks in _sequences(path, SUCCESSES, policy, gamma, digest)]
    chosen = [chunks for chunks in map(demonstrated, [*given, *own]) if chunks.num_executed.any()]
    if not chosen:
        raise NothingToLearn(
            f"{episodes}: nowhere did a person drive for {policy.spec.action_horizon} control steps, the policy's "
            "action horizon, or to the end of an episode; what was aborted or rewound does not count unless it is "
            "labelled"
        )
    policy.plan_storage(sum(map(len, [*own, *chosen])), in_host=True)
    example = stored_example(policy)

    def replay(found: Sequence[ChunkSequence], name: str) -> Replay:
        return replay_of(found, policy, example, gamma=gamma, seed=spawn_seed(seed, name))

    return Replays(
        own=replay(own, "replay"), demonstrations=replay(chosen, "demonstrations"), digest=digest.hexdigest()
    )


def _sequences(
    path: Path, where: Selection, policy: Policy, gamma: float, digest: hashlib._Hash
) -> Iterator[ChunkSequence]:
    with EpisodeStore(path) as store:
        for entry, labels in store.select_labelled(where):
            episode, given_up = with_outcome(store, entry), outcome_unknown(labels)
            digest.update(f"{entry.id}{entry.span or ''}{given_up}".encode())
            for outcome in (episode.reward, episode.terminated, episode.truncated):
                digest.update(outcome.tobytes())
            horizon = policy.spec.action_horizon
            yield from chunk_sequences(episode, action_horizon=horizon, gamma=gamma, given_up=given_up)


def learn_replays(
    policy: Policy,
    replays: Replays,
    config: RecordedUpdatesConfig,
    folder: Path,
    *,
    seed: int,
    parent: str,
    checkpoint_s: float,
) -> None:
    """Train ``policy`` from them; leaves ``bundle`` in ``folder``. Started again with equal arguments, it continues.

    ``parent``: hash of the weights that ``policy`` starts from. ``checkpoint_s``: as of ``run_fit``.
    """
    fit = RecordedUpdates(config, policy, replays.own, replays.demonstrations, seed=seed)
    shown = "q_loss" if config.recap is None else "value_loss"
    run_fit(fit, folder, title="learn", shown=shown, checkpoint_every=500, checkpoint_s=checkpoint_s)
    policy.prepare_to_explore()
    save_bundle(policy, folder / "bundle", provenance=Provenance(git_revision=git_revision(), parent=parent))
