"""The adapter with Isaac Lab 3's own classes, on a machine without Isaac Sim: run with .venv-isaaclab on PYTHONPATH.

Its package imports without Isaac Sim, and so do its step, its managers, its registry and its launcher. Only the scene
and physics of ``PointEnv`` are a substitute: a point that moves.
"""

from __future__ import annotations

import json
import types
import warnings
from typing import Any

import gymnasium
import torch
import warp as wp
from isaaclab.envs import ManagerBasedRLEnv, ManagerBasedRLEnvCfg
from isaaclab.managers import (
    ObservationGroupCfg,
    ObservationManager,
    ObservationTermCfg,
    RewardManager,
    RewardTermCfg,
    TerminationManager,
    TerminationTermCfg,
)
from isaaclab.scene import InteractiveSceneCfg
from isaaclab.utils import configclass
from isaaclab.utils.warp.proxy_array import ProxyArray
from isaaclab_newton.physics import NewtonCfg

from sims.adapters.isaaclab import IsaacLabConfig, IsaacLabEnv, registered_name
from sims.vector_env import StartState

TASK, NUM_ENVS, GOAL = "IsaacContrib-Move-Point", 3, 1.0


@configclass
class Policy(ObservationGroupCfg):
    eef_pos = ObservationTermCfg(func=lambda env: env.position.clone())
    elapsed = ObservationTermCfg(func=lambda env: env.episode_length_buf.unsqueeze(-1).float())

    def __post_init__(self) -> None:
        self.concatenate_terms = False


@configclass
class Observations:
    policy: Policy = Policy()


@configclass
class Terminations:
    time_out = TerminationTermCfg(func=lambda env: env.episode_length_buf >= env.max_episode_length, time_out=True)
    success = TerminationTermCfg(func=lambda env: env.position[:, 0] > GOAL)
    dropped = TerminationTermCfg(func=lambda env: env.position[:, 1] < -GOAL)


@configclass
class Rewards:
    progress = RewardTermCfg(func=lambda env: env.position[:, 0], weight=1.0)


@configclass
class PointCfg(ManagerBasedRLEnvCfg):
    scene: InteractiveSceneCfg = InteractiveSceneCfg(num_envs=NUM_ENVS, env_spacing=1.0)
    observations: Observations = Observations()
    actions: dict = {}  # noqa: RUF012  configclass copies it
    rewards: Rewards = Rewards()
    terminations: Terminations = Terminations()
    decimation: int = 1
    episode_length_s: float = 0.6

    def __post_init__(self) -> None:
        self.sim.dt = 0.05
        self.sim.physics = NewtonCfg()  # the launcher starts no Isaac Sim for it


class PointEnv(ManagerBasedRLEnv):
    """Isaac Lab's own ``step``, ``_reset_idx``, observation, reward and termination managers."""

    def __init__(self, cfg: PointCfg, **_: Any) -> None:
        self._is_closed, self.cfg = True, cfg
        n = cfg.scene.num_envs
        self.position = torch.zeros(n, 3)
        nothing = types.SimpleNamespace(
            compute=lambda *a, **k: None, reset=lambda ids: {}, active_terms=[], available_modes=[],
            record_pre_step=lambda: None, record_post_physics_decimation_step=lambda: None,
            record_pre_reset=lambda ids: None, record_post_reset=lambda ids: None,
        )  # fmt: skip
        self.command_manager = self.curriculum_manager = self.event_manager = self.recorder_manager = nothing
        self.sim = types.SimpleNamespace(
            is_rendering=False, device="cpu", cfg=cfg.sim, step=lambda render: None, render=lambda **_: None,
            forward=lambda: None, consume_reset_request=lambda: False, is_playing=lambda: True,
            get_physics_dt=lambda: cfg.sim.dt,
        )  # fmt: skip
        camera = types.SimpleNamespace(data=types.SimpleNamespace(output=self))
        self.scene = types.SimpleNamespace(
            num_envs=n, sensors={"table_cam": camera}, reset=self._reset_scene, write_data_to_sim=lambda: None,
            update=lambda dt: None,
        )  # fmt: skip
        self.action_manager = types.SimpleNamespace(
            process_action=self._move, apply_action=lambda: None, total_action_dim=3, reset=lambda ids: {}
        )
        self.extras, self.video_recorders = {}, []
        self.common_step_counter = self._sim_step_counter = 0
        self._physics_handles_decimation = self.render_enabled = False
        self.episode_length_buf = torch.zeros(n, dtype=torch.long)
        self.observation_manager = ObservationManager(cfg.observations, self)
        self.termination_manager = TerminationManager(cfg.terminations, self)
        self.reward_manager = RewardManager(cfg.rewards, self)

    def __getitem__(self, name: str) -> ProxyArray:
        """A sensor's output: brightness is the number of elapsed steps."""
        assert name == "rgb"
        images = self.episode_length_buf.to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 4, 6, 4).contiguous()
        return ProxyArray(wp.from_torch(images))

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self._reset_idx(torch.arange(len(self.position), dtype=torch.int32))
        return self.observation_manager.compute(), {}

    def close(self) -> None: ...

    def _move(self, action: torch.Tensor) -> None:
        self.position = self.position + 0.1 * action

    def _reset_scene(self, ids: torch.Tensor) -> None:
        assert ids.dtype == torch.int32  # as warp's kernels require
        self.position[ids] = torch.rand(len(ids), 3) * 0.1


def main() -> None:
    gymnasium.register(
        id=TASK,
        entry_point=PointEnv,  # type: ignore[arg-type]
        kwargs={"env_cfg_entry_point": PointCfg},
        disable_env_checker=True,
    )
    env = IsaacLabEnv(
        IsaacLabConfig(
            task="Isaac-Move-Point-v0",
            cameras=("table_cam",),
            state=("policy.eef_pos", "policy.elapsed"),
            device="cpu",
            num_envs=NUM_ENVS,
        )
    )
    env.reset(start=[StartState(task=0, seed=7)] * NUM_ENVS)
    warnings.simplefilter("error")  # a ProxyArray that is used as a tensor warns
    same_start = env.observe().state
    action = torch.tensor([[1.0, 0, 0], [0, -1.0, 0], [0, 0, 0]])
    steps = [env.step(action) for _ in range(12)]
    last, seen = steps[-1], env.observe()
    warnings.simplefilter("ignore")
    known = [name for name in gymnasium.registry if name.startswith("Isaac")]
    print(
        json.dumps(
            {
                "fingerprint": dict(env.spec.fingerprint),
                "max_steps": env.spec.max_steps,
                "start_spread": float((same_start - same_start[:1]).abs().max()),
                "terminated": last.terminated.tolist(),
                "truncated": last.truncated.tolist(),
                "success": last.success.tolist(),
                "paid": torch.stack([step.reward for step in steps]).sum(0).tolist(),
                "position_x_of_0": seen.state[0, 0].item(),
                "position_y_of_1": seen.state[1, 1].item(),
                "elapsed": seen.state[:, 3].tolist(),
                "brightness": seen.images[:, 0, 0, 0, 0].tolist(),
                "default_task": registered_name(IsaacLabConfig().task, known),
                "default_settings": default_settings(),
            }
        )
    )


def default_settings() -> dict[str, bool]:
    """Whether the adapter's default task has the cameras, terms and success term of its default settings."""
    from isaaclab_tasks.utils import parse_env_cfg

    config = IsaacLabConfig()
    cfg = parse_env_cfg(registered_name(config.task, gymnasium.registry), device="cpu", num_envs=1)
    group, terms = cfg.observations.policy, [key.partition(".")[2] for key in config.state]
    return {
        "cameras": all(hasattr(cfg.scene, camera) for camera in config.cameras),
        "state": all(hasattr(group, term) for term in terms),
        "success": hasattr(cfg.terminations, config.success),
    }


if __name__ == "__main__":
    main()
