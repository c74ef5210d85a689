"""Videos of a policy in its simulator: at a larger size where a second simulator beside it costs little."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from policies.device import make_generator
from policies.policy import Policy
from sims.devices.crossing import crossing
from sims.devices.env_on_device import on_device
from sims.registry import evaluation_starts, video_config
from sims.vector_env import StartState, VectorEnv
from sims.video import write_video
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.heartbeat import beat
from vla_rl.runners.evaluate import PolicyActor

VIDEO_SIZE = 256  # pixels of a side


def write_task_videos(
    policy: Policy, experiment: Experiment, env: VectorEnv, directory: Path, *, prefix: str
) -> list[Path]:
    """``<prefix>_<number>_<task>[_<n>].mp4`` of the first held-out starts of every task; the same starts for every
    policy. Earlier ones of ``prefix`` are deleted.

    The policy observes ``env``. The first camera is shown; without cameras there are no videos.
    """
    tasks, seed = env.spec.tasks, experiment.evaluation_seed
    for earlier in directory.glob(f"{prefix}_*.mp4"):
        earlier.unlink()
    count = len(tasks) * experiment.evaluation.videos_per_task
    if count == 0 or not env.spec.cameras:
        return []
    starts = evaluation_starts(experiment.sim, num_tasks=len(tasks), seed=seed, episodes=count)
    at_once = min(count, env.spec.num_envs)
    config = video_config(experiment.sim, image_size=VIDEO_SIZE, num_envs=at_once)
    camera = make_env(config) if config is not None else env
    try:
        videos = [
            video
            for first in range(0, count, at_once)
            for video in render_episodes(policy, env, camera, starts[first : first + at_once], seed=seed)
        ]
    finally:
        if camera is not env:
            camera.close()
    scale = max(1, VIDEO_SIZE // min(camera.spec.image_size))
    paths = []
    for i, (start, (frames, success)) in enumerate(zip(starts, videos, strict=True)):
        suffix = f"_{i // len(tasks)}" if i >= len(tasks) else ""
        path = directory / f"{prefix}_{file_name(start.task, tasks[start.task])}{suffix}.mp4"
        paths.append(write_video(path, frames, fps=env.spec.control_hz, success=success, scale=scale))
    return paths


def file_name(number: int, task: str) -> str:
    """A task as part of a file's name: of its instruction the Latin letters and digits, cut, so the number tells it."""
    return f"{number}_{re.sub(r'[^a-z0-9]+', '_', task.lower())[:60]}".strip("_")


@torch.no_grad()
def render_episodes(
    policy: Policy, env: VectorEnv, camera: VectorEnv, starts: list[StartState], *, seed: int
) -> list[tuple[Tensor, bool]]:
    """Frames [T, height, width, 3] of ``camera``'s first camera from every start, and whether it succeeded.

    ``camera`` is a second environment that repeats what happens in ``env``, or ``env`` itself.
    """
    second = camera is not env
    env, camera = (on_device(one, torch.device("cpu")) for one in (env, camera))
    act = PolicyActor(policy, env.spec.num_envs, make_generator(policy.device, seed), stochastic=False)
    env_ids = list(range(len(starts)))
    for one in [env, camera] if second else [env]:
        one.reset(env_ids, start=starts)
    act.begin(env_ids)
    alive = torch.ones(len(starts), dtype=torch.bool)
    success = torch.zeros_like(alive)
    frames: list[list[Tensor]] = [[image] for image in camera.observe(env_ids).images[:, 0]]
    while alive.any():
        with crossing("evaluation"):
            chunk = act(env.observe(env_ids).to(policy.device), env_ids).cpu()
        for action in chunk.unbind(1):
            whole = action.new_zeros(env.spec.num_envs, action.shape[1])
            whole[env_ids] = action
            step = env.step(whole)
            beat()
            if second:
                camera.step(whole[: camera.spec.num_envs])
            shown = alive.nonzero().flatten().tolist()
            for i, image in zip(shown, camera.observe(shown).images[:, 0], strict=True):
                frames[i].append(image)
            success |= step.success[env_ids]
            alive &= ~step.done[env_ids]
            if not alive.any():
                break
    return [(torch.stack(video), bool(won)) for video, won in zip(frames, success, strict=True)]
