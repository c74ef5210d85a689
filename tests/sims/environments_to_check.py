"""A small configuration of every environment that this machine can run, for the conformance tests."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sims.adapters.gymnasium import Gymnasium, GymnasiumConfig
from sims.adapters.isaaclab import IsaacLabConfig, IsaacLabEnv
from sims.adapters.libero import Libero, LiberoConfig
from sims.adapters.maniskill import ManiSkill, ManiSkillConfig
from sims.adapters.metaworld import Metaworld, MetaworldConfig
from sims.adapters.mujoco_scene import MujocoScene, MujocoSceneConfig
from sims.adapters.robosuite import Robosuite, RobosuiteConfig
from sims.install import interpreter
from sims.mujoco.randomization import MujocoRandomization
from sims.subproc.vector_env import SubprocVectorEnv
from sims.subproc.worker_config import WorkerConfig
from sims.vector_env import VectorEnv
from sims.verification.conformance import NUM_ENVS
from tests import dot_episodes
from tests.sims import isaaclab_double
from tests.sims.counting import Counting, CountingConfig
from tests.worlds import ChainEnv

SMALL = (32, 48)
RANDOMIZED = MujocoRandomization(light=0.2, color=0.2, camera_m=0.05, friction=0.1, mass=0.1)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """``make`` takes the time limit. ``needs``: an installed simulator. ``solved_within``: steps of its expert."""

    make: Callable[[int], VectorEnv]
    needs: str | None = None
    solved_within: int | None = None

    @property
    def available(self) -> bool:
        return (
            self.needs is None
            or interpreter(self.needs) is not None
            or importlib.util.find_spec(self.needs) is not None
        )


def _pusht(max_steps: int) -> VectorEnv:
    config = GymnasiumConfig(
        id="gym_pusht:gym_pusht/PushT-v0",
        arguments={"render_mode": "rgb_array", "visualization_width": 96, "visualization_height": 96},
        images={"top": "render"}, num_envs=NUM_ENVS, max_steps=max_steps, workers=WorkerConfig(environment="pusht"),
    )  # fmt: skip
    return SubprocVectorEnv(config, Gymnasium)


def _own_scene(max_steps: int) -> VectorEnv:
    scene = Path(__file__).parents[2] / "configs" / "scenes" / "gantry.yaml"
    config = MujocoSceneConfig(
        scene=scene, expert="sims.experts.gantry:act", image_size=SMALL, num_envs=NUM_ENVS, max_steps=max_steps
    )
    return SubprocVectorEnv(config, MujocoScene)


def _maze(max_steps: int) -> VectorEnv:
    config = GymnasiumConfig(
        id="tests.sims.point_maze:PointMaze-v0", state=("robot.position", "goal"), images={"top": "camera"},
        num_envs=NUM_ENVS, max_steps=max_steps,
    )  # fmt: skip
    return SubprocVectorEnv(config, Gymnasium)


def _metaworld(max_steps: int) -> VectorEnv:
    config = MetaworldConfig(tasks=("reach", "drawer-open"), image_size=SMALL, num_envs=NUM_ENVS, max_steps=max_steps)
    return SubprocVectorEnv(config, Metaworld)


def _robosuite(task: str) -> Callable[[int], VectorEnv]:
    def make(max_steps: int) -> VectorEnv:
        config = RobosuiteConfig(
            task=task, image_size=SMALL, num_envs=NUM_ENVS, max_steps=max_steps, randomization=RANDOMIZED
        )
        return SubprocVectorEnv(config, Robosuite)

    return make


def _maniskill(task: str) -> Callable[[int], VectorEnv]:
    def make(max_steps: int) -> VectorEnv:
        config = ManiSkillConfig(task=task, image_size=SMALL, num_envs=NUM_ENVS, max_steps=max_steps)
        return SubprocVectorEnv(config, ManiSkill)

    return make


def _libero(max_steps: int) -> VectorEnv:
    config = LiberoConfig(
        suite="libero_object", tasks=(0, 2), image_size=SMALL, fast_rendering=True, num_envs=NUM_ENVS,
        max_steps=max_steps,
    )  # fmt: skip
    return SubprocVectorEnv(config, Libero)


def _imagined(max_steps: int) -> VectorEnv:
    return dot_episodes.imagined_env(Path(tempfile.mkdtemp()) / "episodes", max_steps=max_steps)


def _isaaclab(max_steps: int) -> VectorEnv:
    isaaclab_double.install()
    config = IsaacLabConfig(
        task=isaaclab_double.TASK, cameras=("table_cam",), state=("policy.eef_pos",), device="cpu", num_envs=NUM_ENVS
    )
    env = IsaacLabEnv(config)
    assert env.spec.max_steps == max_steps
    return env


ENVIRONMENTS = {
    "chain": Environment(make=lambda steps: ChainEnv(num_envs=NUM_ENVS, length=60, max_steps=steps)),
    "chain without capture": Environment(
        make=lambda steps: ChainEnv(num_envs=NUM_ENVS, length=60, max_steps=steps, can_capture=False)
    ),
    "counting": Environment(
        make=lambda steps: SubprocVectorEnv(
            CountingConfig(num_envs=NUM_ENVS, max_steps=steps, goal=20.0, reward="sparse"), Counting
        ),
        solved_within=25,
    ),
    "gymnasium": Environment(make=_maze),
    "mujoco_scene": Environment(make=_own_scene, solved_within=400),
    "pusht": Environment(make=_pusht, needs="pusht", solved_within=299),
    "metaworld": Environment(make=_metaworld, needs="metaworld", solved_within=150),
    "imagined": Environment(make=_imagined),
    "isaaclab double": Environment(make=_isaaclab),
    "libero": Environment(make=_libero, needs="libero", solved_within=200),
    "maniskill": Environment(make=_maniskill("PickCube-v1"), needs="maniskill", solved_within=40),
    "maniskill pushing": Environment(make=_maniskill("PushCube-v1"), needs="maniskill", solved_within=40),
    "robosuite": Environment(make=_robosuite("Lift"), needs="robosuite", solved_within=100),
    "robosuite door": Environment(make=_robosuite("Door"), needs="robosuite", solved_within=100),
}
