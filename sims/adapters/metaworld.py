"""Meta-World 3: fifty tasks of a Sawyer arm, each with a scripted expert."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sims.errors import UserError
from sims.mujoco.cameras import MujocoCameras
from sims.mujoco.config import MujocoConfig
from sims.mujoco.randomization import RandomizedModel
from sims.mujoco.stepping import check_stable
from sims.numbers.ranges import ImageSize, Names, PositiveInt, SomeNames
from sims.subproc.single_env import Reward, SingleSpec, StepResult, instruction_from, seed32
from sims.subproc.worker_config import WorkerPoolConfig

FULL_STATE, ARM_STATE = 39, 4


@dataclass(frozen=True, kw_only=True)
class MetaworldConfig(MujocoConfig, WorkerPoolConfig):
    """``tasks``: names without their version, e.g. reach, drawer-open; a run alternates between them.

    ``state``: "arm" is the hand's position and the gripper's opening (the policy must see the rest in the images),
    "full" all 39 values of the benchmark, including the goal. ``reward`` "shaped": the benchmark's, up to 10
    a step. Success ends an episode.
    """

    name: Literal["metaworld"] = "metaworld"
    tasks: SomeNames = ("reach",)
    cameras: Names = ("corner2",)
    image_size: ImageSize = (128, 128)
    state: Literal["arm", "full"] = "arm"
    reward: Reward = "sparse"
    max_steps: PositiveInt = 500


class Metaworld:
    """The model of a task is loaded at its first reset and kept."""

    def __init__(self, config: MetaworldConfig) -> None:
        self.config = config
        self._classes, self._policies = _catalog(config)
        self._envs: dict[int, Any] = {}
        self._randomized: dict[int, RandomizedModel] = {}
        self._cameras: dict[int, MujocoCameras] = {}
        self.reset(task=0, seed=0)
        self.spec = SingleSpec(
            name="metaworld",
            action_dim=4,
            state_dim=ARM_STATE if config.state == "arm" else FULL_STATE,
            cameras=config.cameras,
            image_size=config.image_size,
            control_hz=float(self._env.metadata["render_fps"]),
            max_steps=config.max_steps,
            tasks=tuple(instruction_from(name) for name in config.tasks),
            fingerprint={name: importlib.metadata.version(name) for name in ("metaworld", "mujoco")},
        )

    @staticmethod
    def preload(config: MetaworldConfig) -> Metaworld:
        env = Metaworld(config)  # renders only in ``observe``
        for task in range(len(config.tasks)):
            env.reset(task=task, seed=0)  # loads the task's model
        return env

    def reset(self, *, task: int, seed: int) -> None:
        import mujoco

        if task not in self._envs:
            self._envs[task] = self._classes[task](seed=0)
            self._randomized[task] = RandomizedModel(self._envs[task].model, self.config.randomization)
        self._task, self._env = task, self._envs[task]
        if not self.config.randomization.is_none:
            self._randomized[task].draw(seed)
        self._env.seeded_rand_vec, self._env._freeze_rand_vec = True, False
        self._env.seed(seed32(seed))
        self._env.reset()  # draws two times, and what it computes and observes is of the first
        mujoco.mj_forward(self._env.model, self._env.data)
        for _ in range(2):  # an observation holds the one before it
            self._observation = self._env._get_obs()

    def step(self, action: np.ndarray) -> StepResult:
        self._env.curr_path_length = 0  # time is kept outside; here it would end in an exception
        self._observation, reward, _, _, info = self._env.step(np.clip(action, -1.0, 1.0))
        check_stable(self._env.data)
        return StepResult(
            reward=float(reward) if self.config.reward == "shaped" else None,
            success=bool(info["success"]),
        )

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        state[:] = self._observation[: len(state)]
        if not self.config.cameras:
            return
        if self._task not in self._cameras:
            self._cameras[self._task] = MujocoCameras(self._env.model, self.config.cameras, self.config)
        self._cameras[self._task].render(self._env.data, images)
        for camera, image in zip(self.config.cameras, images, strict=True):
            if self._env.data.camera(camera).xmat[7] < 0:  # its up axis points down: Meta-World hangs some this way
                image[:] = image[::-1, ::-1].copy()

    demonstrates = True  # for all fifty

    def demonstrate(self) -> np.ndarray:
        return np.clip(self._policies[self._task].get_action(self._observation), -1.0, 1.0)

    def close(self) -> None:
        for env in self._envs.values():
            env.close()


def _catalog(config: MetaworldConfig) -> tuple[list[Any], list[Any]]:
    """The environment class and the expert of every task."""
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE as environments
        from metaworld.policies import ENV_POLICY_MAP
    except ModuleNotFoundError as error:
        raise UserError("Meta-World is not installed. Run: vla-rl sims install metaworld") from error
    unknown = [name for name in config.tasks if f"{name}-v3" not in ENV_POLICY_MAP]
    if unknown:
        known = sorted(name.removesuffix("-v3") for name in ENV_POLICY_MAP)
        raise UserError(f"sim.tasks: Meta-World has no {unknown[0]!r}; it has {known}")
    return (
        [environments[f"{name}-v3-goal-observable"] for name in config.tasks],
        [ENV_POLICY_MAP[f"{name}-v3"]() for name in config.tasks],
    )
