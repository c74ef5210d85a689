"""Videos of a policy, as its simulator shows it: larger where a second simulator beside it costs little."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from policies.policy import Policy
from sims.registry import evaluation_starts, make_env, video_config
from sims.vector_env import StartState, VectorEnv
from sims.video import write_video
from vla_rl.config.experiment import Experiment
from vla_rl.runners.evaluate import actor

FILM_SIZE = 256


def film_tasks(policy: Policy, experiment: Experiment, env: VectorEnv, directory: Path, *, prefix: str) -> list[Path]:
    """``<prefix>_<task>[_<n>].mp4`` of the first held-out starts of every task; the same starts for every policy.

    The policy looks through ``env``. The first camera is filmed; without cameras there are no videos.
    """
    tasks, settings = env.spec.tasks, experiment.evaluation
    count = len(tasks) * settings.videos_per_task
    if count == 0 or not env.spec.cameras:
        return []
    starts = evaluation_starts(experiment.sim, num_tasks=len(tasks), seed=settings.seed, episodes=count)
    rows = min(count, env.spec.num_envs)
    config = video_config(experiment.sim, image_size=FILM_SIZE, num_envs=rows)
    camera = make_env(config) if config is not None else env
    try:
        films = [
            film
            for first in range(0, count, rows)
            for film in film_episodes(policy, env, camera, starts[first : first + rows], seed=settings.seed)
        ]
    finally:
        if camera is not env:
            camera.close()
    scale = max(1, FILM_SIZE // min(camera.spec.image_size))
    paths = []
    for i, (start, (frames, success)) in enumerate(zip(starts, films, strict=True)):
        suffix = f"_{i // len(tasks)}" if i >= len(tasks) else ""
        path = directory / f"{prefix}_{file_name(tasks[start.task])}{suffix}.mp4"
        paths.append(write_video(path, frames.cpu(), fps=env.spec.control_hz, success=success, scale=scale))
    return paths


def file_name(task: str) -> str:
    """An instruction as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", task.lower()).strip("_")


@torch.no_grad()
def film_episodes(
    policy: Policy, eyes: VectorEnv, camera: VectorEnv, starts: list[StartState], *, seed: int
) -> list[tuple[Tensor, bool]]:
    """Frames [T, height, width, 3] of ``camera``'s first camera from every start, and whether it succeeded.

    ``camera`` is a second world that repeats what happens in ``eyes``, or ``eyes`` itself.
    """
    act = actor(policy, torch.Generator().manual_seed(seed), stochastic=False)
    rows = list(range(len(starts)))
    worlds = [eyes] if camera is eyes else [eyes, camera]
    for env in worlds:
        env.reset(rows, start=starts)
    alive = torch.ones(len(starts), dtype=torch.bool)
    success = torch.zeros_like(alive)
    frames: list[list[Tensor]] = [[image] for image in camera.observe(rows).images[:, 0]]
    while alive.any():
        for action in act(eyes.observe(rows)).unbind(1):
            whole = action.new_zeros(eyes.spec.num_envs, action.shape[1])
            whole[rows] = action
            step = eyes.step(whole)
            if camera is not eyes:
                camera.step(whole[: camera.spec.num_envs])
            shown = alive.nonzero().flatten().tolist()
            for row, image in zip(shown, camera.observe(shown).images[:, 0], strict=True):
                frames[row].append(image)
            success |= step.success[rows].cpu()
            alive &= ~(step.terminated | step.truncated)[rows].cpu()
            if not alive.any():
                break
    return [(torch.stack(row), bool(won)) for row, won in zip(frames, success, strict=True)]
