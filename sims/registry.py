"""Every simulator: configuration class to constructor, its splits, and a first step in each."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from sims.adapters.gymnasium import Gymnasium, GymnasiumConfig
from sims.adapters.isaaclab import IsaacLabConfig, IsaacLabEnv
from sims.adapters.libero import Libero, LiberoConfig, fixed_starts
from sims.adapters.maniskill import ManiSkill, ManiSkillConfig
from sims.adapters.maniskill_gpu import ManiSkillGPU
from sims.adapters.metaworld import Metaworld, MetaworldConfig
from sims.adapters.robosuite import Robosuite, RobosuiteConfig
from sims.errors import UserError
from sims.install import interpreter
from sims.starts import StartSequence
from sims.subproc.single_env import SingleEnv
from sims.subproc.vector_env import SubprocVectorEnv
from sims.subproc.worker_config import WorkerConfig
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import StartState, VectorEnv

SimulatorConfig = (
    TabletopConfig
    | RobosuiteConfig
    | MetaworldConfig
    | ManiSkillConfig
    | LiberoConfig
    | GymnasiumConfig
    | IsaacLabConfig
)
C = TypeVar("C", bound=SimulatorConfig)


POOLED: Mapping[type[Any], type[SingleEnv]] = {  # what runs in worker processes
    RobosuiteConfig: Robosuite,
    MetaworldConfig: Metaworld,
    ManiSkillConfig: ManiSkill,
    LiberoConfig: Libero,
    GymnasiumConfig: Gymnasium,
}


def _pool(config: Any) -> VectorEnv:
    if isinstance(config, ManiSkillConfig) and config.backend == "physx_cuda":
        return ManiSkillGPU(config)
    return SubprocVectorEnv(config, POOLED[type(config)])


CONSTRUCTORS: Mapping[type[Any], Callable[[Any], VectorEnv]] = {
    TabletopConfig: TabletopEnv,
    IsaacLabConfig: IsaacLabEnv,
    **dict.fromkeys(POOLED, _pool),
}

SMALLEST: Mapping[str, tuple[str, SimulatorConfig]] = {  # name -> the module it needs, and its smallest world
    "tabletop": ("mujoco", TabletopConfig(num_envs=1)),
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


def pooled(name: str, *, num_envs: int, image_size: int) -> tuple[Any, type[SingleEnv]]:
    """The smallest configuration of a simulator that runs in workers, with this many rows, and its class.

    ``image_size`` 0: without cameras. Raises UserError if there is none of that name or it is not installed.
    """
    known = [name for name, (_, config) in SMALLEST.items() if type(config) in POOLED]
    if name not in known:
        raise UserError(f"no simulator {name!r} that runs in workers; there are {', '.join(known)}")
    if not is_installed(name):
        raise UserError(f"{name} is not installed. Run: vla-rl sims install {name}")
    config: Any = dataclasses.replace(SMALLEST[name][1], num_envs=num_envs)
    if isinstance(config, GymnasiumConfig):
        if not image_size:
            return dataclasses.replace(config, images={}), Gymnasium
        size = {key: image_size for key in config.arguments if key.startswith("visualization_")}
        return dataclasses.replace(config, arguments={**config.arguments, **size}), Gymnasium
    seen = {"image_size": (image_size, image_size)} if image_size else {"cameras": ()}
    return dataclasses.replace(config, **seen), POOLED[type(config)]


def is_installed(name: str) -> bool:
    """In an interpreter of its own, or in this one."""
    return interpreter(name) is not None or importlib.util.find_spec(SMALLEST[name][0]) is not None


def make_env(config: SimulatorConfig) -> VectorEnv:
    """Raises UserError where the simulator is not installed or its settings are wrong."""
    return CONSTRUCTORS[type(config)](config)


def splits(config: SimulatorConfig) -> tuple[str, ...]:
    """What ``sim.split`` may be; simulators without that setting have one split, "train"."""
    hints = get_type_hints(type(config))
    return get_args(hints["split"]) if "split" in hints else ("train",)


def split_of(config: SimulatorConfig) -> str:
    return str(getattr(config, "split", "train"))


def with_split(config: C, split: str) -> C:
    """UserError where the simulator has no such split."""
    if split not in splits(config):
        raise UserError(f"{config.name} has no split {split!r}; it has {', '.join(splits(config))}")
    changed: Any = config
    return dataclasses.replace(changed, split=split) if split != split_of(config) else config


def evaluation_starts(config: SimulatorConfig, *, num_tasks: int, seed: int, episodes: int) -> list[StartState]:
    """Held-out starts, tasks in turns: the simulator's published ones where ``split`` asks for them."""
    if isinstance(config, LiberoConfig) and config.split == "benchmark":
        fixed = sorted(fixed_starts(num_tasks), key=lambda start: start[1])
        if episodes > len(fixed):
            raise UserError(f"the benchmark has {len(fixed)} starts of these tasks; {episodes} were asked for")
        return [StartState(task=task, seed=number) for task, number in fixed[:episodes]]
    return StartSequence("evaluation", seed=seed, num_tasks=num_tasks).take(episodes)


def larger(config: SimulatorConfig, size: int, *, num_envs: int) -> SimulatorConfig | None:
    """A second world of the same kind, to film in; None where that is more than a few megabytes of this process."""
    if isinstance(config, TabletopConfig):
        return dataclasses.replace(config, num_envs=num_envs, image_size=(size, size))
    return None


def first_steps(name: str) -> str:
    """Start the smallest world of a simulator, step it, look at it, and say how that went.

    Raises UserError when it does not start, RuntimeError when a step fails or a picture is blank.
    """
    _, config = SMALLEST[name]
    env = make_env(config)
    try:
        spec = env.spec
        env.reset(start=[StartState(task=0, seed=row) for row in range(spec.num_envs)])
        started = time.perf_counter()
        for _ in range(5):
            step = env.step(torch.zeros(spec.num_envs, spec.action_dim, device=spec.device))
            if not bool(step.valid.all()):
                failures = env.failures if isinstance(env, SubprocVectorEnv) else ()
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
