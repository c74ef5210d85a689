"""A training run, stage by stage: demonstrate, imitate, evaluate, reinforce, evaluate, report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from policies.audit import StepDifference, audit_log_prob
from policies.bundle import Provenance, load_bundle, read_bundle_info, save_bundle
from sims.registry import evaluation_starts, make_env
from sims.starts import StartSequence
from sims.vector_env import VectorEnv
from vla_rl.build import make_policy
from vla_rl.config.experiment import Experiment, FromBundle
from vla_rl.report import write_report
from vla_rl.runners.demonstrations import record_demonstrations
from vla_rl.runners.evaluate import evaluate_both, evaluate_policy, locate
from vla_rl.runners.imagination import improve_in_imagination
from vla_rl.runners.imitation import clone
from vla_rl.runners.on_policy import Learner
from vla_rl.runners.videos import film_tasks
from vla_rl.runs.checkpoint import latest_checkpoint, load_tree, save_checkpoint
from vla_rl.runs.failures import FailureLog
from vla_rl.runs.metrics import Metrics
from vla_rl.runs.progress import progress
from vla_rl.runs.run_dir import Run, git_revision, load_experiment, open_run, write_json


def train(experiment: Experiment, run_dir: Path, *, resume: bool, command: str) -> dict[str, Any]:
    """The whole run; returns what result.json holds. Completed stages are not repeated on ``resume``."""
    run = open_run(experiment, run_dir, resume=resume, command=command)
    with run.lock:
        env = make_env(experiment.sim)
        failures = FailureLog(run.dir, env)
        try:
            before = run.stage("imitate", lambda: imitate(run, env))["bundle"]
            failures.write("imitation")
            run.stage("evaluate_before", lambda: evaluate_bundle(run, env, Path(before), name="before"))
            failures.write("evaluation before")
            run.stage("reinforce", lambda: improve(run, env, Path(before), failures))
            run.stage("evaluate_after", lambda: evaluate_bundle(run, env, run.bundle, name="after"))
        finally:
            failures.write("at the end")
            env.close()
        result = finish(run)
        write_report(run.dir)
        return result


# -- imitation ----------------------------------------------------------------------------------------------------


def imitate(run: Run, env: VectorEnv) -> dict[str, Any]:
    """The bundle that reinforcement starts from: a given one, or a policy cloned from demonstrations."""
    start = run.experiment.start
    if isinstance(start, FromBundle):
        load_bundle(Path(start.path), action_dim=env.spec.action_dim, cameras=env.spec.cameras)
        return {"bundle": start.path}
    store = Path(start.store) if start.store is not None else run.demonstrations
    seconds = {}
    if start.store is None:
        seconds = run.stage("demonstrate", lambda: record_demonstrations(run.experiment, env, store))
    policy = make_policy(start.policy, env.spec, seed=run.experiment.seed)
    bundle = clone(policy, [store], start.bc, run.imitation, seed=run.experiment.seed, fit_normalizer=True)
    return {"bundle": str(bundle), "demonstrate_s": seconds.get("wall_s", 0.0)}


# -- reinforcement ------------------------------------------------------------------------------------------------


def improve(run: Run, env: VectorEnv, start: Path, failures: FailureLog) -> dict[str, Any]:
    """In the simulator, or in imagination where the configuration has that section."""
    settings = run.experiment.imagination
    if settings is None:
        return reinforce(run, env, start, run.dir, failures=failures)
    return improve_in_imagination(run, env, start, settings, practise=partial(reinforce, failures=failures))


def reinforce(run: Run, env: VectorEnv, start: Path, folder: Path, *, failures: FailureLog) -> dict[str, Any]:
    """Improve the policy of bundle ``start``; leaves ``bundle`` and, at every checkpoint, a resumable state.

    Into ``folder``; in the run's own folder validation is part of the curve, an imagined world cannot validate.
    """
    experiment, checkpoints = run.experiment, folder / run.checkpoints.name
    policy = load_bundle(start, action_dim=env.spec.action_dim, cameras=env.spec.cameras)
    learner = Learner(policy, env, experiment.algorithm, seed=experiment.seed)
    if (latest := latest_checkpoint(checkpoints)) is not None:
        learner.load_state_dict(load_tree(latest))
    else:
        audit(learner, tolerance=experiment.audit_tolerance)
    total = experiment.algorithm.iterations
    every = experiment.evaluation.validate_every if folder == run.dir else 0
    with (
        Metrics(folder, next_iteration=learner.iteration) as record,
        progress("reinforce", total, done=learner.iteration) as advance,
    ):
        while learner.iteration < total:
            metrics = learner.iterate()
            if every and learner.iteration % every == 0:
                metrics |= validate(learner, experiment)
            if failed := failures.write(f"iteration {learner.iteration - 1}"):
                metrics |= {"worker_failures": float(failed)}
            record.write(learner.iteration - 1, metrics)
            advance(note=f"success {metrics['success']:.2f}  kl {metrics.get('kl', 0):.3f}")
            if learner.iteration % experiment.checkpoint_every == 0 or learner.iteration == total:
                save_checkpoint(checkpoints, learner.iteration, learner.state_dict())
    parent = read_bundle_info(start).sha256
    save_bundle(
        learner.deployed(), folder / run.bundle.name, provenance=Provenance(git_revision=git_revision(), parent=parent)
    )
    return {"iterations": learner.iteration}


def audit(learner: Learner, *, tolerance: float) -> list[StepDifference]:
    """Stored log-probs against the training path, before anything is learned from them."""
    obs = learner.env.observe()
    context = learner.policy.encode(obs)
    sample = learner.policy.sample(context, torch.Generator().manual_seed(0))
    return audit_log_prob(learner.policy, learner.policy.encode(obs), sample, tolerance=tolerance)


def audit_run(run_dir: Path) -> list[StepDifference]:
    """``vla-rl doctor --run``: the log-prob audit of a run's newest policy in its own simulator."""
    experiment = load_experiment(run_dir)
    _, bundle = locate(run_dir)
    env = make_env(experiment.sim)
    try:
        learner = Learner(load_bundle(bundle), env, experiment.algorithm, seed=experiment.seed)
        return audit(learner, tolerance=experiment.audit_tolerance)
    finally:
        env.close()


# -- evaluation ---------------------------------------------------------------------------------------------------


def validate(learner: Learner, experiment: Experiment) -> dict[str, float]:
    """The deployed policy on the validation stream, in the training environment; running episodes are put back."""
    held = learner.env.capture()
    starts = StartSequence("validation", seed=experiment.evaluation.seed, num_tasks=len(learner.env.spec.tasks))
    summary = evaluate_policy(
        learner.deployed(),
        learner.env,
        starts.take(experiment.evaluation.validation_episodes),
        seed=experiment.evaluation.seed,
        stochastic=False,
    )
    learner.collector.start(held)
    per_task = {f"validation/{task}": row["success"] for task, row in summary["per_task"].items()}
    return {
        "validation": summary["success"],
        "validation_low": summary["interval"][0],
        "validation_high": summary["interval"][1],
        **per_task,
    }


def evaluate_bundle(run: Run, env: VectorEnv, bundle: Path, *, name: str) -> dict[str, Any]:
    """Deployed and exploring success on the held-out starts, and a video per task."""
    settings = run.experiment.evaluation
    policy = load_bundle(bundle)
    starts = evaluation_starts(
        run.experiment.sim, num_tasks=len(env.spec.tasks), seed=settings.seed, episodes=settings.episodes
    )
    summaries = evaluate_both(policy, env, starts, seed=settings.seed, title=f"evaluate {name}")
    film_tasks(policy, run.experiment, env, run.videos, prefix={"before": "bc", "after": "rl"}[name])
    return summaries


def finish(run: Run) -> dict[str, Any]:
    """result.json, from the record of the stages."""
    stages = run.stages()
    install = run.dir / "install_s"
    demonstrate = stages.get("demonstrate", {}).get("wall_s", 0.0)
    imagined = sum(stage["wall_s"] for name, stage in stages.items() if name[-1].isdigit())  # a run may be resumed
    result = {
        "bc": stages["evaluate_before"]["deployed"],
        "bc_stochastic": stages["evaluate_before"]["stochastic"],
        "rl": stages["evaluate_after"]["deployed"],
        "stochastic": stages["evaluate_after"]["stochastic"],
        "seed": run.experiment.seed,
        "episodes": run.experiment.evaluation.episodes,
        "wall_s": {
            "install": float(install.read_text()) if install.exists() else None,
            "collect": demonstrate,
            "bc": round(stages["imitate"]["wall_s"] - demonstrate, 2),
            "rl": max(stages["reinforce"]["wall_s"], round(imagined, 2)),
            "eval": round(stages["evaluate_before"]["wall_s"] + stages["evaluate_after"]["wall_s"], 2),
        },
        "command": (run.dir / "command.txt").read_text().strip(),
    }
    write_json(run.dir / "result.json", result)
    return result
