"""Record demonstrations: the scripted expert of a world, into the episode store."""

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


def collect(experiment: Experiment, *, episodes: int, out: Path) -> dict[str, Any]:
    """``vla-rl collect``: add ``episodes`` successful demonstrations to the store at ``out``."""
    env = make_env(experiment.sim)
    try:
        store = EpisodeStore(out, create=True)
        return demonstrate(experiment, env, store, episodes=episodes, first=len(store.select()))
    finally:
        env.close()


def record_demonstrations(experiment: Experiment, env: VectorEnv, path: Path) -> dict[str, Any]:
    """A run's own demonstrations; what an interrupted try left is made anew, so the same run has the same ones."""
    assert isinstance(experiment.start, Imitation)
    if path.exists():
        shutil.rmtree(path)
    store = EpisodeStore(path, create=True)
    return demonstrate(experiment, env, store, episodes=experiment.start.episodes, first=0)


def demonstrate(
    experiment: Experiment, env: VectorEnv, store: EpisodeStore, *, episodes: int, first: int
) -> dict[str, Any]:
    """Exactly ``episodes`` successful episodes; returns {episodes, attempts, given_up: tasks}.

    Failed tries are not kept, and a task at which the expert hardly ever succeeds is given up (``Tries``). Never more
    rows run than episodes are wanted, so the store does not favour short episodes. UserError if the world has no
    expert or the expert succeeds at nothing.
    """
    if not isinstance(env, DemonstratedEnv):
        raise UserError(f"{env.spec.name} has no scripted expert: give recorded episodes as start.store")
    start = experiment.start if isinstance(experiment.start, Imitation) else None
    noise, observe_every = (start.noise, start.observe_every) if start else (0.0, 1)
    expert = env.expert(noise=noise, seed=experiment.seed)
    starts = StartSequence("demos", seed=experiment.seed, num_tasks=len(env.spec.tasks), next_index=first)
    recorder = RecordedEnv(env, store, source="expert", split=split_of(experiment.sim), keep=keep_successes)
    with progress("demonstrate", episodes) as advance:
        tries = run_expert(
            recorder, expert, starts, episodes=episodes, observe_every=observe_every, on_recorded=advance
        )
    given_up = [name for name, hopeless in zip(env.spec.tasks, tries.hopeless.tolist(), strict=True) if hopeless]
    return {"episodes": recorder.recorded, "attempts": recorder.ended, "given_up": given_up}


class Tries:
    """What became of the expert's episodes, task by task: one that needs ``ENOUGH`` tries a success is given up."""

    ENOUGH = 100

    def __init__(self, num_tasks: int) -> None:
        self.ended, self.won = torch.zeros(num_tasks), torch.zeros(num_tasks)

    @property
    def hopeless(self) -> Bool[Tensor, " tasks"]:
        return self.ended >= self.ENOUGH * (self.won + 1)

    def note(self, task: Int[Tensor, " n"], success: Bool[Tensor, " n"]) -> None:
        self.ended += torch.bincount(task, minlength=len(self.ended))
        self.won += torch.bincount(task, weights=success.float(), minlength=len(self.won))

    def choose(self, starts: StartSequence, count: int) -> list[StartState]:
        """The next ``count`` starts that are worth a try. UserError if there are none."""
        if self.hopeless.all():
            won, ended = int(self.won.sum()), int(self.ended.sum())
            raise UserError(f"the expert succeeded in {won} of {ended} tries; lower start.noise")
        chosen: list[StartState] = []
        while len(chosen) < count:
            chosen += [start for start in starts.take(1) if not self.hopeless[start.task]]
        return chosen


def run_expert(
    recorder: RecordedEnv,
    expert: Expert,
    starts: StartSequence,
    *,
    episodes: int,
    observe_every: int,
    on_recorded: Callable[[int], None],
) -> Tries:
    """Step the expert, looking at every ``observe_every``-th step, until ``episodes`` are recorded."""
    num_envs, tries = recorder.spec.num_envs, Tries(len(recorder.spec.tasks))
    task = torch.zeros(num_envs, dtype=torch.int64)
    live = torch.zeros(num_envs, dtype=torch.bool)
    steps = torch.zeros(num_envs, dtype=torch.int64)
    reported = 0
    while recorder.recorded < episodes:
        idle = (~live).nonzero().flatten().tolist()
        wanted = idle[: max(0, episodes - recorder.recorded - int(live.sum()))]
        if wanted:
            chosen = tries.choose(starts, len(wanted))
            recorder.reset(wanted, start=chosen)
            task[wanted] = torch.tensor([start.task for start in chosen])
            live[wanted], steps[wanted] = True, 0
        looking = (live & (steps % observe_every == 0)).nonzero().flatten().tolist()
        if looking:
            recorder.observe(looking)
        step = recorder.step(expert.act())
        steps += 1
        ended = (step.terminated | step.truncated) & live
        if ended.any():
            recorder.observe(ended.nonzero().flatten().tolist())  # the final look, which commits
            live &= ~ended
            tries.note(task[ended], step.success[ended])
        on_recorded(recorder.recorded - reported)
        reported = recorder.recorded
    return tries
