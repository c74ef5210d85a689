"""Success of policies in whole imagined episodes, beside that in the environment where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from policies.bundle import load_bundle
from policies.device import CPU, Device, make_generator
from policies.policy import Policy
from sims.devices.env_on_device import on_device
from sims.numbers.statistics import rate_difference_within_tasks, wilson_interval
from sims.vector_env import StartState, VectorEnv
from vla_rl.config.imagination import WorldModelConfig
from vla_rl.runners.evaluate import PolicyActor, run_episodes
from vla_rl.runners.world_model import WORLD_MODEL_FILE, make_imagined_env, open_clips_for, time_limits
from world_models.bundle import FittedWorldModel, check_robot, load_world_model
from world_models.data.clip_sampler import ClipSampler
from world_models.data.keyframes import RecordedStarts
from world_models.evaluation.action_sequences import startable
from world_models.imagined_env import ImaginedEnv


def compare_success(
    config: WorldModelConfig,
    directory: Path,
    stores: Sequence[Path],
    *,
    env: VectorEnv | None,
    bundles: Sequence[Path],
    count: int,
    seed: int,
    device: Device = CPU,
) -> dict[str, Any]:
    """Each policy's success in the world model and in ``env``, from the same held-out starts.

    ``interval``: of the imagined success. ``delta_success``: mean absolute difference, task by task; ``correlation``
    (Pearson) over the policies, from three on. Without ``env`` (episodes recorded elsewhere) these and the real success
    are None.
    """
    fitted = load_world_model(directory / WORLD_MODEL_FILE, device)
    clips = open_clips_for(fitted, stores, "held_out")
    limits = time_limits(None if env is None else env.spec, fitted, stores)
    imagined, starts = whole_episodes(config, fitted, clips, startable(clips, env), limits=limits, count=count)
    recorded_from = [replace(start, seed=clips.entries[start.seed].seed) for start in starts]
    task = torch.tensor([start.task for start in starts])
    rows, apart = list[dict[str, Any]](), list[float]()
    for bundle in bundles:
        policy = load_bundle(bundle, device=device)
        check_robot(fitted.info, policy.spec.robot, what=f"the policy {bundle}")
        success = _success(policy, imagined, starts, seed=seed)
        rate, real = success.float().mean().item(), None
        if env is not None:
            truth = _success(policy, env, recorded_from, seed=seed)
            apart.append(rate_difference_within_tasks(success, truth, task))
            real = truth.float().mean().item()
        interval, episodes = wilson_interval(int(success.sum()), len(starts)), len(starts)
        rows.append({"bundle": str(bundle), "imagined": rate, "interval": interval, "episodes": episodes, "real": real})
    if env is None:
        return {"policies": rows, "delta_success": None, "correlation": None}
    pairs = np.array([[row["imagined"], row["real"]] for row in rows])
    known = len(rows) >= 3 and (pairs.std(0) > 0).all()
    return {
        "policies": rows,
        "delta_success": float(np.mean(apart)),
        "correlation": float(np.corrcoef(pairs.T)[0, 1]) if known else None,
    }


def whole_episodes(
    config: WorldModelConfig,
    fitted: FittedWorldModel,
    clips: ClipSampler,
    episodes: Sequence[int],
    *,
    limits: Mapping[str, int],
    count: int,
) -> tuple[ImaginedEnv, list[StartState]]:
    """Imagined episodes from the starts of (up to ``count`` of) ``episodes`` to their end, rewarded as for estimates.

    ``limits``: control steps of each task's longest episode, by task. The seeds of these starts are numbers of the
    episodes among ``clips``.
    """
    recorded = RecordedStarts(clips, episodes, tasks=tuple(limits))
    starts = recorded.starts(count)
    whole = replace(config.imagined_env, branch_steps=None, max_error=None, strict=False)
    whole = replace(whole, num_envs=min(len(starts), whole.num_envs))
    return make_imagined_env(replace(config, imagined_env=whole), fitted, recorded, limits=limits), starts


def _success(policy: Policy, env: VectorEnv, starts: Sequence[StartState], *, seed: int) -> Bool[Tensor, " starts"]:
    actor = PolicyActor(policy, env.spec.num_envs, make_generator(policy.device, seed), stochastic=False)
    return run_episodes(on_device(env, policy.device), actor, starts).success.cpu()
