"""The fake arm's physics and trajectory controller. Needs no ROS."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from sims.tabletop.kinematics import Panda
from sims.tabletop.layout import ARM, BLOCK_QPOS, DRAWER_QPOS, FINGERS, PEG_QPOS, Layout, sample_layout
from sims.tabletop.scene import BLOCKS, LAG_S, MOCAP, build_mjcf
from sims.tabletop.tasks import TASKS, SceneState, check_task

JOINT_HZ = 500
JOINTS = (*(f"joint{i}" for i in range(1, 8)), "finger")


@lru_cache(maxsize=1)
def episode_layout(task: str, seed: int) -> Layout:
    """The suite's layout of an episode, with its default settings."""
    return sample_layout(task, seed, split="train", appearance=1.0)


class Trajectory:
    """Cubic Hermite splines through timed points; holds the last one at rest. Times [s] of any monotonic clock."""

    def __init__(self, start: NDArray[np.float64], speed: NDArray[np.float64], now_s: float) -> None:
        self.times = np.array([now_s])
        self.positions, self.speeds = start[None], speed[None]

    def follow(
        self, times: Sequence[float], positions: NDArray[np.float64], speeds: NDArray[np.float64], now_s: float
    ) -> None:
        """Replace the trajectory: from its present point through these. ``times`` [s] after ``now_s``; [T, 8] each."""
        position, speed = self.sample(now_s)
        self.positions = np.concatenate([position[None], positions])
        self.speeds = np.concatenate([speed[None], speeds])
        self.times = np.concatenate([[now_s], now_s + np.asarray(times)])

    def sample(self, now_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Position and speed of every joint at ``now_s``."""
        k = int(np.searchsorted(self.times, now_s, side="right")) - 1
        if k < 0 or k >= len(self.times) - 1:
            return self.positions[-1], np.zeros_like(self.speeds[-1])
        h = self.times[k + 1] - self.times[k]
        s = (now_s - self.times[k]) / h
        p, q, v, w = self.positions[k], self.positions[k + 1], self.speeds[k] * h, self.speeds[k + 1] * h
        position = p + s * (v + s * (3 * (q - p) - 2 * v - w + s * (2 * (p - q) + v + w)))
        speed = (v + s * (2 * (3 * (q - p) - 2 * v - w) + s * 3 * (2 * (p - q) + v + w))) / h
        return position, speed


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
        data = self._data
        mujoco.mj_resetData(self._model, data)
        data.qpos[:] = layout.qpos
        data.mocap_pos[: len(MOCAP)] = layout.fixtures
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
        """(success, failure) at these ``qpos``: the task is done, or something else is done instead."""
        qpos = torch.from_numpy(positions)[None]
        position, rotation, _ = self._panda.forward(qpos[:, ARM])
        single = qpos.float()
        scene = SceneState(
            end_effector=position.float(),
            rotation=rotation.float(),
            fingers=single[:, FINGERS],
            blocks=single[:, BLOCK_QPOS].view(-1, 3, 7),
            peg=single[:, PEG_QPOS],
            drawers=single[:, DRAWER_QPOS],
            fixtures=torch.from_numpy(self.layout.fixtures)[None].float(),
        )
        candidate = torch.tensor([self.layout.candidate])
        success, ended = check_task(TASKS[self.layout.task.name], scene, candidate)
        return bool(success), bool(ended & ~success)
