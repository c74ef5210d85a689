"""The fake arm's physics. Needs no ROS."""

from __future__ import annotations

from functools import lru_cache

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from sims.tabletop.kinematics import Panda
from sims.tabletop.layout import ARM, FINGERS, Layout, fixture_quaternions, sample_layout, scene_state
from sims.tabletop.scene import BLOCKS, LAG_S, build_mjcf
from sims.tabletop.task import HOLD_STEPS, check_task
from sims.tabletop.tasks.registry import TASKS

JOINT_HZ = 500
JOINTS = (*(f"joint{i}" for i in range(1, 8)), "finger")


@lru_cache(maxsize=1)
def episode_layout(task: str, seed: int) -> Layout:
    """The suite's layout of an episode, with its default settings."""
    return sample_layout(task, seed, split="train", appearance=1.0)


class TabletopArm:
    """One environment of the tabletop suite in steps of 2 ms, driven by joint positions."""

    def __init__(self) -> None:
        self._model = mujoco.MjModel.from_xml_string(build_mjcf())
        self._model.opt.timestep = 1.0 / JOINT_HZ
        self._data = mujoco.MjData(self._model)
        self._panda = Panda()
        self.begin("pick", 0)

    def begin(self, task: str, seed: int) -> None:
        """Start the episode of (task, seed), as in the suite."""
        self.task, self.seed = task, seed
        self.layout = layout = episode_layout(task, seed)
        self._held = [0, 0]  # calls of ``outcome`` for which success and failure have lasted
        data = self._data
        mujoco.mj_resetData(self._model, data)
        data.qpos[:] = layout.qpos
        data.mocap_pos[:], data.mocap_quat[:] = layout.fixtures[:, :3], fixture_quaternions(layout.fixtures)
        for parked, name in zip(layout.parked, (*BLOCKS, "peg"), strict=True):
            body = self._model.body(name)
            data.xfrc_applied[body.id, 2] = parked * body.mass[0] * -self._model.opt.gravity[2]
        self.drive(self.joints, np.zeros(8))

    @property
    def joints(self) -> NDArray[np.float64]:
        """Seven arm joints [rad] and one finger [m]."""
        return np.append(self._data.qpos[ARM], abs(self._data.qpos[FINGERS]).mean())

    @property
    def speeds(self) -> NDArray[np.float64]:
        return self._data.qvel[:8].copy()

    @property
    def qpos(self) -> NDArray[np.float64]:
        return self._data.qpos.copy()

    def drive(self, positions: NDArray[np.float64], speeds: NDArray[np.float64]) -> None:
        """Servo set points; the speed term compensates the servos' lag."""
        arm = positions[:7] + LAG_S * speeds[:7]
        self._data.ctrl[:] = [*arm, positions[7], positions[7]]

    def step(self) -> None:
        mujoco.mj_step(self._model, self._data)

    def outcome(self, positions: NDArray[np.float64]) -> tuple[bool, bool]:
        """(success, failure): the task is done, or something else is done instead, and has been for HOLD_STEPS calls.

        To be called at these ``qpos`` once every control step of the suite.
        """
        qpos = torch.from_numpy(positions)[None]
        position, rotation, _ = self._panda.forward(qpos[:, ARM])
        scene = scene_state(qpos, torch.from_numpy(self.layout.fixtures)[None], position, rotation)
        candidate = torch.tensor([self.layout.candidate])
        now = check_task(TASKS[self.layout.task.name], scene, candidate)
        self._held = [(held + 1) * int(achieved) for held, achieved in zip(self._held, now, strict=True)]
        return self._held[0] >= HOLD_STEPS, self._held[1] >= HOLD_STEPS
