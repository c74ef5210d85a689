"""Videos of a policy: it looks through its own small cameras, a second simulator films the same episode larger."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from policies.policy import Policy
from sims.starts import StartSequence
from sims.vector_env import StartState, VectorEnv
from sims.video import write_video
from vla_rl.build import make_env
from vla_rl.evaluate import actor
from vla_rl.experiment import Experiment

FILM_SIZE = 256


def film_tasks(policy: Policy, experiment: Experiment, directory: Path, *, prefix: str) -> list[Path]:
    """``<prefix>_<task>[_<n>].mp4`` of the first held-out starts of every task; the same starts for every policy."""
    tasks = experiment.sim.tasks
    count = len(tasks) * experiment.evaluation.videos_per_task
    if count == 0:
        return []
    starts = StartSequence("evaluation", seed=experiment.evaluation.seed, num_tasks=len(tasks)).take(count)
    eyes = make_env(dataclasses.replace(experiment.sim, num_envs=count))
    camera = make_env(dataclasses.replace(experiment.sim, num_envs=count, image_size=(FILM_SIZE, FILM_SIZE)))
    try:
        frames, success = film_episodes(policy, eyes, camera, starts, seed=experiment.evaluation.seed)
    finally:
        eyes.close()
        camera.close()
    paths = []
    for i, start in enumerate(starts):
        suffix = f"_{i // len(tasks)}" if i >= len(tasks) else ""
        path = directory / f"{prefix}_{tasks[start.task]}{suffix}.mp4"
        write_video(path, frames[i], fps=eyes.spec.control_hz, success=bool(success[i]))
        paths.append(path)
    return paths


@torch.no_grad()
def film_episodes(
    policy: Policy, eyes: VectorEnv, camera: VectorEnv, starts: list[StartState], *, seed: int
) -> tuple[list[Tensor], Tensor]:
    """Frames [T, height, width, 3] of ``camera``'s first camera for every row, and whether it succeeded."""
    act = actor(policy, torch.Generator().manual_seed(seed), stochastic=False)
    for env in (eyes, camera):
        env.reset(start=starts)
    alive = torch.ones(len(starts), dtype=torch.bool)
    success = torch.zeros_like(alive)
    frames: list[list[Tensor]] = [[image] for image in camera.observe().images[:, 0]]
    while alive.any():
        for action in act(eyes.observe()).unbind(1):
            step = eyes.step(action)
            camera.step(action)
            rows = alive.nonzero().flatten().tolist()
            for row, image in zip(rows, camera.observe(rows).images[:, 0], strict=True):
                frames[row].append(image)
            success |= step.success
            alive &= ~(step.terminated | step.truncated)
            if not alive.any():
                break
    return [torch.stack(row) for row in frames], success
