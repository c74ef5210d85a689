"""Configuration class to constructor, for every simulator beside the built-in one; and a first step in each."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sims.gymnasium import Gymnasium, GymnasiumConfig
from sims.install import interpreter
from sims.isaaclab import IsaacLabConfig, IsaacLabEnv
from sims.libero import Libero, LiberoConfig
from sims.maniskill import ManiSkill, ManiSkillConfig
from sims.maniskill_gpu import ManiSkillGPU
from sims.metaworld import Metaworld, MetaworldConfig
from sims.process_pool import ProcessPool
from sims.robosuite import Robosuite, RobosuiteConfig
from sims.vector_env import StartState, VectorEnv
from sims.worker_process import WorkerConfig

SimulatorConfig = RobosuiteConfig | MetaworldConfig | ManiSkillConfig | LiberoConfig | GymnasiumConfig | IsaacLabConfig


def _maniskill(config: ManiSkillConfig) -> VectorEnv:
    return ManiSkillGPU(config) if config.backend == "physx_cuda" else ProcessPool(config, ManiSkill)


CONSTRUCTORS: Mapping[type[Any], Callable[[Any], VectorEnv]] = {
    RobosuiteConfig: lambda config: ProcessPool(config, Robosuite),
    MetaworldConfig: lambda config: ProcessPool(config, Metaworld),
    ManiSkillConfig: _maniskill,
    LiberoConfig: lambda config: ProcessPool(config, Libero),
    GymnasiumConfig: lambda config: ProcessPool(config, Gymnasium),
    IsaacLabConfig: IsaacLabEnv,
}

SMALLEST: Mapping[str, tuple[str, SimulatorConfig]] = {  # name -> the module it needs, and its smallest world
    "robosuite": ("robosuite", RobosuiteConfig(num_envs=1, image_size=(64, 64))),
    "metaworld": ("metaworld", MetaworldConfig(num_envs=1, image_size=(64, 64))),
    "maniskill": ("mani_skill", ManiSkillConfig(num_envs=1, image_size=(64, 64))),
    "libero": ("libero", LiberoConfig(num_envs=1, image_size=(64, 64), tasks=(0,))),
    "pusht": (
        "gym_pusht",
        GymnasiumConfig(
            id="gym_pusht:gym_pusht/PushT-v0", num_envs=1, workers=WorkerConfig(environment="pusht"),
            arguments={"render_mode": "rgb_array", "visualization_width": 96, "visualization_height": 96},
            images={"top": "render"},
        ),
    ),
    "aloha": (
        "gym_aloha",
        GymnasiumConfig(
            id="gym_aloha:gym_aloha/AlohaTransferCube-v0", num_envs=1, workers=WorkerConfig(environment="aloha"),
            arguments={"obs_type": "pixels_agent_pos"}, state=("agent_pos",), images={"top": "pixels.top"},
        ),
    ),
    "isaaclab": ("isaaclab", IsaacLabConfig(num_envs=2)),
}  # fmt: skip


def is_installed(name: str) -> bool:
    """In an interpreter of its own, or in this one."""
    return interpreter(name) is not None or importlib.util.find_spec(SMALLEST[name][0]) is not None


def first_steps(name: str) -> str:
    """Start the smallest world of a simulator, step it, look at it, and say how that went.

    Raises UserError when it does not start, RuntimeError when a step fails or a picture is blank.
    """
    _, config = SMALLEST[name]
    env = CONSTRUCTORS[type(config)](config)
    try:
        spec = env.spec
        env.reset(start=[StartState(task=0, seed=row) for row in range(spec.num_envs)])
        started = time.perf_counter()
        for _ in range(5):
            step = env.step(torch.zeros(spec.num_envs, spec.action_dim, device=spec.device))
            if not bool(step.valid.all()):
                failures = env.failures if isinstance(env, ProcessPool) else ()
                raise RuntimeError(failures[-1].stderr if failures else "a step failed")
        stepped = time.perf_counter()
        pictures = env.observe().images
        looked = time.perf_counter()
        if pictures.numel() and float(pictures.float().std()) < 1.0:
            raise RuntimeError(f"the pictures of {spec.cameras} are blank")
        return (
            f"{spec.name}: a step in {(stepped - started) / 5 * 1000:.0f} ms, "
            f"{len(spec.cameras)} cameras in {(looked - stepped) * 1000:.0f} ms"
        )
    finally:
        env.close()
