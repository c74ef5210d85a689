"""What a round of learning from corrections clones: which steps of which episodes, and their shares of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from episodes.sampler import count_windows
from episodes.schema import ACTORS, POLICY
from episodes.store import EpisodeStore
from policies.device import make_generator
from policies.policy import Policy
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from vla_rl.algorithms.bc import bc_loss
from vla_rl.config.corrections import AdaptiveShare, LearningConfig
from vla_rl.runners.imitation import SUCCESSES, CloningSource, window_samplers


def corrected_episodes(path: Path, actors: Sequence[str]) -> list[str]:
    """The ids of the successful episodes of the store in which one of these drove."""
    codes = [ACTORS.index(actor) for actor in actors]
    with EpisodeStore(path) as store:
        entries = store.select(SUCCESSES)
        return [entry.id for entry in entries if np.isin(store.map(entry)["actor"], codes).any()]


def cloning_sources(episodes: Path, settings: LearningConfig, *, ids: frozenset[str] | None) -> list[CloningSource]:
    """What a round learns from, and its shares of a batch. ``ids``: of the store ``episodes``; None: all."""
    corrections = CloningSource(store=episodes, actors=settings.actors, share=settings.human_share, ids=ids)
    demonstrations, rest = settings.demonstrations, 1 - settings.human_share
    if settings.own_steps is None:
        return [
            corrections,
            *(CloningSource(store=store, share=rest / len(demonstrations)) for store in demonstrations),
        ]
    own = CloningSource(
        store=episodes,
        actors=(ACTORS[POLICY],),
        pre_intervention_steps=settings.own_steps.pre_intervention_steps,
        ids=ids,
    )
    given = [_windows(CloningSource(store=store)) for store in demonstrations]
    recorded, kept = _windows(CloningSource(store=episodes, ids=ids)), _windows(own)
    share, own_share = sirius_shares(settings.human_share, demonstrations=sum(given), recorded=recorded, own=kept)
    return [
        corrections,
        *(
            CloningSource(store=store, share=share * count / sum(given))
            for store, count in zip(demonstrations, given, strict=True)
            if count
        ),
        *([dataclasses.replace(own, share=own_share)] if own_share else []),
    ]


def sirius_shares(human_share: float, *, demonstrations: int, recorded: int, own: int) -> tuple[float, float]:
    """The demonstrations' share of a batch and that of the policy's own steps (Liu et al. 2022, arXiv:2211.08416).

    Arguments are counts of windows; ``recorded``: of all corrected episodes, ``own``: those of the policy that count.
    P*(demonstration) is P(demonstration), at most what P*(intervention) = ``human_share`` leaves, and P*(policy) the
    rest. P*(pre-intervention) is 0 (the paper's 0.002 is not one window of a batch). Of one kind alone it has both.
    """
    rest = 1 - human_share
    share = min(rest, demonstrations / (demonstrations + recorded)) if own else rest
    return (share, rest - share) if demonstrations else (0.0, rest if own else 0.0)


def _windows(source: CloningSource) -> int:
    with EpisodeStore(source.store) as store:
        steps = source.pre_intervention_steps
        return count_windows(store, where=source.where, actors=source.actors, pre_intervention_steps=steps)


def measured_share(policy: Policy, sources: Sequence[CloningSource], settings: AdaptiveShare, *, seed: int) -> float:
    """The share of the first source, the corrections, by the policy's cloning losses of it and of the others.

    UserError where there are no others.
    """
    if len(sources) < 2:
        raise UserError("learning.adaptive divides a batch: name demonstrations with --learning.demonstrations [STORE]")
    online, *offline = (_mean_loss(policy, source, settings.windows, seed=seed) for source in sources)
    return adaptive_share(online, float(np.mean(offline)), settings)


def adaptive_share(online_loss: float, offline_loss: float, settings: AdaptiveShare) -> float:
    """exp(boost l_on) / (exp(boost l_on) + exp(l_off)), within the limits (Pan et al. 2026, SOP, arXiv:2601.03044)."""
    share = 1 / (1 + np.exp(np.clip(offline_loss - settings.boost * online_loss, -50, 50)))
    return float(np.clip(share, settings.least, settings.most))


@torch.no_grad()
def _mean_loss(policy: Policy, source: CloningSource, windows: int, *, seed: int) -> float:
    """Of ``windows`` random windows."""
    (sampler,) = window_samplers(policy.spec, [source], batch_size=windows, seed=spawn_seed(seed, "shares"))
    batch = sampler.next_batch().to(policy.device)
    return float(bc_loss(policy, batch, make_generator(policy.device, spawn_seed(seed, "shares"))))
