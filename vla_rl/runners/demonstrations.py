"""Record demonstrations: the scripted expert of an environment, into the episode store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from episodes.recorder import RecordedEnv, keep_successes
from episodes.store import EpisodeStore
from sims.errors import UserError
from sims.registry import split_of
from sims.starts import StartSequence
from sims.vector_env import DemonstratedEnv, Expert, StartState, VectorEnv
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.runs.progress import progress

ATTEMPTS_PER_SUCCESS = 100  # a task that needs more is not attempted any longer


def collect(experiment: Experiment, *, episodes: int, out: Path) -> dict[str, Any]:
    """``vla-rl collect``: add ``episodes`` successful demonstrations to the store at ``out``."""
    env = make_env(experiment.sim)
    try:
        store = EpisodeStore(out, create=True)
        return demonstrate(experiment, env, store, episodes=episodes, first=len(store.select()))
    finally:
        env.close()


def record_demonstrations(experiment: Experiment, env: VectorEnv, path: Path) -> dict[str, Any]:
    """A run's own demonstrations. Those of an interrupted attempt are recorded again, so equal runs have equal ones."""
    assert isinstance(experiment.start, Imitation)
    if path.exists():
        shutil.rmtree(path)
    store = EpisodeStore(path, create=True)
    return demonstrate(experiment, env, store, episodes=experiment.start.episodes, first=0)


def demonstrate(
    experiment: Experiment, env: VectorEnv, store: EpisodeStore, *, episodes: int, first: int
) -> dict[str, Any]:
    """Exactly ``episodes`` successful episodes; returns {episodes, attempts, given_up: tasks}.

    Failed episodes are not kept, and a task at which the expert almost never succeeds is given up (``Attempts``). No
    more environments run than episodes are still needed, so that the store does not favor short episodes. UserError if
    the environment has no expert or the expert succeeds at no task.
    """
    if not isinstance(env, DemonstratedEnv):
        raise UserError(f"{env.spec.name} has no scripted expert: give recorded episodes as start.store")
    start = experiment.start if isinstance(experiment.start, Imitation) else None
    noise, observe_every = (start.noise, start.observe_every) if start else (0.0, 1)
    expert = env.expert(noise=noise, seed=experiment.seed)
    starts = StartSequence("demos", seed=experiment.seed, num_tasks=len(env.spec.tasks), next_index=first)
    recorder = RecordedEnv(env, store, source="expert", split=split_of(experiment.sim), keep=keep_successes)
    with progress("demonstrate", episodes) as advance:
        attempts = run_expert(
            recorder, expert, starts, episodes=episodes, observe_every=observe_every, on_recorded=advance
        )
    given_up = [name for name, failed in zip(env.spec.tasks, attempts.given_up.tolist(), strict=True) if failed]
    return {"episodes": recorder.recorded, "attempts": recorder.ended, "given_up": given_up}


class Attempts:
    """The expert's finished episodes per task. A task with too few successes (ATTEMPTS_PER_SUCCESS) is given up."""

    def __init__(self, num_tasks: int) -> None:
        self.finished, self.succeeded = torch.zeros(num_tasks), torch.zeros(num_tasks)

    @property
    def given_up(self) -> Bool[Tensor, " tasks"]:
        return self.finished >= ATTEMPTS_PER_SUCCESS * (self.succeeded + 1)

    def add(self, task: Int[Tensor, " n"], success: Bool[Tensor, " n"]) -> None:
        self.finished += torch.bincount(task, minlength=len(self.finished))
        self.succeeded += torch.bincount(task, weights=success.float(), minlength=len(self.succeeded))

    def choose(self, starts: StartSequence, count: int) -> list[StartState]:
        """The next ``count`` starts of tasks that are not given up. UserError if all are."""
        if self.given_up.all():
            succeeded, finished = int(self.succeeded.sum()), int(self.finished.sum())
            raise UserError(f"the expert succeeded in {succeeded} of {finished} episodes; lower start.noise")
        chosen: list[StartState] = []
        while len(chosen) < count:
            chosen += [start for start in starts.take(1) if not self.given_up[start.task]]
        return chosen


def run_expert(
    recorder: RecordedEnv,
    expert: Expert,
    starts: StartSequence,
    *,
    episodes: int,
    observe_every: int,
    on_recorded: Callable[[int], None],
) -> Attempts:
    """Step the expert, observing every ``observe_every`` steps and at the end, until ``episodes`` are recorded."""
    num_envs, attempts = recorder.spec.num_envs, Attempts(len(recorder.spec.tasks))
    task = torch.zeros(num_envs, dtype=torch.int64)
    running = torch.zeros(num_envs, dtype=torch.bool)
    steps = torch.zeros(num_envs, dtype=torch.int64)
    reported = 0
    while recorder.recorded < episodes:
        idle = (~running).nonzero().flatten().tolist()
        needed = idle[: max(0, episodes - recorder.recorded - int(running.sum()))]
        if needed:
            chosen = attempts.choose(starts, len(needed))
            recorder.reset(needed, start=chosen)
            task[needed] = torch.tensor([start.task for start in chosen])
            running[needed], steps[needed] = True, 0
        due = (running & (steps % observe_every == 0)).nonzero().flatten().tolist()
        if due:
            recorder.observe(due)
        step = recorder.step(expert.act())
        steps += 1
        ended = (step.terminated | step.truncated) & running
        if ended.any():
            recorder.observe(ended.nonzero().flatten().tolist())  # the final observation completes the episode
            running &= ~ended
            attempts.add(task[ended], step.success[ended])
        on_recorded(recorder.recorded - reported)
        reported = recorder.recorded
    return attempts
