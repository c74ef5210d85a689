"""Videos of a policy in its simulator: at a larger size where a second simulator beside it costs little."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from policies.policy import Policy
from sims.registry import evaluation_starts, video_config
from sims.vector_env import StartState, VectorEnv
from sims.video import write_video
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.runners.evaluate import PolicyActor

VIDEO_SIZE = 256  # pixels of a side


def write_task_videos(
    policy: Policy, experiment: Experiment, env: VectorEnv, directory: Path, *, prefix: str
) -> list[Path]:
    """``<prefix>_<task>[_<n>].mp4`` of the first held-out starts of every task; the same starts for every policy.

    The policy observes ``env``. The first camera is shown; without cameras there are no videos.
    """
    tasks, settings = env.spec.tasks, experiment.evaluation
    count = len(tasks) * settings.videos_per_task
    if count == 0 or not env.spec.cameras:
        return []
    starts = evaluation_starts(experiment.sim, num_tasks=len(tasks), seed=settings.seed, episodes=count)
    at_once = min(count, env.spec.num_envs)
    config = video_config(experiment.sim, image_size=VIDEO_SIZE, num_envs=at_once)
    camera = make_env(config) if config is not None else env
    try:
        videos = [
            video
            for first in range(0, count, at_once)
            for video in render_episodes(policy, env, camera, starts[first : first + at_once], seed=settings.seed)
        ]
    finally:
        if camera is not env:
            camera.close()
    scale = max(1, VIDEO_SIZE // min(camera.spec.image_size))
    paths = []
    for i, (start, (frames, success)) in enumerate(zip(starts, videos, strict=True)):
        suffix = f"_{i // len(tasks)}" if i >= len(tasks) else ""
        path = directory / f"{prefix}_{file_name(tasks[start.task])}{suffix}.mp4"
        paths.append(write_video(path, frames.cpu(), fps=env.spec.control_hz, success=success, scale=scale))
    return paths


def file_name(task: str) -> str:
    """An instruction as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", task.lower()).strip("_")


@torch.no_grad()
def render_episodes(
    policy: Policy, env: VectorEnv, camera: VectorEnv, starts: list[StartState], *, seed: int
) -> list[tuple[Tensor, bool]]:
    """Frames [T, height, width, 3] of ``camera``'s first camera from every start, and whether it succeeded.

    ``camera`` is a second environment that repeats what happens in ``env``, or ``env`` itself.
    """
    act = PolicyActor(policy, env.spec.num_envs, torch.Generator().manual_seed(seed), stochastic=False)
    env_ids = list(range(len(starts)))
    for one in [env] if camera is env else [env, camera]:
        one.reset(env_ids, start=starts)
    act.begin(env_ids)
    alive = torch.ones(len(starts), dtype=torch.bool)
    success = torch.zeros_like(alive)
    frames: list[list[Tensor]] = [[image] for image in camera.observe(env_ids).images[:, 0]]
    while alive.any():
        for action in act(env.observe(env_ids), env_ids).unbind(1):
            whole = action.new_zeros(env.spec.num_envs, action.shape[1])
            whole[env_ids] = action
            step = env.step(whole)
            if camera is not env:
                camera.step(whole[: camera.spec.num_envs])
            shown = alive.nonzero().flatten().tolist()
            for i, image in zip(shown, camera.observe(shown).images[:, 0], strict=True):
                frames[i].append(image)
            success |= step.success[env_ids].cpu()
            alive &= ~(step.terminated | step.truncated)[env_ids].cpu()
            if not alive.any():
                break
    return [(torch.stack(video), bool(won)) for video, won in zip(frames, success, strict=True)]
