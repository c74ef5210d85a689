"""Behavior cloning of recorded successes, by a new policy or a bundle's: what reinforcement learning starts from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from episodes.sampler import WindowSampler
from episodes.schema import SOURCES
from episodes.store import EpisodeStore, Selection
from policies.backbone import backbone_sha256, load_backbone
from policies.bundle import BundleInfo, Provenance, load_bundle, read_bundle_info, save_bundle
from policies.device import Device
from policies.policy import Policy, PolicySpec, RobotSpec
from policies.registry import build_policy
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from vla_rl.algorithms.bc import BC, BCConfig
from vla_rl.config.experiment import Experiment, FromBundle, Imitation
from vla_rl.rewards.bundle import progress_sha256
from vla_rl.runners.fit import fit_folder, run_fit, settings_of_fit
from vla_rl.runs.progress import console
from vla_rl.runs.run_dir import experiment_device, git_revision
from world_models.data.clip import LEARNED_FROM

SUCCESSES = Selection(success=True)


def imitate(experiment: Experiment, folder: Path, *, store: Path | None) -> Path:
    """``vla-rl imitate``: clone recorded episodes as ``start`` says, without its simulator; the bundle.

    ``store``: instead of start.store. Raises UserError if there is none, and where ``folder`` holds a fit of other
    settings; started again, it continues.
    """
    start, device = experiment.start, experiment_device(experiment)
    if (store := store or start.store) is None:
        raise UserError("imitate needs episodes: give --store STORE, or start.store in the configuration")
    if start.residual is not None:
        console.print("start.residual has no effect here: vla-rl train adds it to the cloned policy")
    if isinstance(start, Imitation):
        given, policy = None, new_policy(start, recorded_robot(store), seed=experiment.seed, device=device)
    else:
        given = read_bundle_info(start.path)
        policy = given_policy(start, recorded_robot(store, cameras=given.robot.cameras), device=device)
    source = cloning_source(experiment, store)
    with _fit_folder(experiment, given, folder):
        return clone(
            policy,
            [source],
            start.bc,
            folder,
            seed=experiment.seed,
            fit_normalizer=given is None,
            parent=None if given is None else given.sha256,
        )


def _fit_folder(experiment: Experiment, given: BundleInfo | None, folder: Path) -> AbstractContextManager[None]:
    """With what the weights depend on beside the episodes, which a checkpoint names (WindowSampler)."""
    start = experiment.start
    settings = settings_of_fit(experiment, "seed", "precision", "start.policy", "start.bc")
    del settings["start.bc.progress"]
    otherwise = UserError(
        f"{folder} holds a cloned policy, or a part of its fit, with other settings, another seed or another backbone, "
        "or from another bundle; choose another --out, or delete this one"
    )
    fitted_to = {
        "settings": settings,
        "bundle": None if given is None else {"sha256": given.sha256, "policy": asdict(given.config)},
        "backbone": backbone_sha256(start.backbone) if isinstance(start, Imitation) and start.backbone else None,
        "progress": None if start.bc.progress is None else progress_sha256(start.bc.progress),
    }
    return fit_folder(folder, fitted_to, otherwise=otherwise)


def new_policy(start: Imitation, robot: RobotSpec, *, seed: int, device: Device) -> Policy:
    """The configured policy with its initial weights, on ``device``."""
    torch.manual_seed(spawn_seed(seed, "policy"))
    policy = device.place(build_policy(start.policy, robot))
    if start.backbone is not None:
        load_backbone(policy, start.backbone)
    return policy


def given_policy(start: FromBundle, robot: RobotSpec, *, device: Device) -> Policy:
    """That of the bundle, on ``device``, for a robot with the action delay of ``robot``. BundleError for another."""
    policy = load_bundle(start.path, robot=robot, device=device)
    trained_for = replace(policy.spec.robot, action_delay=robot.action_delay)
    policy.spec = replace(policy.spec, robot=trained_for)
    return policy


def recorded_robot(path: Path, *, cameras: Sequence[str] | None = None, where: Selection = SUCCESSES) -> RobotSpec:
    """Of the first episode ``where`` in the store ``path``, with these of its ``cameras`` (None: all).

    UserError without one.
    """
    with EpisodeStore(path) as store:
        entries = store.select(where)
        if not entries:
            kind = "successful episode" if where.success else "episode"
            raise UserError(f"{path} holds no {kind}; record some with: vla-rl collect")
        return RobotSpec.recorded(store.read(entries[0].id), cameras)


@dataclass(frozen=True, kw_only=True)
class CloningSource:
    """The successful episodes of a store, or only those of their steps that these ``actors`` chose.

    ``pre_intervention_steps``: as of ``WindowSampler``. ``share``: of every batch, relative to the other sources'; a
    source whose share is less than one window is left out. ``folds``: of the starts; ``ids``: of episodes; None: all.
    """

    store: Path
    actors: tuple[str, ...] = SOURCES
    pre_intervention_steps: int = 0
    share: float = 1.0
    folds: tuple[int, ...] | None = None
    ids: frozenset[str] | None = None

    @property
    def where(self) -> Selection:
        return replace(SUCCESSES, folds=self.folds, ids=self.ids)


def cloning_source(experiment: Experiment, store: Path) -> CloningSource:
    """The successes of ``store`` that may be learned from."""
    return CloningSource(store=store, folds=learned_folds(experiment))


def learned_folds(experiment: Experiment) -> tuple[int, ...] | None:
    """Of the starts (``Selection.folds``): all, but where a world model is evaluated not those that are held out."""
    return None if experiment.imagination is None else LEARNED_FROM


def clone(
    policy: Policy,
    sources: Sequence[CloningSource],
    config: BCConfig,
    folder: Path,
    *,
    seed: int,
    fit_normalizer: bool,
    parent: str | None = None,
) -> Path:
    """Clone the successful episodes of ``sources``; leaves ``bundle`` in ``folder``.

    Stores without a success are passed over; EpisodeError if none has any. Checkpoints make it resumable.
    ``fit_normalizer``: for a new policy. ``parent``: hash of the weights that ``policy`` starts from.
    """
    samplers = window_samplers(policy.spec, sources, batch_size=config.batch_size, seed=seed)
    if fit_normalizer:
        policy.fit_normalizer(*samplers[0].statistics())
    return clone_windows(policy, samplers, config, folder, seed=seed, parent=parent)


def clone_windows(
    policy: Policy,
    samplers: Sequence[WindowSampler],
    config: BCConfig,
    folder: Path,
    *,
    seed: int,
    parent: str | None = None,
    checkpoint_s: float = math.inf,
) -> Path:
    """Clone what the samplers draw, as ``clone`` does; started again with equal arguments, it continues.

    ``checkpoint_s``: as of ``run_fit``.
    """
    with closing(BC(policy, config, samplers, seed=seed)) as bc:
        run_fit(bc, folder, title="imitate", shown="bc_loss", checkpoint_every=500, checkpoint_s=checkpoint_s)
    policy.prepare_to_explore()
    save_bundle(policy, folder / "bundle", provenance=Provenance(git_revision=git_revision(), parent=parent))
    return folder / "bundle"


def window_samplers(
    spec: PolicySpec, sources: Sequence[CloningSource], *, batch_size: int, seed: int
) -> list[WindowSampler]:
    """Of the sources with a success, each with its share of a batch."""
    opened = [(source, EpisodeStore(source.store)) for source in sources]
    opened = [(source, store) for source, store in opened if store.select(source.where)] or opened[:1]
    sizes = divide(batch_size, [source.share for source, _ in opened])
    return [
        WindowSampler(
            store,
            action_horizon=spec.cloned_horizon,
            batch_size=size,
            seed=seed,
            where=source.where,
            cameras=spec.robot.cameras,
            future_steps=spec.future_steps,
            past_steps=spec.past_steps,
            actors=source.actors,
            pre_intervention_steps=source.pre_intervention_steps,
        )
        for (source, store), size in zip(opened, sizes, strict=True)
        if size
    ]


def divide(total: int, shares: Sequence[float]) -> list[int]:
    """``total`` in whole parts that are as near to ``shares`` as can be, the first ones the larger."""
    exact = [total * share / sum(shares) for share in shares]
    parts = [int(part) for part in exact]
    largest = sorted(range(len(shares)), key=lambda i: parts[i] - exact[i])  # sorted() keeps the order of equals
    for i in largest[: total - sum(parts)]:
        parts[i] += 1
    return parts
