"""Record demonstrations: the scripted expert of an environment, into the episode store."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from episodes.layout import Layout, store_layout
from episodes.recorder import RecordedEnv, keep_all, keep_successes
from episodes.store import EpisodeStore
from policies.bundle import bundle_version, load_bundle
from policies.device import make_generator
from policies.policy import RobotSpec
from sims.devices.crossing import crossing
from sims.devices.env_on_device import on_device
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from sims.registry import split_of
from sims.starts import Restarts, StartSequence
from sims.vector_env import DemonstratedEnv, EnvSpec, Expert, StartState, VectorEnv
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.runners.evaluate import Actor, EpisodeResults, PolicyActor, run_episodes
from vla_rl.runners.observe_every import ObserveEvery
from vla_rl.runs.progress import progress
from vla_rl.runs.run_dir import experiment_device

ATTEMPTS_PER_SUCCESS = 100  # a task that needs more is not attempted any longer


def collect(
    experiment: Experiment, *, episodes: int, out: Path, failures: bool = False, policy: Path | None = None
) -> dict[str, Any]:
    """``vla-rl collect``: add ``episodes`` demonstrations to the store at ``out``; with ``failures`` failed ones too.

    ``policy``: episodes of this bundle instead, exploring, successful or not. UserError where the store has episodes of
    other cameras, image sizes, dimensions or control rates.
    """
    env = make_env(experiment.sim)
    try:
        if policy is None and not failures:
            check_demonstrated(imitation_of(experiment), env, episodes, setting="--episodes")
        store = EpisodeStore(out, create=True)
        _check_layout(store, env.spec)
        if policy is not None:
            return record_policy(experiment, env, store, policy, episodes=episodes)
        return demonstrate(experiment, env, store, episodes=episodes, failures=failures)
    finally:
        env.close()


def imitation_of(experiment: Experiment) -> Imitation:
    """How demonstrations are recorded; as by default where the experiment records none."""
    return experiment.start if isinstance(experiment.start, Imitation) else Imitation()


def check_demonstrated(start: Imitation, env: VectorEnv, episodes: int, *, setting: str) -> None:
    """UserError where there is no expert, or fewer ``episodes``, given by ``setting``, than tasks that need one."""
    _with_expert(env)
    tasks = len(env.spec.tasks)
    if start.equal_shares and start.missing_tasks == "error" and episodes < tasks:
        raise UserError(f"{setting} must be at least {tasks}, one for each task of sim, got {episodes}")


def _with_expert(env: VectorEnv) -> DemonstratedEnv:
    if not isinstance(env, DemonstratedEnv):
        raise UserError(f"{env.spec.name} has no scripted expert: give recorded episodes as start.store")
    return env


def _check_layout(store: EpisodeStore, spec: EnvSpec) -> None:
    cameras = dict.fromkeys(spec.cameras, spec.image_size)
    new = Layout(cameras=cameras, state_dim=spec.state_dim, action_dim=spec.action_dim, control_hz=spec.control_hz)
    if (present := store_layout(store)) not in (None, new):
        raise UserError(
            f"{store.path} has episodes with {present}, but {spec.name} has {new}: nothing was recorded; give another "
            "--out, or the simulator the settings that the episodes there were recorded with"
        )


def record_policy(
    experiment: Experiment, env: VectorEnv, store: EpisodeStore, bundle: Path, *, episodes: int
) -> dict[str, Any]:
    """``episodes`` of the exploring policy, tasks in turn; they begin after the last start that ``store`` has.

    Returns {episodes, success}.
    """
    start = imitation_of(experiment)
    policy = load_bundle(bundle, robot=RobotSpec.of(env.spec), device=experiment_device(experiment))
    starts = starts_after(store, experiment, num_tasks=len(env.spec.tasks))
    generator = make_generator(policy.device, spawn_seed(experiment.seed, "record", starts.next_index))
    actor = PolicyActor(policy, env.spec.num_envs, generator, stochastic=True)
    recorder = RecordedEnv(
        env, store, source="policy", split=split_of(experiment.sim), policy_version=bundle_version(bundle)
    )
    results = record(recorder, actor, starts.take(episodes), every=start.observe_every, device=policy.device)
    return {"episodes": recorder.recorded, "success": results.success.float().mean().item()}


def record(
    recorder: RecordedEnv, act: Actor, starts: Sequence[StartState], *, every: int, device: torch.device
) -> EpisodeResults:
    """Every start once, observed at every ``every`` control steps, into the store. ``device``: of ``act``."""
    results = run_episodes(on_device(ObserveEvery(recorder, every=every), device), act, starts)
    recorder.commit()
    return results


def starts_after(store: EpisodeStore, experiment: Experiment, *, num_tasks: int) -> StartSequence:
    """The stream of demonstrations, behind the last start of which ``store`` has an episode."""
    starts = StartSequence("demos", seed=experiment.seed, num_tasks=num_tasks)
    starts.skip({entry.seed for entry in store.entries()})
    return starts


def record_demonstrations(experiment: Experiment, env: VectorEnv, path: Path) -> dict[str, Any]:
    """A run's own demonstrations. Those of an interrupted attempt are recorded again, so equal runs have equal ones."""
    assert isinstance(experiment.start, Imitation)
    return demonstrate(experiment, env, new_store(path), episodes=experiment.start.episodes)


def new_store(path: Path) -> EpisodeStore:
    """An empty one; what an interrupted attempt left there is deleted."""
    if path.exists():
        shutil.rmtree(path)
    return EpisodeStore(path, create=True)


def demonstrate(
    experiment: Experiment, env: VectorEnv, store: EpisodeStore, *, episodes: int, failures: bool = False
) -> dict[str, Any]:
    """``episodes`` more successful episodes; returns {episodes, attempts, per_task: {task: {episodes, attempts}}}.

    They begin after the last start of which ``store`` has an episode. Failed episodes are not kept, or with
    ``failures`` counted and kept, tasks in turn; a task at which the expert almost never succeeds is given up
    (``Attempts``). No
    more environments run than episodes are still needed, so that the store does not favor short episodes. UserError if
    the environment has no expert, the expert succeeds at no task, or a task is missing without ``failures`` and
    start.missing_tasks does not allow it.
    """
    start = imitation_of(experiment)
    expert = _with_expert(env).expert(noise=start.noise, seed=spawn_seed(experiment.seed, "expert"))
    starts = starts_after(store, experiment, num_tasks=len(env.spec.tasks))
    keep = keep_all if failures else keep_successes
    recorder = RecordedEnv(env, store, source="expert", split=split_of(experiment.sim), keep=keep)
    attempts = Attempts(len(env.spec.tasks), share=episodes if start.equal_shares and not failures else None)
    with progress("demonstrate", episodes) as advance:
        run_expert(
            recorder,
            expert,
            starts,
            attempts,
            episodes=episodes,
            observe_every=start.observe_every,
            on_recorded=advance,
        )
    if start.missing_tasks == "error" and not failures:
        _refuse_missing(env.spec.tasks, attempts)
    return {"episodes": recorder.recorded, "attempts": recorder.ended, "per_task": attempts.per_task(env.spec.tasks)}


def _refuse_missing(tasks: Sequence[str], attempts: Attempts) -> None:
    missing = attempts.given_up | (attempts.succeeded == 0)
    if missing.any():
        counts = attempts.per_task(tasks)
        found = [
            f"{name} ({counts[name]['episodes']} of {counts[name]['attempts']} attempts succeeded)"
            for name, without in zip(tasks, missing.tolist(), strict=True)
            if without
        ]
        raise UserError(
            f"too few demonstrations of {', '.join(found)}; lower start.noise, record more episodes, leave the task "
            "out of sim.tasks, or set start.missing_tasks to skip"
        )


class Attempts:
    """The expert's finished episodes per task. A task with too few successes (ATTEMPTS_PER_SUCCESS) is given up.

    ``share``: episodes to divide equally among the tasks; None: start states of all tasks in turn.
    """

    def __init__(self, num_tasks: int, *, share: int | None = None) -> None:
        self.finished, self.succeeded = torch.zeros(num_tasks), torch.zeros(num_tasks)
        self._shares: Int[Tensor, " tasks"] | None = None
        if share is not None:
            self._shares = torch.full((num_tasks,), share // num_tasks)
            self._shares[: share % num_tasks] += 1

    @property
    def given_up(self) -> Bool[Tensor, " tasks"]:
        return self.finished >= ATTEMPTS_PER_SUCCESS * (self.succeeded + 1)

    def add(self, task: Int[Tensor, " n"], success: Bool[Tensor, " n"]) -> None:
        self.finished += torch.bincount(task, minlength=len(self.finished))
        self.succeeded += torch.bincount(task, weights=success.float(), minlength=len(self.succeeded))

    def choose(self, starts: StartSequence, count: int, running: Int[Tensor, " r"]) -> list[StartState]:
        """The next starts, ``count`` at most, of tasks that need episodes. UserError if all tasks are given up.

        ``running``: the tasks of the episodes that run already.
        """
        if self.given_up.all():
            succeeded, finished = int(self.succeeded.sum()), int(self.finished.sum())
            raise UserError(f"the expert succeeded in {succeeded} of {finished} episodes; lower start.noise")
        needed = torch.full((len(self.finished),), count)
        if self._shares is not None:
            needed = self._shares - self.succeeded.long() - torch.bincount(running, minlength=len(self._shares))
        needed = torch.where(self.given_up, 0, needed)
        chosen: list[StartState] = []
        while len(chosen) < count and (needed > 0).any():
            (start,) = starts.take(1)
            if needed[start.task] > 0:
                needed[start.task] -= 1
                chosen.append(start)
        return chosen

    def per_task(self, tasks: Sequence[str]) -> dict[str, dict[str, int]]:
        """{task: {episodes: successes, attempts: finished episodes}}."""
        counts = zip(tasks, self.succeeded.tolist(), self.finished.tolist(), strict=True)
        return {name: {"episodes": int(succeeded), "attempts": int(finished)} for name, succeeded, finished in counts}


def run_expert(
    recorder: RecordedEnv,
    expert: Expert,
    starts: StartSequence,
    attempts: Attempts,
    *,
    episodes: int,
    observe_every: int,
    on_recorded: Callable[[int], None],
) -> None:
    """Step the expert, observing every ``observe_every`` steps and at the end, until ``episodes`` are recorded.

    Fewer are recorded where a task that has a share of them is given up. An episode in which the environment fails is
    no attempt: it starts again. UserError where that goes on (``Restarts``).
    """
    num_envs = recorder.spec.num_envs
    env = ObserveEvery(recorder, every=observe_every)
    start_of = [StartState(task=0, seed=0)] * num_envs  # of the present episodes
    task = torch.zeros(num_envs, dtype=torch.int64)
    running = torch.zeros(num_envs, dtype=torch.bool)
    reported, restarts = 0, Restarts()
    while recorder.recorded < episodes:
        idle = (~running).nonzero().flatten().tolist()
        count = min(len(idle), episodes - recorder.recorded - int(running.sum()))
        chosen = attempts.choose(starts, count, task[running]) if count > 0 else []
        if not chosen and not running.any():
            return
        if chosen:
            begun = idle[: len(chosen)]
            env.reset(begun, start=chosen)
            env.observe(begun)
            for env_id, start in zip(begun, chosen, strict=True):
                start_of[env_id], task[env_id] = start, start.task
            running[begun] = True
        step = env.step(expert.act())
        with crossing("outcomes"):
            outcome = step.to(torch.device("cpu"))
        if failed := (running & ~outcome.valid).nonzero().flatten().tolist():
            again = [start_of[env_id] for env_id in failed]
            restarts.add(again)
            env.reset(failed, start=again)
            env.observe(failed)
        ended = outcome.done & outcome.valid & running
        if ended.any():
            running &= ~ended
            attempts.add(task[ended], outcome.success[ended])
        on_recorded(recorder.recorded - reported)
        reported = recorder.recorded
