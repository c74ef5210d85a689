"""A policy learns from corrections, in rounds: each trains the published policy on what is there and publishes it.

A round notes what it begins with; a learner that was killed, at any moment, continues it from its newest checkpoint:

    learning/round-003/round.json      begun, and whether published
                       checkpoints     one every few seconds
                       bundle          trained; the last thing is to publish it
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from episodes.files import write_atomically
from episodes.sampler import WindowSampler
from episodes.store import EVERYTHING, EpisodeStore, is_store
from policies.bundle import MANIFEST, bundle_version, copy_bundle, load_bundle, read_bundle_info
from policies.device import select_device
from policies.policy import Policy
from policies.residual.critic_guided import CriticGuided
from policies.residual.policy import ResidualConfig, ResidualPolicy, residual_on
from real_robot.corrections.training import LEARNING, round_number, sorted_rounds
from real_robot.serving.published import PublishedVersions, changing_published
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from vla_rl.algorithms.encoded_windows import encode_windows
from vla_rl.algorithms.off_policy_updates import made_conditional
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.loader import flat_settings
from vla_rl.runners.correction_replays import NothingToLearn, Replays, correction_replays, learn_replays
from vla_rl.runners.correction_sources import cloning_sources, corrected_episodes, measured_share
from vla_rl.runners.corrections import BUNDLE, EPISODES
from vla_rl.runners.imitation import SUCCESSES, clone_windows, divide, window_samplers
from vla_rl.runs.run_dir import lock_folder

POLL_S, CHECKPOINT_S = 2.0, 5.0
FEATURE_WINDOWS = 256
RECORD = "round.json"


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round learns from. It is continued only as long as nothing of it changes.

    ``parent``: the version that it starts from. ``episodes``: those of the corrections' store that are learned
    from, ``corrected``: successes that a person corrected. ``human_share``: of a batch. ``data``: every sampler's order
    of windows, or what is replayed.
    """

    parent: str
    episodes: frozenset[str]
    corrected: frozenset[str]
    human_share: float
    settings: dict[str, Any]
    data: list[dict[str, Any]]
    published: bool = False


_ROUND = TypeAdapter(Round)


def learn(folder: Path, config: CorrectionsConfig, *, watch: bool) -> Iterator[dict[str, Any]]:
    """``vla-rl learn``: rounds of training on ``folder``'s corrections; {round, corrected_episodes, version} each.

    ``watch``: a round whenever there are enough new corrected episodes and a chunk to learn from; else one, from all
    there are. A round that was interrupted comes first. UserError if there are no corrections, or where another process
    learns from them.
    """
    if not (folder / BUNDLE).exists():
        raise UserError(f"{folder} has no {BUNDLE}; make corrections with: vla-rl correct BUNDLE --out {folder}")
    with lock_folder(folder / LEARNING):
        yield from _rounds(folder, config, watch=watch)


def _rounds(folder: Path, config: CorrectionsConfig, *, watch: bool) -> Iterator[dict[str, Any]]:
    actors = config.learning.actors
    useless: frozenset[str] | None = None  # the episodes, where no round could learn from them
    while True:
        corrected = set(corrected_episodes(folder / EPISODES, actors)) if is_store(folder / EPISODES) else set()
        rounds = read_rounds(folder)
        new = corrected - rounds[-1][1].corrected if rounds and watch else corrected
        under_way = bool(rounds) and not rounds[-1][1].published and not _was_refused(folder, *rounds[-1], config)
        if corrected and (under_way or len(new) >= (config.learning.episodes_per_round if watch else 1)):
            ids = _ids(folder, config)
            if ids != useless:
                try:
                    learned = learn_round(folder, config)
                except NothingToLearn as error:
                    if not watch:
                        raise
                    useless = ids
                    print(f"{error}; waiting for other corrections", file=sys.stderr, flush=True)
                else:
                    yield learned
        elif not watch:
            who = "that a person corrected" if actors == ("human",) else f"of {' or '.join(actors)}"
            what = f"{folder / EPISODES} has no successful episode {who}"
            raise UserError(f"{what}; make corrections with: vla-rl correct BUNDLE --out {folder}")
        if not watch:
            return
        threading.Event().wait(POLL_S)


def learn_round(folder: Path, config: CorrectionsConfig) -> dict[str, Any]:
    """Clone what the configuration says, from the published policy on, and publish it; or continue such a round.

    Where another version was published meanwhile (a roll-back), the round is given up and another begun.
    """
    while True:
        path, begun = _train_round(folder, config)
        if _was_rolled_back(folder, path):
            raise NothingToLearn(
                f"these corrections and settings make version {bundle_version(path / BUNDLE)[:12]} again, which was "
                "rolled back: add corrections, or give another --seed"
            )
        with changing_published(folder / BUNDLE):  # a roll-back comes before or after
            if _is_trained(path, begun, bundle_version(folder / BUNDLE)):
                return _publish(folder, path, begun)
        given_up = f"round {round_number(path)} is given up: {begun.parent[:12]}, which it began with, is published no"
        print(f"{given_up} longer; the next one begins with the version that is", file=sys.stderr, flush=True)


def _train_round(folder: Path, config: CorrectionsConfig) -> tuple[Path, Round]:
    """A round of which all that is left is to publish it."""
    version, weights = bundle_version(folder / BUNDLE), read_bundle_info(folder / BUNDLE).sha256
    for path, begun in _unpublished(folder):
        if _is_trained(path, begun, version):
            return path, begun
    policy = _policy(folder / BUNDLE, config)
    path, begun, data = _continued(folder, config, policy, version) or _next(folder, config, policy, version)
    same: Any = {"seed": config.seed, "parent": weights, "checkpoint_s": CHECKPOINT_S}
    if isinstance(data, Replays):
        assert config.learning.off_policy is not None
        learn_replays(policy, data, config.learning.off_policy, path, **same)
    else:
        _scale_features(policy, data[0])
        clone_windows(policy, data, config.learning.bc, path, **same)
    return path, begun


def _unpublished(folder: Path) -> list[tuple[Path, Round]]:
    """The newest round, where it can still be published."""
    newest = read_rounds(folder)[-1:]
    return [(path, begun) for path, begun in newest if not begun.published and not _was_rolled_back(folder, path)]


def _was_rolled_back(folder: Path, round: Path) -> bool:
    trained = (round / BUNDLE / MANIFEST).exists()
    return trained and bundle_version(round / BUNDLE) in PublishedVersions(folder / BUNDLE, restore=False).rolled_back


def _was_refused(folder: Path, path: Path, begun: Round, config: CorrectionsConfig) -> bool:
    """Whether a round of these settings made a version that was rolled back: it needs as many corrections as others."""
    return _was_rolled_back(folder, path) and begun.settings == _settings(config)


Data = list[WindowSampler] | Replays
Opened = tuple[Path, Round, Data]


def _ids(folder: Path, config: CorrectionsConfig) -> frozenset[str]:
    """Of the episodes that a round learns from; cloning has no use for failures."""
    where = SUCCESSES if config.learning.off_policy is None else EVERYTHING
    with EpisodeStore(folder / EPISODES) as store:
        return frozenset(entry.id for entry in store.select(where))


def _continued(folder: Path, config: CorrectionsConfig, policy: Policy, version: str) -> Opened | None:
    """The newest round, if it is not published and what it began with is as it was."""
    for path, begun in _unpublished(folder):
        if begun.episodes <= _ids(folder, config):
            now, data = _begin(folder, config, policy, version, ids=begun.episodes, share=begun.human_share)
            return (path, begun, data) if now == begun else None
    return None


def _next(folder: Path, config: CorrectionsConfig, policy: Policy, version: str) -> Opened:
    """A round of what there is now."""
    number = 1 + max(map(round_number, sorted_rounds(folder / LEARNING)), default=0)
    path, ids = folder / LEARNING / f"round-{number:03d}", _ids(folder, config)
    begun, data = _begin(folder, config, policy, version, ids=ids, share=None)
    _write(path, begun)
    return path, begun, data


def _begin(
    folder: Path,
    config: CorrectionsConfig,
    policy: Policy,
    version: str,
    *,
    ids: frozenset[str],
    share: float | None,
) -> tuple[Round, Data]:
    """``share``: of the corrections in a batch; None: as configured, or measured."""
    settings = config.learning
    made: Data
    if settings.off_policy is not None:
        share = settings.off_policy.demonstration_share
        made = _replays(folder, config, policy, ids)
        data = [{"digest": made.digest}]
    else:
        share, made = _samplers(folder, config, policy, ids, share)
        data = [sampler.state_dict() for sampler in made]
    begun = Round(
        parent=version,
        episodes=ids,
        corrected=ids & set(corrected_episodes(folder / EPISODES, settings.actors)),
        human_share=share,
        settings=_settings(config),
        data=data,
    )
    return begun, made


def _settings(config: CorrectionsConfig) -> dict[str, Any]:
    """What a round notes of the configuration."""
    return flat_settings(config.learning) | {"seed": config.seed}


def _samplers(
    folder: Path, config: CorrectionsConfig, policy: Policy, ids: frozenset[str], share: float | None
) -> tuple[float, list[WindowSampler]]:
    """The corrections' share of a batch, as ``_begin``'s, and what is cloned."""
    episodes, settings = folder / EPISODES, config.learning
    if share is None:
        share = settings.human_share
        sources = cloning_sources(episodes, settings, ids=ids)
        if settings.adaptive is not None:
            share = measured_share(policy, sources, settings.adaptive, seed=config.seed)
    settings = dataclasses.replace(settings, human_share=share)
    sources = cloning_sources(episodes, settings, ids=ids)
    batch_size = settings.bc.batch_size
    if not divide(batch_size, [source.share for source in sources])[0]:
        raise UserError(
            f"learning.human_share: {share:g} of a batch of {batch_size} is no window, so that no correction would be "
            f"learned: set it to {1 / batch_size:.2g} or more"
        )
    return share, window_samplers(policy.spec, sources, batch_size=settings.bc.batch_size, seed=config.seed)


def _replays(folder: Path, config: CorrectionsConfig, policy: Policy, ids: frozenset[str]) -> Replays:
    settings = config.learning
    assert settings.off_policy is not None
    return correction_replays(
        policy,
        folder / EPISODES,
        settings.demonstrations,
        ids=ids,
        settings=settings.off_policy,
        seed=config.seed,
    )


def _policy(bundle: Path, config: CorrectionsConfig) -> Policy:
    """What is trained: the published policy, a residual on it, or the policy with labels. A residual that is there goes
    on; UserError where it has other settings than are asked for."""
    policy = load_bundle(bundle, device=select_device(config.device))
    if config.learning.off_policy is not None:
        policy = made_conditional(policy, config.learning.off_policy)
    wanted = config.learning.residual
    if wanted is None:
        return policy
    if isinstance(policy, ResidualPolicy):
        _check_same(bundle, policy.residual_config, wanted)
        return policy
    torch.manual_seed(spawn_seed(config.seed, "residual"))
    return residual_on(policy, wanted)


def _check_same(bundle: Path, present: ResidualConfig, wanted: ResidualConfig) -> None:
    for field in dataclasses.fields(ResidualConfig):
        name, has, asked = field.name, getattr(present, field.name), getattr(wanted, field.name)
        if has != asked:
            raise UserError(
                f"{bundle}: the policy has a residual already, with {name} {has}: set learning.residual.{name} to that "
                f"(got {asked}), or learning.residual to null, which goes on with it as it is; a residual with other "
                f"settings needs a folder whose bundle has none"
            )


def _scale_features(policy: Policy, sampler: WindowSampler) -> None:
    """Of a residual that has just been made."""
    if isinstance(policy, CriticGuided) and policy.features_are_unscaled():
        windows = np.arange(min(len(sampler), FEATURE_WINDOWS))
        policy.fit_features(encode_windows(policy, sampler, windows).inputs)


def _is_trained(path: Path, begun: Round, version: str) -> bool:
    """Whether all that is left is to publish it; not where another version was published meanwhile."""
    if not (path / BUNDLE / MANIFEST).exists():
        return False
    return version in (begun.parent, bundle_version(path / BUNDLE))


def _publish(folder: Path, path: Path, begun: Round) -> dict[str, Any]:
    copy_bundle(path / BUNDLE, folder / BUNDLE)
    _write(path, dataclasses.replace(begun, published=True))
    return {
        "round": round_number(path),
        "version": bundle_version(path / BUNDLE)[:12],
        "bundle": str(path / BUNDLE),
        "corrected_episodes": len(begun.corrected),
        "human_share": round(begun.human_share, 3),
    }


def read_rounds(folder: Path) -> list[tuple[Path, Round]]:
    """The folders of all rounds, oldest first, and what each began with."""
    paths = [path for path in sorted_rounds(folder / LEARNING) if (path / RECORD).exists()]
    return [(path, _ROUND.validate_json((path / RECORD).read_bytes())) for path in paths]


def _write(path: Path, begun: Round) -> None:
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / RECORD, _ROUND.dump_json(begun, indent=1))
