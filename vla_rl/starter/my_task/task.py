"""A task of your own: move the puck onto the target. Replace model, state, success and expert with yours.

Each environment is a worker process. It imports this module, which therefore imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sims.subproc.single_env import SingleSpec, StepResult
from sims.subproc.worker_config import WorkerPoolConfig

MODEL = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="top" pos="0 0 2.6"/>
    <geom type="plane" size="1 1 0.1" rgba="0.9 0.9 0.9 1"/>
    <body name="target" mocap="true">
      <geom type="cylinder" size="0.1 0.002" rgba="0.2 0.7 0.3 1" contype="0" conaffinity="0"/>
    </body>
    <body name="puck" pos="0 0 0.05">
      <joint name="x" type="slide" axis="1 0 0" range="-1 1" limited="true"/>
      <joint name="y" type="slide" axis="0 1 0" range="-1 1" limited="true"/>
      <geom type="cylinder" size="0.06 0.04" rgba="0.2 0.3 0.9 1" contype="0" conaffinity="0"/>
    </body>
  </worldbody>
  <actuator>
    <velocity joint="x" kv="20"/>
    <velocity joint="y" kv="20"/>
  </actuator>
</mujoco>
"""
STEPS = 10  # of physics in one control step: 10 Hz
SPEED = 1.0  # [m/s] for an action of 1
RADIUS = 0.1  # [m]


@dataclass(frozen=True, kw_only=True)
class MyTaskConfig(WorkerPoolConfig):
    """``cameras``: ("top",) to render images, () for the state alone."""

    name: Literal["my_task"] = "my_task"
    cameras: tuple[str, ...] = ()
    image_size: tuple[int, int] = (32, 32)
    max_steps: int = 40


class MyTask:
    """The action is the puck's velocity, the state its position and the target's distance along both axes [m]."""

    demonstrates = True

    def __init__(self, config: MyTaskConfig) -> None:
        import mujoco

        self.mujoco = mujoco
        self.model = mujoco.MjModel.from_xml_string(MODEL)
        self.data = mujoco.MjData(self.model)
        self.renderer = mujoco.Renderer(self.model, *config.image_size) if config.cameras else None
        self.spec = SingleSpec(
            name="my_task",
            action_dim=2,
            state_dim=4,
            cameras=config.cameras,
            image_size=config.image_size,
            control_hz=10.0,
            max_steps=config.max_steps,
            tasks=("move the puck onto the target",),
            fingerprint={"mujoco": mujoco.__version__},
        )

    @staticmethod
    def preload(config: MyTaskConfig) -> None:
        import mujoco  # noqa: F401

    def reset(self, *, task: int, seed: int) -> None:
        """Begin the episode that ``task`` and ``seed`` alone determine."""
        places = np.random.default_rng(seed).uniform(-0.8, 0.8, (2, 2))
        self.mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = places[0]
        self.data.mocap_pos[0, :2] = places[1]
        self.mujoco.mj_forward(self.model, self.data)

    def step(self, action: np.ndarray) -> StepResult:
        self.data.ctrl[:] = SPEED * action
        self.mujoco.mj_step(self.model, self.data, nstep=STEPS)
        return StepResult(success=bool(np.linalg.norm(self._offset()) < RADIUS))

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        state[:] = np.concatenate([self.data.qpos, self._offset()])
        for i, camera in enumerate(self.spec.cameras):
            assert self.renderer is not None
            self.renderer.update_scene(self.data, camera)
            images[i] = self.renderer.render()

    def demonstrate(self) -> np.ndarray:
        """The scripted expert: straight to the target."""
        return np.clip(self._offset() / 0.2, -1, 1)

    def close(self) -> None:
        if self.renderer is not None:
            self.renderer.close()

    def _offset(self) -> np.ndarray:
        return np.asarray(self.data.mocap_pos[0, :2] - self.data.qpos)
