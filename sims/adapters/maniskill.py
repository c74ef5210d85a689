"""ManiSkill 3: every task that it registers, one environment per worker process (PhysX on the CPU).

With ``backend`` physx_cuda, sims/adapters/maniskill_gpu.py runs all environments in one scene on a GPU instead.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sims.errors import UserError, refused_by
from sims.experts.grasping import grasp_and_carry
from sims.experts.pushing import push_to
from sims.numbers.ranges import ImageSize, Names, PositiveInt
from sims.subproc.single_env import Reward, SingleSpec, StepResult, instruction_from, seed32, to_box
from sims.subproc.worker_config import WorkerPoolConfig

INSTRUCTIONS = {
    "PickCube-v1": "pick up the red cube and bring it to the goal",
    "PushCube-v1": "push the cube to the target",
    "PullCube-v1": "pull the cube to the target",
    "StackCube-v1": "stack the red cube on the green cube",
    "PegInsertionSide-v1": "insert the peg into the hole from the side",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "LiftPegUpright-v1": "lift the peg upright",
    "PushT-v1": "push the T onto its outline",
    "PokeCube-v1": "poke the cube with the peg",
}

ACTION_M = 0.1  # end-effector motion of a full action of pd_ee_delta_pose, meters


@dataclass(frozen=True, kw_only=True)
class ManiSkillConfig(WorkerPoolConfig):
    """``robot``: a registered one instead of the task's own, as panda_wristcam, which has a ``hand_camera``.
    ``state``: "given" is the state that ManiSkill returns with images, "full" adds the poses of objects.

    ``reward`` "shaped": ManiSkill's normalized dense reward.
    ``backend``: physx_cpu runs one process per environment, physx_cuda all environments on one GPU. ``reconfigure``:
    build a new scene at every reset, for tasks that then choose their objects (physx_cpu). ``reset_each_env``
    (physx_cuda): reset environments one by one, so that a start depends on its seed and the objects of its environment
    alone; otherwise one call resets all of them and a start depends on which others are reset with it. ``max_steps``:
    by default the task's own. ``latency``: with physx_cpu alone.
    """

    name: Literal["maniskill"] = "maniskill"
    task: str = "PickCube-v1"
    robot: str | None = None
    control_mode: str = "pd_ee_delta_pose"
    cameras: Names = ("base_camera",)
    image_size: ImageSize = (128, 128)
    state: Literal["given", "full"] = "given"
    reward: Reward = "sparse"
    backend: Literal["physx_cpu", "physx_cuda"] = "physx_cpu"
    reconfigure: bool = False
    reset_each_env: bool = True
    instruction: str | None = None
    max_steps: PositiveInt | None = None

    def __post_init__(self) -> None:
        for name, given in (("latency", self.latency.most > 0), ("reconfigure", self.reconfigure)):
            if given and self.backend == "physx_cuda":
                raise ValueError(f"{name} works with backend physx_cpu alone, got backend physx_cuda; leave it out")


class ManiSkill:
    """A ManiSkill environment with a batch of one."""

    def __init__(self, config: ManiSkillConfig) -> None:
        self.config = config
        self._env = make_env(config, num_envs=1)
        self._low, self._high = action_bounds(self._env)
        self.reset(task=0, seed=0)
        self.spec = single_spec(config, self._env, self._observation)

    @staticmethod
    def preload(config: ManiSkillConfig) -> None:
        _registered()

    def reset(self, *, task: int, seed: int) -> None:
        options = {"reconfigure": True} if self.config.reconfigure else {}
        self._observation, _ = self._env.reset(seed=seed32(seed) % 2**31, options=options)

    def step(self, action: np.ndarray) -> StepResult:
        scaled = to_box(action, self._low, self._high)
        self._observation, reward, terminated, _, info = self._env.step(scaled.astype(np.float32))
        return StepResult(
            reward=float(reward) if self.config.reward == "shaped" else None,
            terminated=bool(terminated),
            success=bool(info.get("success", False)),
        )

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        state[:] = flat_state(self._observation)[0].numpy()
        if self.config.cameras:
            images[:] = render(self._env, self.config.cameras)[0].numpy()

    @property
    def demonstrates(self) -> bool:
        config = self.config
        return config.task in EXPERTS and config.control_mode == "pd_ee_delta_pose" and config.robot in EXPERT_ROBOTS

    def demonstrate(self) -> np.ndarray:
        """An action of pd_ee_delta_pose, [7]."""
        move, close = EXPERTS[self.config.task](self._env)
        return np.concatenate([np.clip(move / ACTION_M, -1.0, 1.0), np.zeros(3), [-1.0 if close else 1.0]])

    def close(self) -> None:
        self._env.close()


def _pick_cube(env: Any) -> tuple[np.ndarray, bool]:
    end_effector, cube, goal = _positions(env.agent.tcp, env.cube, env.goal_site)
    holding = bool(env.agent.is_grasping(env.cube))
    return grasp_and_carry(end_effector=end_effector, target=cube, goal=goal, holding=holding)


def _push_cube(env: Any) -> tuple[np.ndarray, bool]:
    end_effector, cube, goal = _positions(env.agent.tcp, env.obj, env.goal_region)
    return push_to(end_effector=end_effector, target=cube, goal=goal), True


def _positions(*things: Any) -> list[np.ndarray]:
    return [thing.pose.p[0].cpu().numpy() for thing in things]


EXPERTS: Mapping[str, Callable[[Any], tuple[np.ndarray, bool]]] = {"PickCube-v1": _pick_cube, "PushCube-v1": _push_cube}


EXPERT_ROBOTS = (None, "panda", "panda_wristcam")  # others open their grippers where these close


def _registered() -> Any:
    """ManiSkill's tasks."""
    try:
        import mani_skill.envs  # noqa: F401
        from mani_skill.utils.registration import REGISTERED_ENVS
    except ModuleNotFoundError as error:
        raise UserError("ManiSkill is not installed. Run: vla-rl sims install maniskill") from error
    return REGISTERED_ENVS


def make_env(config: ManiSkillConfig, *, num_envs: int) -> Any:
    """ManiSkill's own environment without its time limit, whose ``step`` does not render."""
    registered = _registered()
    import gymnasium

    if config.task not in registered:
        raise UserError(f"sim.task: ManiSkill has no {config.task!r}; it has {sorted(registered)}")
    height, width = config.image_size
    robot = _robot(config)
    on_cpu = config.backend == "physx_cpu" and not config.workers.devices
    with refused_by("ManiSkill", task=config.task, robot=config.robot, control_mode=config.control_mode):
        env: Any = gymnasium.make(
            config.task,
            num_envs=num_envs,
            obs_mode="rgb" if config.state == "given" else "rgb+state",
            reward_mode="normalized_dense" if config.reward == "shaped" else "sparse",
            control_mode=config.control_mode,
            sim_backend=config.backend,
            render_backend="sapien_cpu" if on_cpu else "sapien_cuda",
            sensor_configs={"width": width, "height": height},
            **robot,
        ).unwrapped
    # ``get_obs`` in ``step`` returns the state only; images are rendered in ``render``.
    env._get_obs_with_sensor_data = lambda info, **_: env._get_obs_state_dict(info)
    missing = [name for name in config.cameras if name not in env.scene.sensors and env.scene.sensors]
    if missing:
        raise UserError(f"sim.cameras: {config.task} has no {missing[0]!r}; it has {sorted(env.scene.sensors)}")
    return env


def episode_seeds(num_envs: int, env_ids: Sequence[int], seeds: Sequence[int]) -> list[int]:
    """For ``reset`` of ``env_ids``: the seed of every environment's generator.

    From fewer seeds than environments ManiSkill derives those of all but the first environment. The others have the
    first seed, because the first environment's also seeds torch, from which most tasks draw.
    """
    of_each = dict(zip(env_ids, seeds, strict=True))
    return [of_each.get(env_id, seeds[0]) for env_id in range(num_envs)]


def _robot(config: ManiSkillConfig) -> dict[str, Any]:
    if config.robot is None:
        return {}
    from mani_skill.agents.registration import REGISTERED_AGENTS

    if config.robot not in REGISTERED_AGENTS:
        raise UserError(f"sim.robot: ManiSkill has no {config.robot!r}; it has {sorted(REGISTERED_AGENTS)}")
    return {"robot_uids": config.robot}


def action_bounds(env: Any) -> tuple[np.ndarray, np.ndarray]:
    space = env.single_action_space
    return space.low.astype(np.float64), space.high.astype(np.float64)


def single_spec(config: ManiSkillConfig, env: Any, observation: Any) -> SingleSpec:
    limit = config.max_steps or _registered()[config.task].max_episode_steps
    if not limit:
        raise UserError(f"{config.task} registers no time limit; set sim.max_steps.")
    return SingleSpec(
        name=f"maniskill/{config.task}",
        action_dim=len(env.single_action_space.low),
        state_dim=flat_state(observation).shape[1],
        cameras=config.cameras,
        image_size=config.image_size,
        control_hz=float(env.control_freq),
        max_steps=int(limit),
        tasks=(config.instruction or INSTRUCTIONS.get(config.task, instruction_from(config.task)),),
        fingerprint={name: importlib.metadata.version(name) for name in ("mani_skill", "sapien")},
    )


def flat_state(observation: Any) -> Any:
    """All values of the observation, float32 [N, S], in the order of its keys."""
    import torch

    def leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for item in value.values() for leaf in leaves(item)]
        return [value.reshape(len(value), -1).float()]

    return torch.cat(leaves(observation), -1)


def render(env: Any, cameras: tuple[str, ...]) -> Any:
    """uint8 [N, cameras, height, width, 3], as ManiSkill's own observations show them (goal markers hidden)."""
    import torch

    sensors = env._get_obs_sensor_data()
    return torch.stack([sensors[camera]["rgb"] for camera in cameras], 1)
