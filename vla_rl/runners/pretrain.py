"""``vla-rl pretrain``: an encoder on a simulator's labeled scenes, written as a backbone file."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from episodes.files import write_json
from policies.backbone import backbone_sha256, load_backbone, save_backbone
from policies.policy import Policy, RobotSpec
from sims.errors import UserError
from sims.registry import pretraining_scenes
from vla_rl.algorithms.pretraining import Pretraining
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.runners.fit import fit_folder, run_fit, settings_of_fit
from vla_rl.runners.imitation import new_policy
from vla_rl.runs.run_dir import experiment_device, git_revision


def pretrain(experiment: Experiment, run_dir: Path, *, out: Path) -> dict[str, Any]:
    """Fit the encoder of ``experiment.start.policy`` and write it to ``out``; ``run_dir`` has the checkpoints.

    Returns the errors on scenes that were never trained on, which are also in the file's header and in
    ``run_dir/pretraining.json``. Raises UserError, also where ``run_dir`` has a fit of other settings or another start.
    """
    config = experiment.pretraining
    policy = _new_policy(experiment)
    if config.start is not None:
        load_backbone(policy, config.start)
    source = pretraining_scenes(experiment.sim)
    try:
        fit = Pretraining(policy, config, source, seed=experiment.seed, fit_normalizer=config.start is None)
        with _fit_folder(experiment, policy, run_dir):
            run_fit(fit, run_dir, title="pretrain", shown="landmark_loss")
        errors = {name: round(value, 4) for name, value in fit.evaluate().items()}
    finally:
        source.close()
    notes = {
        "program": "vla-rl pretrain",
        "git_revision": git_revision(),
        "simulator": experiment.sim.name,
        "seed": experiment.seed,
        "updates": config.steps,
        "scenes": fit.pool.drawn,
        "start": config.start and str(config.start),
        "errors": errors,
    }
    save_backbone(policy, out, notes=notes)
    write_json(run_dir / "pretraining.json", notes)
    return errors


def _fit_folder(experiment: Experiment, policy: Policy, run_dir: Path) -> AbstractContextManager[None]:
    """With what the weights depend on: of the simulator, what its scenes show."""
    look = ("sim.name", "sim.detail", "sim.shadows")
    settings = settings_of_fit(experiment, "seed", "precision", *look, "start.policy", "pretraining")
    del settings["pretraining.start"]
    start = experiment.pretraining.start
    otherwise = UserError(
        f"{run_dir} holds a pretraining with other settings, another seed or another start; choose another --run-dir, "
        "or delete this one"
    )
    fitted_to = {
        "settings": settings,
        "robot": asdict(policy.spec.robot),
        "start": None if start is None else backbone_sha256(start),
    }
    return fit_folder(run_dir, fitted_to, otherwise=otherwise)


def _new_policy(experiment: Experiment) -> Policy:
    if not isinstance(experiment.start, Imitation):
        raise UserError("pretraining needs start.name imitation: its section start.policy describes the encoder")
    env = make_env(experiment.sim)
    try:
        robot = RobotSpec.of(env.spec)
    finally:
        env.close()
    untrained = replace(experiment.start, backbone=None)
    return new_policy(untrained, robot, seed=experiment.seed, device=experiment_device(experiment))
