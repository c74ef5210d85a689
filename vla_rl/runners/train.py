"""A training run, stage by stage: demonstrate, imitate, evaluate, reinforce, evaluate, report.

Without a simulator: imitate, then everything in imagination (logs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from episodes.files import write_json
from policies.bundle import Provenance, load_bundle, read_bundle_info, save_bundle
from policies.policy import Policy, RobotSpec
from policies.residual.policy import ResidualConfig, residual_on
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from sims.registry import SimulatorConfig, evaluation_starts, split_of, splits, with_split
from sims.subproc.termination import terminable
from sims.vector_env import VectorEnv
from vla_rl.config.controls import CONTROLS
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, FromBundle, Imitation
from vla_rl.report import write_report
from vla_rl.runners.checks import SpecOnly, check_experiment
from vla_rl.runners.controls import why_not
from vla_rl.runners.demonstrations import record_demonstrations
from vla_rl.runners.evaluate import evaluate_both, evaluate_policy
from vla_rl.runners.imagination import improve_in_imagination
from vla_rl.runners.imitation import clone, cloning_source, given_policy, new_policy
from vla_rl.runners.logs import evaluate_imagined, improve_from_logs, log_result, recorded_spec
from vla_rl.runners.reinforce import reinforce
from vla_rl.runners.videos import write_task_videos
from vla_rl.runs.failures import FailureLog
from vla_rl.runs.progress import progress
from vla_rl.runs.result import RESULT_FILE
from vla_rl.runs.run_dir import (
    COMMAND_FILE,
    Run,
    check_folder,
    evaluation_seconds,
    open_run,
    read_stages,
    stage_seconds,
)
from vla_rl.runs.watchdog import watched


def train(experiment: Experiment, run_dir: Path, *, resume: bool, command: str) -> dict[str, Any]:
    """The whole run; returns what result.json holds. Completed stages are not repeated on ``resume``."""
    with opened(experiment, run_dir, resume=resume, command=command) as (run, env):
        run_stages(run, env)
    with watched("report", run.dir, limit_s=experiment.watchdog_s):
        result = finish(run)
        write_report(run.dir)
    return result


@contextmanager
def opened(experiment: Experiment, run_dir: Path, *, resume: bool, command: str) -> Iterator[tuple[Run, VectorEnv]]:
    """The run and its environment. Everything is checked before the folder is made and anything is simulated."""
    check_folder(experiment, run_dir, resume=resume)
    imitated = read_stages(run_dir).get("imitate")
    with watched("make the simulator", None, limit_s=experiment.watchdog_s):
        env = SpecOnly(recorded_spec(experiment)) if experiment.without_simulator else make_env(experiment.sim)
    try:
        with watched("check the settings", None, limit_s=experiment.watchdog_s):
            check_experiment(experiment, env, start=run_dir / imitated["bundle"] if imitated else None)
        run = open_run(experiment, run_dir, resume=resume, command=command)
        with run.lock, terminable():
            yield run, env
    finally:
        env.close()


def run_stages(run: Run, env: VectorEnv) -> None:
    """Every stage that is pending, in order."""
    with logged_failures(run, env) as failures:
        start = starting_bundle(run, env, failures)
        if run.experiment.without_simulator:
            improve(run, env, start, failures)
            evaluate_imagined(run, env.spec, start)
            return
        with run.stage("evaluate_before") as stage:
            if stage.pending:
                stage.result = evaluate_bundle(run, env, start, name="before")
        failures.write("evaluation before")
        improve(run, env, start, failures)
        with run.stage("evaluate_after") as stage:
            if stage.pending:
                stage.result = evaluate_bundle(run, env, run.bundle, name="after")
        if run.experiment.evaluation.control_episodes:
            with run.stage("evaluate_controls") as stage:
                if stage.pending:
                    stage.result = evaluate_controls(run, env)


def learn(run: Run, env: VectorEnv, *, recorded: Callable[[], None]) -> None:
    """The stages that learn and validate; the held-out starts are left to a ``train`` that resumes the run.

    ``recorded``: called after each iteration; what it raises ends the run, which can be resumed.
    """
    with logged_failures(run, env) as failures:
        improve(run, env, starting_bundle(run, env, failures), failures, recorded)


@contextmanager
def logged_failures(run: Run, env: VectorEnv) -> Iterator[FailureLog]:
    failures = FailureLog(run.dir, env)
    try:
        yield failures
    finally:
        failures.write("at the end")


def starting_bundle(run: Run, env: VectorEnv, failures: FailureLog) -> Path:
    start = run.experiment.start
    with run.stage("imitate") as stage:
        if stage.pending:
            stage.result = STARTS[type(start)](run, env, start)
            if start.residual is not None:
                stage.result |= {"bundle": add_residual(run, stage.result["bundle"], start.residual)}
    failures.write("imitation")
    return run.dir / stage.result["bundle"]


def improve(
    run: Run, env: VectorEnv, start: Path, failures: FailureLog, recorded: Callable[[], None] = lambda: None
) -> None:
    with run.stage("reinforce") as stage:
        if not stage.pending:
            return
        improver = partial(reinforce, failures=failures)
        if (imagination := run.experiment.imagination) is None:
            stage.result = reinforce(run, env, start, run.dir, failures=failures, recorded=recorded)
        elif run.experiment.without_simulator:
            stage.result = improve_from_logs(run, env.spec, start, reinforce=improver)
        else:
            stage.result = improve_in_imagination(run, env, start, imagination, reinforce=improver)


# -- the policy that reinforcement learning starts from -------------------------------------------------------------


def clone_demonstrations(run: Run, env: VectorEnv, start: Imitation) -> dict[str, Any]:
    """The bundle of a policy cloned from demonstrations, which are recorded first where no store is given."""
    (store,) = run.started_from
    if start.store is None:
        with run.stage("demonstrate") as stage:
            if stage.pending:
                stage.result = record_demonstrations(run.experiment, env, store)
    policy = new_policy(start, RobotSpec.of(env.spec), seed=run.experiment.seed, device=run.device)
    bundle = clone(
        policy,
        [cloning_source(run.experiment, store)],
        start.bc,
        run.imitation,
        seed=run.experiment.seed,
        fit_normalizer=True,
    )
    return {"bundle": run.inside(bundle)}


def given_bundle(run: Run, env: VectorEnv, start: FromBundle) -> dict[str, Any]:
    """A copy of the bundle that the configuration names, so that the run needs nothing outside its folder; or what
    cloning a store into its policy makes of it.

    It names the action delay of ``env``, in which the policy is trained from now on.
    """
    given = read_bundle_info(start.path)
    policy = given_policy(start, RobotSpec.of(env.spec), device=run.device)
    if start.store is None:
        policy.prepare_to_explore()
        save_bundle(policy, run.imitation / "bundle", provenance=given.provenance)
        return {"bundle": run.inside(run.imitation / "bundle")}
    bundle = clone(
        policy,
        [cloning_source(run.experiment, start.store)],
        start.bc,
        run.imitation,
        seed=run.experiment.seed,
        fit_normalizer=False,
        parent=given.sha256,
    )
    return {"bundle": run.inside(bundle)}


def add_residual(run: Run, start: str, config: ResidualConfig) -> str:
    """A residual that starts at zero on the policy of bundle ``start``: the bundle that is improved."""
    bundle = run.dir / start
    torch.manual_seed(spawn_seed(run.experiment.seed, "residual"))
    policy = residual_on(load_bundle(bundle), config)
    save_bundle(policy, run.dir / "residual", provenance=Provenance(parent=read_bundle_info(bundle).sha256))
    return run.inside(run.dir / "residual")


STARTS: Mapping[type[Any], Callable[[Run, VectorEnv, Any], dict[str, Any]]] = {
    Imitation: clone_demonstrations,
    FromBundle: given_bundle,
}


# -- evaluation ---------------------------------------------------------------------------------------------------


def evaluate_bundle(run: Run, env: VectorEnv, bundle: Path, *, name: str) -> dict[str, Any]:
    """Deployed and exploring success on the held-out starts, and a video per task."""
    experiment, policy = run.experiment, load_bundle(bundle, device=run.device)
    seed, episodes = experiment.evaluation_seed, experiment.evaluation.episodes
    starts = evaluation_starts(experiment.sim, num_tasks=len(env.spec.tasks), seed=seed, episodes=episodes)
    summaries = evaluate_both(policy, env, starts, seed=seed, title=f"evaluate {name}")
    write_task_videos(policy, experiment, env, run.videos, prefix={"before": "bc", "after": "rl"}[name])
    return summaries


def evaluate_controls(run: Run, env: VectorEnv) -> dict[str, Any]:
    """{controls: {name: summary}, splits: {name: summary}} of the deployed policy, from held-out starts of each split.

    A control that would change nothing, and a split that cannot be simulated here, have null, and in ``not_applicable``
    {name: why}. Closes ``env`` before it makes those of other splits, since the workers of two environments may not fit
    in memory.
    """
    sim, seed = run.experiment.sim, run.experiment.evaluation_seed
    policy, episodes = load_bundle(run.bundle, device=run.device), run.experiment.evaluation.control_episodes
    starts = evaluation_starts(sim, num_tasks=len(env.spec.tasks), seed=seed, episodes=episodes)
    other = [split for split in splits(sim) if split != split_of(sim)]
    found: dict[str, dict[str, Any]] = {"controls": {}, "splits": {}, "not_applicable": {}}
    with progress("evaluate controls", len(CONTROLS) + len(other)) as advance:
        for control in CONTROLS:
            if reason := why_not(control, env, starts):
                found["controls"][control], found["not_applicable"][control] = None, reason
                advance(note=f"{control} does not apply: {reason}")
                continue
            summary = evaluate_policy(policy, env, starts, seed=seed, stochastic=False, control=control)
            found["controls"][control] = summary
            advance(note=f"{control} {summary['success']:.3f}")
        env.close()
        for split in other:
            there = evaluate_elsewhere(policy, with_split(sim, split), seed=seed, episodes=episodes)
            if isinstance(there, str):
                found["splits"][split], found["not_applicable"][split] = None, there
                advance(note=f"{split} does not apply: {there}")
                continue
            found["splits"][split] = there
            advance(note=f"{split} {there['success']:.3f}")
    return found


def evaluate_elsewhere(policy: Policy, sim: SimulatorConfig, *, seed: int, episodes: int) -> dict[str, Any] | str:
    """Summary in another simulator, from its own held-out starts; why not, where it cannot be made."""
    try:
        env = make_env(sim)
    except UserError as error:
        return str(error)
    with closing(env):
        starts = evaluation_starts(sim, num_tasks=len(env.spec.tasks), seed=seed, episodes=episodes)
        return evaluate_policy(policy, env, starts, seed=seed, stochastic=False)


def finish(run: Run) -> dict[str, Any]:
    """result.json, from the record of the stages."""
    result = log_result(run) if run.experiment.without_simulator else simulated_result(run)
    write_json(run.dir / RESULT_FILE, result)
    return result


def simulated_result(run: Run) -> dict[str, Any]:
    """Success in the simulator, before and after."""
    stages = run.stages()
    install = run.dir / "install_s"
    return {
        "bc": stages["evaluate_before"]["deployed"],
        "bc_stochastic": stages["evaluate_before"]["stochastic"],
        "rl": stages["evaluate_after"]["deployed"],
        "stochastic": stages["evaluate_after"]["stochastic"],
        **{key: value for key, value in stages.get("evaluate_controls", {}).items() if key != "wall_s"},
        "seed": run.experiment.seed,
        "episodes": run.experiment.evaluation.episodes,
        "wall_s": {
            "install": float(install.read_text()) if install.exists() else None,
            "collect": stages.get("demonstrate", {}).get("wall_s", 0.0),
            "bc": stages["imitate"]["wall_s"],
            "rl": stage_seconds(run.dir, "reinforce"),
            "eval": evaluation_seconds(run.dir),
        },
        "command": (run.dir / COMMAND_FILE).read_text().strip(),
    }
