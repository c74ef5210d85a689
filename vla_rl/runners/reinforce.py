"""Improve a policy by the configured algorithm, with validation and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from policies.audit import StepDifference
from policies.bundle import Provenance, load_bundle, read_bundle_info, save_bundle
from policies.device import Device
from policies.policy import RobotSpec
from sims.errors import UserError
from sims.vector_env import EnvSpec, VectorEnv
from vla_rl.algorithms.algorithm import Algorithm
from vla_rl.algorithms.clipped_update import ClippedUpdate, update_of
from vla_rl.algorithms.on_policy import OnPolicy
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.config.environments import make_env, make_shard_env
from vla_rl.config.experiment import Experiment
from vla_rl.rewards.registry import with_reward
from vla_rl.rollouts.ahead import make_ahead
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.sharded import MakeRollouts, make_sharded
from vla_rl.runners.checks import SpecOnly
from vla_rl.runners.evaluate import validate
from vla_rl.runners.imitation import learned_folds
from vla_rl.runners.iterations import Iterations
from vla_rl.runs.failures import FailureLog
from vla_rl.runs.progress import console
from vla_rl.runs.result import with_episodes
from vla_rl.runs.run_dir import Run, experiment_device, experiment_of, git_revision, locate
from vla_rl.runs.watchdog import watchdog


def reinforce(
    run: Run,
    env: VectorEnv,
    start: Path,
    folder: Path,
    *,
    failures: FailureLog,
    recorded: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Improve the policy of bundle ``start`` in ``env``; leaves ``bundle`` and, at every checkpoint, a resumable state.

    Into ``folder``; in the run's own folder validation is part of the curve, an imagined environment cannot validate.
    After a signal to end a resumable state of that moment is saved. ``recorded``: called after each iteration.
    """
    experiment, in_simulator = with_demonstrations(run), folder == run.dir
    make_rollouts = place_rollouts(run, start) if in_simulator else None
    algorithm = load_algorithm(experiment, env, start, run.device, make_rollouts)
    rollouts = algorithm.collector
    failures.watch(rollouts)
    learners: AbstractContextManager[object] = nullcontext()
    try:
        learners = place_learners(run, env, start, algorithm)
        if not env.spec.can_capture:
            console.print(f"{env.spec.name} cannot save its state: its episodes restart after validation and on resume")
        iterations = Iterations(algorithm, folder / run.checkpoints.name, experiment, failures)
        iterations.recorded = recorded
        iterations.restore()
        if in_simulator and experiment.evaluation.validates:
            iterations.validate = partial(validation_metrics, algorithm, env, experiment)
        # The final evaluation does the same work as the first one did.
        afterwards = run.stages().get("evaluate_before", {}).get("wall_s") if in_simulator else None
        with watchdog(rollouts.timer, run.dir, limit_s=experiment.watchdog_s):
            iterations.run(folder, start, afterwards_s=afterwards)
    finally:
        with learners:
            rollouts.close()
    provenance = Provenance(git_revision=git_revision(), parent=read_bundle_info(start).sha256)
    save_bundle(algorithm.deployed(), folder / run.bundle.name, provenance=provenance)
    return {"iterations": algorithm.iteration}


def with_demonstrations(run: Run) -> Experiment:
    """The run's experiment, whose algorithm knows the episodes that the run started from."""
    experiment = run.experiment
    algorithm = experiment.algorithm.with_demonstrations(run.started_from, folds=learned_folds(experiment))
    return replace(experiment, algorithm=algorithm)


def place_rollouts(run: Run, start: Path) -> MakeRollouts | None:
    """Where the configuration has rollouts collected; None: by one Collector in the environment of the run."""
    experiment = run.experiment
    shards, staleness = experiment.algorithm.rollout_shards, experiment.algorithm.staleness
    if experiment.cluster is not None and experiment.cluster.collects:
        from vla_rl.distributed.rollouts import make_cluster_rollouts

        return make_cluster_rollouts(
            experiment, experiment.cluster, bundle=start, folder=run.dir, device=run.device.device
        )
    make: MakeRollouts | None = None
    if shards > 1:
        pipelined = experiment.cluster is not None and experiment.cluster.placement == "pipelined"
        make = make_sharded(partial(rewarded_shard, experiment, run.device), shards, pipelined=pipelined)
    return make_ahead(make or Collector, staleness) if staleness else make


def rewarded_shard(experiment: Experiment, device: Device) -> VectorEnv:
    """The environment of one shard, with the configured reward."""
    shard = make_shard_env(experiment.sim, experiment.algorithm.rollout_shards)
    return with_reward(experiment.reward, shard, device)


def place_learners(run: Run, env: VectorEnv, start: Path, algorithm: Algorithm) -> AbstractContextManager[object]:
    """Where the configuration has several learners, the processes beside this one, ended with the context."""
    experiment, config = run.experiment, run.experiment.cluster
    update = update_of(algorithm)
    if config is None or config.learners == 1 or update is None:
        return nullcontext()
    device = run.device.device
    if device.type == "cuda" and (gpus := torch.cuda.device_count() - (device.index or 0)) < config.learners:
        raise UserError(f"cluster.learners: {config.learners} need a GPU each, but from {device} on there are {gpus}")
    make = partial(load_update, experiment, env.spec, start, run.device)
    from vla_rl.distributed.learners import replicated, sharded

    if not experiment.divides_weights:
        return closing(replicated(update, make, config))
    assert isinstance(algorithm, OnPolicy)
    algorithm.update = divided = sharded(update, make, config)
    return closing(divided)


def load_update(experiment: Experiment, spec: EnvSpec, bundle: Path, device: Device, rank: int) -> ClippedUpdate:
    """That of the run's algorithm, on the learner ``rank``."""
    if device.device.type == "cuda":
        own = torch.device("cuda", (device.device.index or 0) + rank)
        torch.cuda.set_device(own)
        device = replace(device, device=own)
    update = update_of(load_algorithm(experiment, SpecOnly(spec), bundle, device, Collector))
    assert update is not None
    return update


def load_algorithm(
    experiment: Experiment, env: VectorEnv, bundle: Path, device: Device, make_rollouts: MakeRollouts | None = None
) -> Algorithm:
    """The configured algorithm with the policy of ``bundle``, ready to iterate in ``env``, with its reward."""
    policy = load_bundle(bundle, robot=RobotSpec.of(env.spec), device=device)
    rewarded = with_reward(experiment.reward, env, device)
    return build_algorithm(experiment.algorithm, policy, rewarded, seed=experiment.seed, make_rollouts=make_rollouts)


def audit_run(run_dir: Path) -> list[StepDifference] | None:
    """``vla-rl doctor --run``: the log-prob audit of a run's newest policy on a rollout in its own simulator.

    None where the algorithm has no importance ratios. Raises LogProbMismatch.
    """
    experiment = experiment_of(run_dir)
    _, bundle = locate(run_dir)
    env = make_env(experiment.sim)
    try:
        algorithm = load_algorithm(experiment, env, bundle, experiment_device(experiment))
        if (update := update_of(algorithm)) is None:
            return None
        rollout = algorithm.collector.collect(2)  # the second chunk's memory is audited too
        return update.audit(rollout.valid_chunks())
    finally:
        env.close()


def validation_metrics(algorithm: Algorithm, env: VectorEnv, experiment: Experiment) -> dict[str, float]:
    """The deployed policy on the validation stream, in ``env``, with which the algorithm was made."""
    with algorithm.collector.suspended():
        summary = validate(algorithm.deployed(), env, experiment)
    per_task = {f"validation/{task}": row["success"] for task, row in with_episodes(summary["per_task"]).items()}
    return {
        "validation": summary["success"],
        "validation_low": summary["interval"][0],
        "validation_high": summary["interval"][1],
        **per_task,
    }
