"""``vla-rl pretrain``: an encoder on a simulator's labeled scenes, written as a backbone file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from policies.backbone import load_backbone, save_backbone
from policies.policy import Policy, RobotSpec
from sims.errors import UserError
from sims.registry import pretraining_scenes
from vla_rl.algorithms.pretraining import Pretraining
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.runners.fit import run_fit
from vla_rl.runners.imitation import new_policy
from vla_rl.runs.run_dir import experiment_device, git_revision, write_json


def pretrain(experiment: Experiment, run_dir: Path, *, out: Path) -> dict[str, Any]:
    """Fit the encoder of ``experiment.start.policy`` and write it to ``out``; ``run_dir`` has the checkpoints.

    Returns the errors on scenes that were never trained on, which are also in the file's header and in
    ``run_dir/pretraining.json``. Raises UserError.
    """
    config = experiment.pretraining
    policy = _new_policy(experiment)
    if config.start is not None:
        load_backbone(policy, config.start)
    source = pretraining_scenes(experiment.sim)
    try:
        fit = Pretraining(policy, config, source, seed=experiment.seed, fit_normalizer=config.start is None)
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
