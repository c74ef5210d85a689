"""Isaac Lab 2 and 3: its registered tasks, all environments in one scene on a GPU, in the trainer's interpreter."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sims.adapters.finished_envs import FinishedEnvs
from sims.errors import UserError
from sims.subproc.single_env import instruction_from, seed32
from sims.vector_env import CannotCapture, EnvSpec, Observation, StartState, Step, encode_instructions

_app: Any = None  # Isaac Sim must be started once per process, before any of its modules is imported


@dataclass(frozen=True, kw_only=True)
class IsaacLabConfig:
    """``task``: a registered id, with or without ``-v0``. ``cameras``: names of sensors of the scene.

    ``state``: observation groups, or terms of a group as group.term, in order. ``success``: the termination term that
    means success, or "terminated" where every termination does. ``action_scale`` multiplies actions in [-1, 1].
    ``reset_each_env``: reset environments one by one, so that a start depends on its seed alone; otherwise one call
    resets all of them and a start depends on which others are reset with it.
    """

    name: Literal["isaaclab"] = "isaaclab"
    task: str = "Isaac-Stack-Cube-Franka-IK-Rel-Visuomotor-v0"
    cameras: tuple[str, ...] = ("table_cam", "wrist_cam")
    state: tuple[str, ...] = ("policy.eef_pos", "policy.eef_quat", "policy.gripper_pos")
    success: str = "success"
    instruction: str | None = None
    action_scale: float = 1.0
    reset_each_env: bool = True
    device: str = "cuda:0"
    num_envs: int = 64


class IsaacLabEnv:
    """Isaac Lab resets a finished environment inside ``step``; its last observation is taken just before that."""

    def __init__(self, config: IsaacLabConfig) -> None:
        self.config = config
        self._env = _make(config)
        device = torch.device(self._env.device)
        self._in_step = False
        # Which environments the present step has reset, and all observations before that.
        self._before_reset: tuple[Tensor, Observation] | None = None
        self._reset_idx = self._env._reset_idx
        self._env._reset_idx = self._observe_then_reset
        self._instruction = encode_instructions(
            [config.instruction or instruction_from(config.task.removeprefix("Isaac-"))]
        ).to(device)
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
            tasks=(config.instruction or instruction_from(config.task.removeprefix("Isaac-")),),
            device=device,
            fingerprint={"isaaclab": _version("isaaclab"), "isaacsim": _version("isaacsim")},
            can_capture=False,
        )

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        env_ids = list(range(self.spec.num_envs)) if env_ids is None else list(env_ids)
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
            reward=reward,
            terminated=terminated.bool(),
            truncated=truncated.bool(),
            success=self._success(terminated.bool()),
            observe=self._successors,
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

    def _successors(self) -> Observation:
        if self._before_reset is None:
            return self._present()
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
        return torch.stack([sensors[name].data.output["rgb"][..., :3] for name in self.config.cameras], 1)

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
        return torch.tensor(env_ids, dtype=torch.int64, device=self._env.device)


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


def _make(config: IsaacLabConfig) -> Any:
    global _app
    try:
        from isaaclab.app import AppLauncher
    except ModuleNotFoundError as error:
        raise UserError(
            "Isaac Lab is not installed here. It brings its own interpreter: install vla-rl into that one, "
            "see docs/simulators/isaaclab.md."
        ) from error
    if _app is None:
        _app = AppLauncher(headless=True, enable_cameras=bool(config.cameras), device=config.device).app
    import gymnasium
    import isaaclab_tasks  # noqa: F401
    from isaaclab_tasks.utils import parse_env_cfg

    names = [config.task, config.task.removesuffix("-v0"), f"{config.task}-v0"]  # Isaac Lab 3 drops the version
    known = [name for name in names if name in gymnasium.registry]
    if not known:
        near = sorted(name for name in gymnasium.registry if name.startswith("Isaac-"))
        raise UserError(f"sim.task: Isaac Lab has no {config.task!r}; it has {near}")
    cfg = parse_env_cfg(known[0], device=config.device, num_envs=config.num_envs)
    return gymnasium.make(known[0], cfg=cfg).unwrapped


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
