"""A small configuration of every simulator, for the health check (``vla-rl doctor``) and the benchmarks."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sims.adapters.gymnasium import Gymnasium, GymnasiumConfig
from sims.adapters.isaaclab import IsaacLabConfig
from sims.adapters.libero import Libero, LiberoConfig
from sims.adapters.maniskill import ManiSkill, ManiSkillConfig
from sims.adapters.metaworld import Metaworld, MetaworldConfig
from sims.adapters.mujoco_scene import MujocoScene, MujocoSceneConfig
from sims.adapters.robosuite import Robosuite, RobosuiteConfig
from sims.errors import UserError
from sims.install import interpreter
from sims.plugins import config_name
from sims.registry import CONSTRUCTORS, SimulatorConfig, make_env
from sims.subproc.single_env import SimulatorClass
from sims.subproc.vector_env import SubprocVectorEnv
from sims.subproc.worker_config import WorkerConfig
from sims.tabletop import TabletopConfig
from sims.vector_env import StartState, VectorEnv


@dataclass(frozen=True, kw_only=True)
class Example:
    """``module`` must be importable for it. ``make`` takes num_envs and the side of the images, 0 for no cameras.

    ``simulator``: the class that runs in worker processes, None where the simulator runs in the trainer.
    """

    module: str
    make: Callable[[int, int], SimulatorConfig]
    simulator: SimulatorClass | None = None
    num_envs: int = 1
    image_size: int = 64

    @property
    def smallest(self) -> SimulatorConfig:
        return self.make(self.num_envs, self.image_size)


def _pusht(num_envs: int, image_size: int) -> GymnasiumConfig:
    arguments = {
        "render_mode": "rgb_array",
        "visualization_width": image_size or 96,
        "visualization_height": image_size or 96,
    }
    return GymnasiumConfig(
        id="gym_pusht:gym_pusht/PushT-v0",
        num_envs=num_envs,
        workers=WorkerConfig(environment="pusht"),
        arguments=arguments,
        images={"top": "render"} if image_size else {},
    )


def _aloha(num_envs: int, image_size: int) -> GymnasiumConfig:
    """Its images have one size, whatever ``image_size``."""
    return GymnasiumConfig(
        id="gym_aloha:gym_aloha/AlohaTransferCube-v0",
        num_envs=num_envs,
        workers=WorkerConfig(environment="aloha"),
        arguments={"obs_type": "pixels_agent_pos"},
        state=("agent_pos",),
        images={"top": "pixels.top"} if image_size else {},
    )


def _own_scene(num_envs: int, image_size: int) -> MujocoSceneConfig:
    """Its scene file names the cameras; nothing is rendered outside ``observe``."""
    scene = Path(__file__).parents[1] / "configs" / "scenes" / "two_arms.yaml"
    side = image_size or 64
    return MujocoSceneConfig(scene=scene, num_envs=num_envs, image_size=(side, side))


def _with_cameras(config_class: type[Any], **settings: Any) -> Callable[[int, int], Any]:
    """Of its settings ``image_size`` and ``cameras``, those that it has. UserError where others have no default."""

    def make(num_envs: int, image_size: int) -> Any:
        cameras: dict[str, Any] = {"image_size": (image_size, image_size)} if image_size else {"cameras": ()}
        fields = {field.name: field for field in dataclasses.fields(config_class)}
        given = {"num_envs": num_envs, **settings} | {name: cameras[name] for name in cameras if name in fields}
        missing = dataclasses.MISSING
        needed = [
            name
            for name, field in fields.items()
            if field.init and field.default is missing and field.default_factory is missing and name not in given
        ]
        if needed:
            raise UserError(
                f"{config_name(config_class)}: {config_class.__qualname__}.{needed[0]} has no default; give it one, "
                "with which the simulator is verified and measured"
            )
        return config_class(**given)

    return make


def _of_registry() -> dict[str, Example]:
    """Of every registered simulator that runs in worker processes, plugins included."""
    return {
        config_name(config_class): Example(
            module="numpy", make=_with_cameras(config_class), simulator=constructor.keywords["simulator"]
        )
        for config_class, constructor in CONSTRUCTORS.items()
        if isinstance(constructor, partial)
        and constructor.func is SubprocVectorEnv
        and config_class is not GymnasiumConfig
    }


# With an entry of its own: what needs another package than numpy, or special settings.
EXAMPLES: Mapping[str, Example] = _of_registry() | {
    "tabletop": Example(module="mujoco", make=_with_cameras(TabletopConfig)),
    "robosuite": Example(module="robosuite", make=_with_cameras(RobosuiteConfig), simulator=Robosuite),
    "metaworld": Example(module="metaworld", make=_with_cameras(MetaworldConfig), simulator=Metaworld),
    "maniskill": Example(module="mani_skill", make=_with_cameras(ManiSkillConfig), simulator=ManiSkill),
    "libero": Example(module="libero", make=_with_cameras(LiberoConfig, tasks=(0,)), simulator=Libero),
    "mujoco_scene": Example(module="mujoco", make=_own_scene, simulator=MujocoScene),
    "pusht": Example(module="gym_pusht", make=_pusht, simulator=Gymnasium, image_size=96),
    "aloha": Example(module="gym_aloha", make=_aloha, simulator=Gymnasium),
    "isaaclab": Example(module="isaaclab", make=lambda num_envs, _: IsaacLabConfig(num_envs=num_envs), num_envs=2),
}


def worker_example(name: str, *, num_envs: int, image_size: int) -> tuple[Any, SimulatorClass]:
    """A configuration of a simulator that runs in worker processes, and its class; ``image_size`` 0: no cameras.

    Raises UserError if there is none of that name or it is not installed.
    """
    known = [name for name, example in EXAMPLES.items() if example.simulator is not None]
    simulator = EXAMPLES[name].simulator if name in EXAMPLES else None
    if simulator is None:
        raise UserError(f"no simulator {name!r} that runs in worker processes; there are {', '.join(known)}")
    if not is_installed(name):
        raise UserError(f"{name} is not installed. Run: vla-rl sims install {name}")
    return EXAMPLES[name].make(num_envs, image_size), simulator


def is_installed(name: str) -> bool:
    """Whether it is installed in an interpreter of its own, or in this one."""
    return interpreter(name) is not None or importlib.util.find_spec(EXAMPLES[name].module) is not None


def check_simulator(name: str) -> str:
    """Start the example of a simulator, step it, observe, and say how long that took.

    Raises UserError when it does not start, RuntimeError when a step fails or an image is blank.
    """
    env = make_env(EXAMPLES[name].smallest)
    try:
        spec = env.spec
        env.reset(start=[StartState(task=0, seed=seed) for seed in range(spec.num_envs)])
        step_s = _time_steps(env, 5)
        started = time.perf_counter()
        images = env.observe().images
        observe_s = time.perf_counter() - started
        if images.numel() and float(images.float().std()) < 1.0:
            raise RuntimeError(f"the images of {spec.cameras} are blank")
        return (
            f"{spec.name}: a step in {step_s * 1000:.0f} ms, {len(spec.cameras)} cameras in {observe_s * 1000:.0f} ms"
        )
    finally:
        env.close()


def _time_steps(env: VectorEnv, count: int) -> float:
    """Seconds of one step with zero actions. Raises RuntimeError with the worker's error where one fails."""
    started = time.perf_counter()
    for _ in range(count):
        step = env.step(torch.zeros(env.spec.num_envs, env.spec.action_dim, device=env.spec.device))
        if not bool(step.valid.all()):
            failures = env.failures if isinstance(env, SubprocVectorEnv) else ()
            raise RuntimeError(failures[-1].stderr if failures else "a step failed")
    return (time.perf_counter() - started) / count
