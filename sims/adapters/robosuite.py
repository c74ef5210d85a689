"""robosuite 1.5: its tasks, robots and controllers."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sims.errors import UserError, refused_by
from sims.experts.door import open_door
from sims.experts.grasping import grasp_and_carry
from sims.experts.osc_pose import action
from sims.mujoco.cameras import VISUAL_GROUPS, MujocoCameras
from sims.mujoco.config import MujocoConfig
from sims.mujoco.randomization import RandomizedModel
from sims.mujoco.stepping import check_stable, physics_steps
from sims.numbers.ranges import ImageSize, Names, PositiveFloat, PositiveInt
from sims.subproc.single_env import Reward, SingleSpec, StepResult, instruction_from, seed32, to_box
from sims.subproc.worker_config import WorkerPoolConfig

INSTRUCTIONS = {
    "Lift": "lift the red cube",
    "Stack": "stack the red cube on the green cube",
    "NutAssemblySquare": "put the square nut on the square peg",
    "NutAssemblyRound": "put the round nut on the round peg",
    "PickPlaceCan": "put the can into its bin",
    "Door": "open the door",
    "Wipe": "wipe the table",
    "ToolHang": "hang the tool on the frame",
    "TwoArmLift": "lift the pot with both arms",
    "TwoArmHandover": "hand the hammer from one arm to the other",
}
LIFT = np.array([0.0, 0.0, 0.05])
PROPRIOCEPTION = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")


@dataclass(frozen=True, kw_only=True)
class RobosuiteConfig(MujocoConfig, WorkerPoolConfig):
    """``robots``: one name per arm. ``controller``: a composite controller of robosuite, e.g. BASIC or IK_POSE's file.

    ``state``: observables, in order. ``reward`` "shaped": robosuite's shaped reward.
    ``reload``: build a new model at every reset, with new sizes and textures where the task draws them; takes seconds.
    ``fast_rendering``: without shadows, reflections and multisampling.
    """

    name: Literal["robosuite"] = "robosuite"
    task: str = "Lift"
    robots: tuple[str, ...] = ("Panda",)
    controller: str = "BASIC"
    cameras: Names = ("agentview", "robot0_eye_in_hand")
    image_size: ImageSize = (128, 128)
    state: Names = PROPRIOCEPTION
    instruction: str | None = None
    reward: Reward = "sparse"
    reload: bool = False
    control_hz: PositiveFloat = 20.0
    max_steps: PositiveInt = 200

    def __post_init__(self) -> None:
        if not self.robots:
            raise ValueError("robots must name one robot per arm, got none")


class Robosuite:
    """Placements, sensors and robots share one random generator, which every reset seeds."""

    def __init__(self, config: RobosuiteConfig) -> None:
        self.config = config
        self._env = _make(config)
        physics_steps(config.control_hz, self._env.model_timestep, setting="sim.control_hz")  # it takes whole ones
        self._cameras: MujocoCameras | None = None
        self._randomized: RandomizedModel | None = None
        self._rendered_model: Any = None  # the model of ``_cameras``
        self.reset(task=0, seed=0)
        self.spec = SingleSpec(
            name=f"robosuite/{config.task}",
            action_dim=int(self._env.action_dim),
            state_dim=len(self._state()),
            cameras=config.cameras,
            image_size=config.image_size,
            control_hz=config.control_hz,
            max_steps=config.max_steps,
            tasks=(config.instruction or INSTRUCTIONS.get(config.task, instruction_from(config.task)),),
            fingerprint={name: importlib.metadata.version(name) for name in ("robosuite", "mujoco")},
        )
        self._low, self._high = self._env.action_spec
        # Compiles robosuite's functions, which takes half a minute the first time.
        self.step(np.zeros(self.spec.action_dim, dtype=np.float32))

    @staticmethod
    def preload(config: RobosuiteConfig) -> Robosuite:
        return Robosuite(config)  # renders only in ``observe``

    def reset(self, *, task: int, seed: int) -> None:
        self._env.rng.bit_generator.state = np.random.default_rng(seed32(seed)).bit_generator.state
        np.random.seed(seed32(seed))
        self._randomize(seed)  # before: the reset computes where cameras are, and controllers read the masses
        self._observation = self._env.reset()
        if self.config.reload:  # the model is another one now
            self._randomize(seed)
            self._env.sim.forward()

    def _randomize(self, seed: int) -> None:
        if self.config.randomization.is_none:
            return
        model = self._env.sim.model._model
        if self._randomized is None or self._randomized.model is not model:
            self._randomized = RandomizedModel(model, self.config.randomization)
        self._randomized.draw(seed)

    def step(self, action: np.ndarray) -> StepResult:
        scaled = to_box(action, self._low, self._high)
        self._observation, reward, _, _ = self._env.step(scaled)
        check_stable(self._env.sim.data._data)
        return StepResult(
            reward=float(reward) if self.config.reward == "shaped" else None,
            success=bool(self._env._check_success()),
        )

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        state[:] = self._state()
        if self.config.cameras:
            self._current_cameras().render(self._env.sim.data._data, images)

    @property
    def demonstrates(self) -> bool:
        config = self.config
        if config.controller != "BASIC" or len(config.robots) != 1 or self.spec.action_dim != 7:
            return False
        return config.task == "Lift" or (config.task == "Door" and config.robots == ("Panda",))

    def demonstrate(self) -> np.ndarray:
        """An action of the BASIC controller (OSC pose and gripper), [7]."""
        env = self._env
        if self.config.task == "Door":
            return open_door(env)
        cube = np.array(env.sim.data.body_xpos[env.cube_body_id])
        holding = env._check_grasp(gripper=env.robots[0].gripper, object_geoms=env.cube)
        move, close = grasp_and_carry(
            end_effector=self._observation["robot0_eef_pos"], target=cube, goal=cube + LIFT, holding=holding
        )
        return action(move, np.zeros(3), close=close)

    def close(self) -> None:
        self._env.close()

    def _state(self) -> np.ndarray:
        unknown = [key for key in self.config.state if key not in self._observation]
        if unknown:
            raise UserError(
                f"sim.state: robosuite has no observable {unknown[0]!r} here, but {list(self._observation)}"
            )
        return np.concatenate([np.atleast_1d(self._observation[key]) for key in self.config.state]).astype(np.float32)

    def _current_cameras(self) -> MujocoCameras:
        model = self._env.sim.model._model
        if self._cameras is None or self._rendered_model is not model:
            if self._cameras is not None:
                self._cameras.close()
            self._cameras = MujocoCameras(model, self.config.cameras, self.config, groups=VISUAL_GROUPS)
            self._rendered_model = model
        return self._cameras


def _make(config: RobosuiteConfig) -> Any:
    try:
        import robosuite
        from robosuite.controllers import load_composite_controller_config
    except ModuleNotFoundError as error:
        raise UserError("robosuite is not installed. Run: vla-rl sims install robosuite") from error
    if config.task not in robosuite.ALL_ENVIRONMENTS:
        raise UserError(f"sim.task: robosuite has no {config.task!r}; it has {sorted(robosuite.ALL_ENVIRONMENTS)}")
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    with refused_by("robosuite", task=config.task, robots=config.robots, controller=config.controller):
        return robosuite.make(
            config.task,
            robots=list(config.robots),
            controller_configs=load_composite_controller_config(controller=config.controller, robot=config.robots[0]),
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            reward_shaping=config.reward == "shaped",
            hard_reset=config.reload,
            control_freq=config.control_hz,
            ignore_done=True,
            seed=0,
        )
