"""Isaac Lab 2 and 3: its registered tasks, all environments in one scene on a GPU, in the trainer's interpreter."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sims.adapters.finished_envs import FinishedEnvs
from sims.adapters.isaaclab_app import is_version_3, launch, start_app
from sims.errors import UserError
from sims.numbers.ranges import Names, PositiveFloat, PositiveInt
from sims.subproc.single_env import Reward, instruction_from, reward_fingerprint, seed32
from sims.vector_env import CannotCapture, EnvSpec, Observation, StartState, Step, encode_instructions


@dataclass(frozen=True, kw_only=True)
class IsaacLabConfig:
    """``task``: a registered id, as Isaac Lab 2.x or 3.x spells it. ``cameras``: names of sensors of the scene.

    ``state``: observation groups, or terms of a group as group.term, in order. ``success``: the termination term that
    means success, or "terminated" where every termination does. ``action_scale`` multiplies actions in [-1, 1].
    ``reward`` "shaped": the task's own. ``reset_each_env``: reset environments one by one, so that a start depends on
    its seed alone; otherwise one call resets all of them and a start depends on which others are reset with it.
    """

    name: Literal["isaaclab"] = "isaaclab"
    task: str = "Isaac-Stack-Cube-Franka-IK-Rel-Visuomotor-v0"
    cameras: Names = ("table_cam", "wrist_cam")
    state: Names = ("policy.eef_pos", "policy.eef_quat", "policy.gripper_pos")
    success: str = "success"
    reward: Reward = "sparse"
    instruction: str | None = None
    action_scale: PositiveFloat = 1.0
    reset_each_env: bool = True
    device: str = "cuda:0"
    num_envs: PositiveInt = 64


def instruction_of(task: str) -> str:
    return instruction_from(re.sub(r"^Isaac(Contrib)?-", "", task))


class IsaacLabEnv:
    """Isaac Lab resets a finished environment inside ``step``; its last observation is taken just before that."""

    def __init__(self, config: IsaacLabConfig) -> None:
        self.config = config
        version_3 = is_version_3()
        self._env = _make(config, version_3=version_3)
        self._index_dtype = torch.int32 if version_3 else torch.int64  # of environments, as its own step passes them
        device = torch.device(self._env.device)
        self._in_step = False
        # Which environments the present step has reset, and all observations before that.
        self._before_reset: tuple[Tensor, Observation] | None = None
        self._reset_idx = self._env._reset_idx
        self._env._reset_idx = self._observe_then_reset
        instruction = config.instruction or instruction_of(config.task)
        self._instruction = encode_instructions([instruction]).to(device)
        self._obs, _ = self._env.reset()
        state, images = self._state(), self._images()
        self._finished = FinishedEnvs(config.num_envs, max_steps=int(self._env.max_episode_length), device=device)
        self.spec = EnvSpec(
            name=f"isaaclab/{config.task}",
            num_envs=config.num_envs,
            action_dim=int(self._env.action_manager.total_action_dim)
            if hasattr(self._env, "action_manager")
            else int(self._env.single_action_space.shape[-1]),
            state_dim=state.shape[1],
            cameras=config.cameras,
            image_size=(images.shape[2], images.shape[3]),
            control_hz=1.0 / float(self._env.step_dt),
            max_steps=int(self._env.max_episode_length),
            tasks=(instruction,),
            device=device,
            fingerprint={
                "isaaclab": _version("isaaclab"),
                "isaacsim": _version("isaacsim"),
                "quaternions": "xyzw" if version_3 else "wxyz",  # Isaac Lab 3.0's migration guide
                **reward_fingerprint(config),
            },
            can_capture=False,
        )

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        env_ids = self.spec.ids(env_ids)
        if any(state.snapshot is not None for state in start):
            raise CannotCapture(_NO_CAPTURE)
        groups = [[env_id] for env_id in env_ids] if self.config.reset_each_env else [env_ids]
        for group, state in zip(groups, start, strict=False):
            self._env.seed(seed32(state.seed) % 2**31)
            self._reset_idx(self._ids(group))
        self._env.scene.write_data_to_sim()
        self._env.sim.forward()
        if self.config.cameras:
            self._env.sim.render()
        self._obs = self._compute()
        self._finished.begin(self._ids(env_ids))

    def step(self, action: Tensor) -> Step:
        self._in_step, self._before_reset = True, None
        scaled = action.to(self.spec.device).clamp(-1.0, 1.0) * self.config.action_scale
        self._obs, reward, terminated, truncated, _ = self._env.step(scaled)
        self._in_step = False
        return self._finished.record(
            reward=reward if self.config.reward == "shaped" else None,
            terminated=terminated.bool(),
            truncated=truncated.bool(),
            success=self._success(terminated.bool()),
            last=self._successors(),
        )

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        obs = self._finished.observation(self._present())
        return obs if env_ids is None else obs[list(env_ids)]

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        raise CannotCapture(_NO_CAPTURE)

    def close(self) -> None:
        self._env.close()

    # -- internals ---------------------------------------------------------------------------------------------------

    def _observe_then_reset(self, env_ids: Any) -> Any:
        if self._in_step:
            kept, self._obs = self._obs, self._compute()
            resetting = torch.zeros(self.config.num_envs, dtype=torch.bool, device=self._env.device)
            resetting[env_ids] = True
            self._before_reset = resetting, self._present().map(torch.clone)
            self._obs = kept
        return self._reset_idx(env_ids)

    def _successors(self) -> Observation | None:
        """Of all environments after this step, if it has reset any."""
        if self._before_reset is None:
            return None
        reset, before = self._before_reset
        return before.where(reset, self._present())

    def _compute(self) -> Mapping[str, Any]:
        """The present observations: of the observation manager, or of a direct environment's method."""
        if hasattr(self._env, "observation_manager"):
            return self._env.observation_manager.compute()
        return self._env._get_observations()

    def _present(self) -> Observation:
        state = self._state()
        return Observation(images=self._images(), state=state, instruction=self._instruction.expand(len(state), -1))

    def _state(self) -> Tensor:
        return torch.cat([_numbers(self._obs, key) for key in self.config.state], -1)

    def _images(self) -> Tensor:
        """uint8 [N, cameras, height, width, 3]."""
        sensors = self._env.scene.sensors
        missing = [name for name in self.config.cameras if name not in sensors]
        if missing:
            raise UserError(f"sim.cameras: {self.config.task} has no {missing[0]!r}; it has {sorted(sensors)}")
        if not self.config.cameras:
            return torch.zeros(self.config.num_envs, 0, 0, 0, 3, dtype=torch.uint8, device=self._env.device)
        return torch.stack([torch_of(sensors[name].data.output["rgb"])[..., :3] for name in self.config.cameras], 1)

    def _success(self, terminated: Tensor) -> Tensor:
        if self.config.success == "terminated":
            return terminated
        manager = getattr(self._env, "termination_manager", None)
        known = list(manager.active_terms) if manager is not None else []
        if manager is None or self.config.success not in known:
            raise UserError(
                f"sim.success: {self.config.task} has no termination term {self.config.success!r}, but {known}. "
                "Name one of these, or 'terminated' where every termination is a success."
            )
        return manager.get_term(self.config.success).bool()

    def _ids(self, env_ids: Sequence[int]) -> Tensor:
        return torch.tensor(env_ids, dtype=self._index_dtype, device=self._env.device)


_NO_CAPTURE = (
    "Isaac Lab's GPU physics does not return to a state exactly, so its episodes start from a task and a seed only. "
    "Groups of episodes (GRPO) work: they share a seed."
)


def _numbers(obs: Mapping[str, Any], key: str) -> Tensor:
    found: Any = obs
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            named = (
                sorted(found) if isinstance(found, Mapping) else "no terms: the group is concatenated, name it alone"
            )
            raise UserError(f"sim.state: Isaac Lab's observations have no {key!r}; at {part!r} there are {named}")
        found = found[part]
    return found.reshape(len(found), -1).float()


def _make(config: IsaacLabConfig, *, version_3: bool) -> Any:
    cameras = bool(config.cameras)
    if not version_3:
        start_app(device=config.device, cameras=cameras)
    import gymnasium
    import isaaclab_tasks  # noqa: F401
    from isaaclab_tasks.utils import parse_env_cfg

    name = registered_name(config.task, gymnasium.registry)
    cfg = parse_env_cfg(name, device=config.device, num_envs=config.num_envs)
    if version_3:
        launch(cfg, device=config.device, cameras=cameras)
    return gymnasium.make(name, cfg=cfg).unwrapped


def registered_name(task: str, known: Iterable[str]) -> str:
    """The id of ``task`` in this version: 3.x drops the ``-v0`` of most, and ``Isaac-`` is ``IsaacContrib-`` for some.

    Raises UserError if there is none.
    """
    stem = task.removeprefix("IsaacContrib-").removeprefix("Isaac-").removesuffix("-v0")
    ids = set(known)
    for name in (task, *(f"{first}-{stem}{last}" for first in ("Isaac", "IsaacContrib") for last in ("", "-v0"))):
        if name in ids:
            return name
    near = sorted(name for name in ids if name.startswith("Isaac"))
    raise UserError(f"sim.task: Isaac Lab has no {task!r}; it has {near}")


def torch_of(array: Any) -> Tensor:
    """A tensor, or the tensor of a ProxyArray, which 3.x has for the outputs of sensors."""
    return array if isinstance(array, Tensor) else array.torch


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
