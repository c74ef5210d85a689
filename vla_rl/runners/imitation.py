"""Behavior cloning of recorded successes: the policy that reinforcement starts from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from episodes.sampler import WindowBatch, WindowSampler
from episodes.store import EpisodeStore, Selection
from policies.bundle import Provenance, save_bundle
from policies.denoising.policy import DenoisingPolicy
from vla_rl.algorithms.bc import BC, BCConfig
from vla_rl.runs.checkpoint import latest_checkpoint, load_tree, save_checkpoint
from vla_rl.runs.metrics import Metrics
from vla_rl.runs.progress import progress
from vla_rl.runs.run_dir import git_revision

SUCCESSES = Selection(success=True)


def clone(
    policy: DenoisingPolicy,
    stores: Sequence[Path],
    config: BCConfig,
    folder: Path,
    *,
    seed: int,
    fit_normalizer: bool,
    parent: str | None = None,
) -> Path:
    """Imitate the successful episodes of ``stores``, equal shares of every batch; leaves ``bundle`` in ``folder``.

    Stores without a success are passed over; EpisodeError if all are. Checkpoints make it resumable.
    ``fit_normalizer``: of a policy that is new. ``parent``: what it was before.
    """
    opened = [EpisodeStore(store) for store in stores]
    opened = [store for store in opened if store.select(SUCCESSES)] or opened[:1]
    vla, count = policy.config.vla, len(opened)
    samplers = [
        WindowSampler(
            store,
            action_horizon=vla.action_horizon,
            batch_size=config.batch_size // count + (i < config.batch_size % count),
            seed=seed,
            where=SUCCESSES,
            cameras=policy.robot.cameras,
            future_steps=vla.forecast_steps,
        )
        for i, store in enumerate(opened)
    ]
    if fit_normalizer:
        policy.normalizer.fit(*samplers[0].statistics())
    learner = BC(policy, config, seed=seed)
    checkpoints = folder / "checkpoints"
    if (latest := latest_checkpoint(checkpoints)) is not None:
        state = load_tree(latest)
        learner.load_state_dict(state["learner"])
        for sampler, position in zip(samplers, state["samplers"], strict=True):
            sampler.load_state_dict(position)
    with (
        closing(learner),
        Metrics(folder, next_iteration=learner.step, tensorboard=False) as record,
        progress("imitate", config.steps, done=learner.step) as advance,
    ):
        while learner.step < config.steps:
            metrics = learner.update(WindowBatch.cat([sampler.next_batch() for sampler in samplers]))
            advance(note=f"loss {metrics['bc_loss']:.3f}")
            if learner.step % 20 == 0:
                record.write(learner.step, metrics)
            if learner.step % 500 == 0:
                positions = [sampler.state_dict() for sampler in samplers]
                save_checkpoint(checkpoints, learner.step, {"learner": learner.state_dict(), "samplers": positions})
    save_bundle(policy, folder / "bundle", provenance=Provenance(git_revision=git_revision(), parent=parent))
    return folder / "bundle"
