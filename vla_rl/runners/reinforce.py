"""Improve a policy by the configured algorithm, with validation, checkpoints and the log-prob audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from policies.audit import StepDifference, audit_log_prob
from policies.bundle import Provenance, load_bundle, read_bundle_info, save_bundle
from sims.starts import StartSequence
from sims.vector_env import VectorEnv
from vla_rl.algorithms.algorithm import Algorithm
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.runners.evaluate import evaluate_policy, locate
from vla_rl.runs.checkpoint import latest_checkpoint, load_tree, save_checkpoint
from vla_rl.runs.failures import FailureLog
from vla_rl.runs.metrics import MetricsWriter
from vla_rl.runs.progress import console, progress
from vla_rl.runs.run_dir import Run, git_revision, load_experiment


def reinforce(run: Run, env: VectorEnv, start: Path, folder: Path, *, failures: FailureLog) -> dict[str, Any]:
    """Improve the policy of bundle ``start`` in ``env``; leaves ``bundle`` and, at every checkpoint, a resumable state.

    Into ``folder``; in the run's own folder validation is part of the curve, an imagined environment cannot validate.
    """
    experiment, checkpoints = run.experiment, folder / run.checkpoints.name
    algorithm = load_algorithm(experiment, env, start)
    if not env.spec.can_capture:
        console.print(f"{env.spec.name} cannot save its state: its episodes restart after validation and on resume")
    if (latest := latest_checkpoint(checkpoints)) is not None:
        algorithm.load_state_dict(load_tree(latest))
    else:
        audit(algorithm, tolerance=experiment.audit_tolerance)
    total = experiment.algorithm.iterations
    every = experiment.evaluation.validate_every if folder == run.dir else 0
    with (
        MetricsWriter(folder, next_iteration=algorithm.iteration) as record,
        progress("reinforce", total, done=algorithm.iteration) as advance,
    ):
        while algorithm.iteration < total:
            metrics = algorithm.iterate()
            if every and algorithm.iteration % every == 0:
                metrics |= validate(algorithm, experiment)
            if failed := failures.write(f"iteration {algorithm.iteration - 1}"):
                metrics |= {"worker_failures": float(failed)}
            record.write(algorithm.iteration - 1, metrics)
            advance(note=f"success {metrics['success']:.2f}  kl {metrics.get('kl', 0):.3f}")
            if algorithm.iteration % experiment.checkpoint_every == 0 or algorithm.iteration == total:
                save_checkpoint(checkpoints, algorithm.iteration, algorithm.state_dict())
    provenance = Provenance(git_revision=git_revision(), parent=read_bundle_info(start).sha256)
    save_bundle(algorithm.deployed(), folder / run.bundle.name, provenance=provenance)
    return {"iterations": algorithm.iteration}


def load_algorithm(experiment: Experiment, env: VectorEnv, bundle: Path) -> Algorithm:
    """The configured algorithm with the policy of ``bundle``, ready to iterate in ``env``."""
    policy = load_bundle(bundle, action_dim=env.spec.action_dim, cameras=env.spec.cameras)
    return build_algorithm(experiment.algorithm, policy, env, seed=experiment.seed)


def audit(algorithm: Algorithm, *, tolerance: float) -> list[StepDifference]:
    """Log-probs of a sample against the training path, before anything is learned from them."""
    env, policy = algorithm.collector.env, algorithm.policy
    obs = env.observe()
    _, state = policy.encode(obs, policy.initial_state(env.spec.num_envs))
    context, _ = policy.encode(obs, state)  # the second observation, so that memory is audited too
    sample = policy.sample(context, torch.Generator().manual_seed(0))
    return audit_log_prob(policy, policy.restore(policy.store(context)), sample, tolerance=tolerance)


def audit_run(run_dir: Path) -> list[StepDifference]:
    """``vla-rl doctor --run``: the log-prob audit of a run's newest policy in its own simulator."""
    experiment = load_experiment(run_dir)
    _, bundle = locate(run_dir)
    env = make_env(experiment.sim)
    try:
        return audit(load_algorithm(experiment, env, bundle), tolerance=experiment.audit_tolerance)
    finally:
        env.close()


def validate(algorithm: Algorithm, experiment: Experiment) -> dict[str, float]:
    """The deployed policy on the validation stream, in the training environment."""
    settings, env = experiment.evaluation, algorithm.collector.env
    starts = StartSequence("validation", seed=settings.seed, num_tasks=len(env.spec.tasks))
    with algorithm.collector.suspended():
        summary = evaluate_policy(
            algorithm.deployed(),
            env,
            starts.take(settings.validation_episodes),
            seed=settings.seed,
            stochastic=False,
        )
    per_task = {f"validation/{task}": row["success"] for task, row in summary["per_task"].items()}
    return {
        "validation": summary["success"],
        "validation_low": summary["interval"][0],
        "validation_high": summary["interval"][1],
        **per_task,
    }
