"""Improve a policy by the configured algorithm, with validation and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from policies.audit import StepDifference
from policies.bundle import Provenance, load_bundle, read_bundle_info, save_bundle
from policies.device import Device
from policies.policy import RobotSpec
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.vector_env import VectorEnv
from vla_rl.algorithms.algorithm import Algorithm
from vla_rl.algorithms.ppo import HasClippedUpdate
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.runners.evaluate import locate, validate
from vla_rl.runs.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from vla_rl.runs.failures import FailureLog
from vla_rl.runs.metrics import MetricsWriter
from vla_rl.runs.progress import console, progress
from vla_rl.runs.quarantine import quarantine
from vla_rl.runs.run_dir import Run, experiment_device, git_revision, load_experiment


def reinforce(run: Run, env: VectorEnv, start: Path, folder: Path, *, failures: FailureLog) -> dict[str, Any]:
    """Improve the policy of bundle ``start`` in ``env``; leaves ``bundle`` and, at every checkpoint, a resumable state.

    Into ``folder``; in the run's own folder validation is part of the curve, an imagined environment cannot validate.
    """
    experiment, checkpoints = with_demonstrations(run), folder / run.checkpoints.name
    algorithm = load_algorithm(experiment, env, start, run.device)
    if not env.spec.can_capture:
        console.print(f"{env.spec.name} cannot save its state: its episodes restart after validation and on resume")
    if (latest := latest_checkpoint(checkpoints)) is not None:
        with crossing("checkpoint"):
            algorithm.load_state_dict(load_checkpoint(latest))
    else:
        save_checkpoint(checkpoints, 0, algorithm.state_dict())
    total = experiment.algorithm.iterations
    every = experiment.evaluation.validate_every if folder == run.dir else 0
    # The final evaluation does the same work as the first one did.
    afterwards = run.stages().get("evaluate_before", {}).get("wall_s") if folder == run.dir else None
    with (
        MetricsWriter(folder, next_iteration=algorithm.iteration, wandb=experiment.wandb) as record,
        progress("reinforce", total, done=algorithm.iteration, afterwards_s=afterwards) as advance,
    ):
        while algorithm.iteration < total:
            with quarantine(folder, "iteration", algorithm.iteration, start=start):
                metrics = algorithm.iterate()
                if every and algorithm.iteration % every == 0:
                    metrics |= validation_metrics(algorithm, experiment)
                if failed := failures.write(f"iteration {algorithm.iteration - 1}"):
                    metrics |= {"worker_failures": float(failed)}
                record.write(algorithm.iteration - 1, metrics)
                advance(note=f"success {metrics['success']:.2f}  kl {metrics.get('kl', 0):.3f}")
                if algorithm.iteration % experiment.checkpoint_every == 0 or algorithm.iteration == total:
                    save_checkpoint(checkpoints, algorithm.iteration, algorithm.state_dict())
    provenance = Provenance(git_revision=git_revision(), parent=read_bundle_info(start).sha256)
    save_bundle(algorithm.deployed(), folder / run.bundle.name, provenance=provenance)
    return {"iterations": algorithm.iteration}


def with_demonstrations(run: Run) -> Experiment:
    """The run's experiment, whose algorithm knows the episodes that the run started from."""
    experiment, start = run.experiment, run.experiment.start
    stores = [start.store or run.demonstrations] if isinstance(start, Imitation) else []
    return replace(experiment, algorithm=experiment.algorithm.with_demonstrations(stores))


def load_algorithm(experiment: Experiment, env: VectorEnv, bundle: Path, device: Device) -> Algorithm:
    """The configured algorithm with the policy of ``bundle``, ready to iterate in ``env``."""
    policy = load_bundle(bundle, robot=RobotSpec.of(env.spec), device=device)
    return build_algorithm(experiment.algorithm, policy, env, seed=experiment.seed)


def audit_run(run_dir: Path) -> list[StepDifference]:
    """``vla-rl doctor --run``: the log-prob audit of a run's newest policy on a rollout in its own simulator."""
    experiment = load_experiment(run_dir)
    _, bundle = locate(run_dir)
    env = make_env(experiment.sim)
    try:
        algorithm = load_algorithm(experiment, env, bundle, experiment_device(experiment))
        if not isinstance(algorithm, HasClippedUpdate):
            raise UserError(f"algorithm {experiment.algorithm.name} has no importance ratios to audit")
        rollout = algorithm.collector.collect(2)  # the second chunk's memory is audited too
        return algorithm.update.audit(rollout.valid_chunks())
    finally:
        env.close()


def validation_metrics(algorithm: Algorithm, experiment: Experiment) -> dict[str, float]:
    """The deployed policy on the validation stream, in the training environment."""
    with algorithm.collector.suspended():
        summary = validate(algorithm.deployed(), algorithm.collector.env, experiment)
    per_task = {f"validation/{task}": row["success"] for task, row in summary["per_task"].items()}
    return {
        "validation": summary["success"],
        "validation_low": summary["interval"][0],
        "validation_high": summary["interval"][1],
        **per_task,
    }
