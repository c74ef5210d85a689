"""Behavior cloning of recorded successes: the policy that reinforcement learning starts from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from episodes.sampler import WindowSampler
from episodes.store import EpisodeStore, Selection
from policies.bundle import Provenance, save_bundle
from policies.policy import Policy
from vla_rl.algorithms.bc import BC, BCConfig
from vla_rl.runners.fit import run_fit
from vla_rl.runs.run_dir import git_revision

SUCCESSES = Selection(success=True)


def clone(
    policy: Policy,
    stores: Sequence[Path],
    config: BCConfig,
    folder: Path,
    *,
    seed: int,
    fit_normalizer: bool,
    parent: str | None = None,
) -> Path:
    """Clone the successful episodes of ``stores``, equal shares of every batch; leaves ``bundle`` in ``folder``.

    Stores without a success are passed over; EpisodeError if none has any. Checkpoints make it resumable.
    ``fit_normalizer``: for a new policy. ``parent``: hash of the weights that ``policy`` starts from.
    """
    opened = [EpisodeStore(store) for store in stores]
    opened = [store for store in opened if store.select(SUCCESSES)] or opened[:1]
    spec, count = policy.spec, len(opened)
    samplers = [
        WindowSampler(
            store,
            action_horizon=spec.action_horizon,
            batch_size=config.batch_size // count + (i < config.batch_size % count),
            seed=seed,
            where=SUCCESSES,
            cameras=spec.robot.cameras,
            future_steps=spec.future_steps,
        )
        for i, store in enumerate(opened)
    ]
    if fit_normalizer:
        policy.fit_normalizer(*samplers[0].statistics())
    with closing(BC(policy, config, samplers, seed=seed)) as bc:
        run_fit(bc, folder, title="imitate", shown="bc_loss", checkpoint_every=500)
    save_bundle(policy, folder / "bundle", provenance=Provenance(git_revision=git_revision(), parent=parent))
    return folder / "bundle"
