"""A substitute for Isaac Lab: its modules, ids and the order of events in ``step``, with a point mass as physics.

Follows the public source of ManagerBasedRLEnv (2.x): step counts the episode, computes terminations and rewards, resets
finished environments inside ``step`` and only then computes the observations it returns; all random numbers come from
torch's global generator, which ``seed`` sets.
"""

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar

import gymnasium
import torch

TASK = "Isaac-Lift-Cube-Franka-IK-Rel-v0"
GOAL = 1.0


class Scene:
    def __init__(self, env: DoubleEnv) -> None:
        self.sensors = {"table_cam": types.SimpleNamespace(data=types.SimpleNamespace(output=Images(env)))}
        self.written = 0

    def write_data_to_sim(self) -> None:
        self.written += 1


class Images:
    """A camera's output as RGBA, like Isaac's tiled cameras; brightness is the environment's elapsed steps."""

    def __init__(self, env: DoubleEnv) -> None:
        self.env = env

    def __getitem__(self, name: str) -> torch.Tensor:
        assert name == "rgb"
        return self.env.episode_length_buf.to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 4, 6, 4).clone()


class Observations:
    def __init__(self, env: DoubleEnv) -> None:
        self.env = env

    def compute(self, update_history: bool = False) -> dict[str, Any]:
        env = self.env
        return {
            "policy": {"eef_pos": env.position.clone(), "elapsed": env.episode_length_buf.unsqueeze(-1).clone()},
            "critic": torch.cat([env.position, env.position], -1),
        }


class Terminations:
    active_terms: ClassVar[list[str]] = ["time_out", "success", "dropped"]

    def __init__(self, env: DoubleEnv) -> None:
        self.env = env

    def compute(self) -> torch.Tensor:
        env = self.env
        self.time_outs = env.episode_length_buf >= env.max_episode_length
        self._terms = {
            "time_out": self.time_outs,
            "success": env.position[:, 0] > GOAL,
            "dropped": env.position[:, 1] < -GOAL,
        }
        self.terminated = self._terms["success"] | self._terms["dropped"]
        return self.time_outs | self.terminated

    def get_term(self, name: str) -> torch.Tensor:
        return self._terms[name]


class DoubleEnv(gymnasium.Env):
    step_dt = 0.05
    max_episode_length = 12
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, cfg: Any) -> None:
        self.num_envs, self.device = cfg.num_envs, cfg.device
        self.position = torch.zeros(self.num_envs, 3)
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.scene = Scene(self)
        self.sim = types.SimpleNamespace(forward=lambda: None, render=lambda: None)
        self.action_manager = types.SimpleNamespace(total_action_dim=3)
        self.observation_manager, self.termination_manager = Observations(self), Terminations(self)
        self.observation_space = gymnasium.spaces.Dict({})
        self.action_space = gymnasium.spaces.Box(-float("inf"), float("inf"), (self.num_envs, 3))

    def seed(self, seed: int = -1) -> int:
        torch.manual_seed(seed)
        return seed

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self._reset_idx(torch.arange(self.num_envs))
        return self.observation_manager.compute(), {}

    def _reset_idx(self, env_ids: torch.Tensor) -> None:
        self.position[env_ids] = torch.rand(len(env_ids), 3) * 0.1
        self.episode_length_buf[env_ids] = 0

    def step(self, action: torch.Tensor) -> tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        self.position = self.position + 0.1 * action
        self.episode_length_buf += 1
        ended = self.termination_manager.compute()
        terminated, time_outs = self.termination_manager.terminated, self.termination_manager.time_outs
        reward = self.position[:, 0].clone()
        ids = ended.nonzero().squeeze(-1)
        if len(ids) > 0:
            self._reset_idx(ids)
            self.scene.write_data_to_sim()
        return self.observation_manager.compute(update_history=True), reward, terminated, time_outs, {}

    def close(self) -> None: ...


def install() -> None:
    """Make ``import isaaclab`` and ``import isaaclab_tasks`` import the substitute."""
    if "isaaclab" in sys.modules:
        return
    modules = {name: types.ModuleType(name) for name in ("isaaclab", "isaaclab.app", "isaaclab_tasks")}
    modules["isaaclab_tasks.utils"] = types.ModuleType("isaaclab_tasks.utils")
    modules["isaaclab.app"].AppLauncher = AppLauncher  # type: ignore[attr-defined]
    modules["isaaclab_tasks.utils"].parse_env_cfg = parse_env_cfg  # type: ignore[attr-defined]
    sys.modules.update(modules)
    gymnasium.register(id=TASK, entry_point=DoubleEnv, disable_env_checker=True, order_enforce=False)


class AppLauncher:
    launched: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **settings: Any) -> None:
        AppLauncher.launched.append(settings)
        self.app = object()


def parse_env_cfg(task: str, *, device: str, num_envs: int) -> Any:
    assert AppLauncher.launched, "Isaac Sim has to be launched before anything of it is used"
    return types.SimpleNamespace(task=task, device=device, num_envs=num_envs)
