"""A training run, stage by stage: demonstrate, imitate, evaluate, reinforce, evaluate, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from policies.backbone import load_backbone
from policies.bundle import load_bundle
from policies.policy import RobotSpec
from policies.registry import build_policy
from sims.registry import evaluation_starts
from sims.vector_env import VectorEnv
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, FromBundle, Imitation
from vla_rl.report import write_report
from vla_rl.runners.demonstrations import record_demonstrations
from vla_rl.runners.evaluate import evaluate_both
from vla_rl.runners.imagination import improve_in_imagination
from vla_rl.runners.imitation import clone
from vla_rl.runners.reinforce import reinforce
from vla_rl.runners.videos import write_task_videos
from vla_rl.runs.failures import FailureLog
from vla_rl.runs.run_dir import Run, open_run, write_json


def train(experiment: Experiment, run_dir: Path, *, resume: bool, command: str) -> dict[str, Any]:
    """The whole run; returns what result.json holds. Completed stages are not repeated on ``resume``."""
    run = open_run(experiment, run_dir, resume=resume, command=command)
    with run.lock:
        env = make_env(experiment.sim)
        failures = FailureLog(run.dir, env)
        try:
            with run.stage("imitate") as stage:
                if stage.pending:
                    stage.result = STARTS[type(experiment.start)](run, env, experiment.start)
                start = Path(stage.result["bundle"])
            failures.write("imitation")
            with run.stage("evaluate_before") as stage:
                if stage.pending:
                    stage.result = evaluate_bundle(run, env, start, name="before")
            failures.write("evaluation before")
            with run.stage("reinforce") as stage:
                if stage.pending and (imagination := experiment.imagination) is not None:
                    stage.result = improve_in_imagination(
                        run, env, start, imagination, reinforce=partial(reinforce, failures=failures)
                    )
                elif stage.pending:
                    stage.result = reinforce(run, env, start, run.dir, failures=failures)
            with run.stage("evaluate_after") as stage:
                if stage.pending:
                    stage.result = evaluate_bundle(run, env, run.bundle, name="after")
        finally:
            failures.write("at the end")
            env.close()
        result = finish(run)
        write_report(run.dir)
        return result


# -- the policy that reinforcement learning starts from -------------------------------------------------------------


def clone_demonstrations(run: Run, env: VectorEnv, start: Imitation) -> dict[str, Any]:
    """The bundle of a policy cloned from demonstrations, which are recorded first where no store is given."""
    store = Path(start.store) if start.store is not None else run.demonstrations
    seconds = 0.0
    if start.store is None:
        with run.stage("demonstrate") as stage:
            if stage.pending:
                stage.result = record_demonstrations(run.experiment, env, store)
            seconds = stage.result.get("wall_s", 0.0)
    torch.manual_seed(run.experiment.seed)
    policy = build_policy(start.policy, RobotSpec.of(env.spec))
    if start.backbone is not None:
        load_backbone(policy, start.backbone)
    bundle = clone(policy, [store], start.bc, run.imitation, seed=run.experiment.seed, fit_normalizer=True)
    return {"bundle": str(bundle), "demonstrate_s": seconds}


def given_bundle(run: Run, env: VectorEnv, start: FromBundle) -> dict[str, Any]:
    """The bundle that the configuration names, if it fits the environment."""
    load_bundle(Path(start.path), action_dim=env.spec.action_dim, cameras=env.spec.cameras)
    return {"bundle": start.path}


STARTS: Mapping[type[Any], Callable[[Run, VectorEnv, Any], dict[str, Any]]] = {
    Imitation: clone_demonstrations,
    FromBundle: given_bundle,
}


# -- evaluation ---------------------------------------------------------------------------------------------------


def evaluate_bundle(run: Run, env: VectorEnv, bundle: Path, *, name: str) -> dict[str, Any]:
    """Deployed and exploring success on the held-out starts, and a video per task."""
    settings = run.experiment.evaluation
    policy = load_bundle(bundle)
    starts = evaluation_starts(
        run.experiment.sim, num_tasks=len(env.spec.tasks), seed=settings.seed, episodes=settings.episodes
    )
    summaries = evaluate_both(policy, env, starts, seed=settings.seed, title=f"evaluate {name}")
    write_task_videos(policy, run.experiment, env, run.videos, prefix={"before": "bc", "after": "rl"}[name])
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
