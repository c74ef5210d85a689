"""DPPO's and ReinFlow's agents, run as they are from a checkout, at the size of a ``Work``.

Settings come from the checkout's own file for hopper. What differs from a run of theirs: no pretrained weights, no
logging to a server, no GPU; and Gymnasium's Hopper-v5 instead of D4RL's (mujoco-py), in their own wrappers and their
own AsyncVectorEnv. Needs gym 0.26, hydra-core, einops, wandb, imageio, matplotlib, psutil and tqdm.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from benchmarks.peers.pace import Pace
from benchmarks.peers.work import Work

STATES, ACTIONS = 11, 3


def enter(checkout: Path) -> Path:
    """Makes the checkout's packages importable; a folder for what its agent writes."""
    sys.path.insert(0, str(checkout))
    folder = Path(tempfile.mkdtemp())
    for name in ("DPPO_LOG_DIR", "DPPO_DATA_DIR", "DPPO_WANDB_ENTITY", "REINFLOW_LOG_DIR", "REINFLOW_DATA_DIR"):
        os.environ[name] = str(folder)
    os.environ["REINFLOW_WANDB_ENTITY"] = "none"
    return folder


def settings(path: Path, folder: Path, work: Work) -> Any:
    """The configuration at ``path`` with the sizes of ``work``."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("eval", eval, replace=True)
    OmegaConf.register_new_resolver("now", lambda _: "now", replace=True)
    config = OmegaConf.load(path)
    bounds = {"obs": np.full(STATES, 5.0), "action": np.ones(ACTIONS)}
    ends: dict[str, Any] = {
        f"{name}_{end}": sign * value for name, value in bounds.items() for end, sign in (("min", -1), ("max", 1))
    }
    np.savez(folder / "normalization.npz", **ends)
    OmegaConf.update(config, "base_policy_path", None)
    chosen: dict[str, Any] = {
        "device": "cpu", "wandb": None, "logdir": str(folder),
        "normalization_path": str(folder / "normalization.npz"), "env.n_envs": work.num_envs,
        "env.max_episode_steps": work.max_steps, "train.n_steps": work.decisions, "train.update_epochs": work.epochs,
        "train.logprob_batch_size": work.num_envs * max(1, 10_000 // work.num_envs),
        "train.val_freq": 1_000_000, "train.n_train_itr": 1_000, "denoising_steps": work.denoising_steps,
        "ft_denoising_steps": work.trained_steps, "horizon_steps": work.horizon, "act_steps": work.horizon,
    }  # fmt: skip
    for name, value in chosen.items():
        OmegaConf.update(config, name, value)
    return config


def with_envs(module: Any, work: Work) -> None:
    """The agent of ``module`` makes Gymnasium's environments, where it would make D4RL's."""

    def make(*_: Any, num_envs: int, wrappers: Any, **__: Any) -> Any:
        from env.gym_utils.async_vector_env import AsyncVectorEnv
        from env.gym_utils.wrapper import wrapper_dict

        def make_one() -> Any:
            env: Any = _old_interface(work.env_id)
            for name, given in wrappers.items():
                env = wrapper_dict[name](env, **given)
            return env

        return AsyncVectorEnv([make_one] * num_envs)

    module.make_async = make


def paced(agent: Any, pace: Pace, work: Work) -> None:
    """Tells ``pace`` where iterations begin and rollouts end; the first iteration is the agent's own evaluation."""
    train, step = agent.model.train, agent.venv.step
    taken = 0

    def began(mode: bool = True) -> Any:
        if mode:
            nonlocal taken
            taken = 0
            pace.begin()
        return train(mode)

    def stepped(action: Any) -> Any:
        nonlocal taken
        found = step(action)
        taken += 1
        if taken == work.decisions:
            pace.rolled_out()
        return found

    agent.model.train, agent.venv.step = began, stepped
    agent.save_model = lambda *_: None  # ours saves nothing within an iteration either
    pace.count(agent.actor_optimizer)


def _old_interface(env_id: str) -> Any:
    """A Gymnasium environment with ``gym`` 0.22's interface, which has no time limit of its own."""
    import gym

    made: Any = gymnasium.make(env_id, max_episode_steps=-1)

    class Old(gym.Env):
        metadata: dict[str, Any] = {}  # noqa: RUF012
        observation_space = gym.spaces.Box(-np.inf, np.inf, (STATES,), np.float64)
        action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)

        def reset(self, **_: Any) -> np.ndarray:
            found: np.ndarray = made.reset()[0]
            return found

        def step(self, action: np.ndarray) -> Any:
            observation, reward, terminated, _, info = made.step(np.clip(action, -1.0, 1.0))
            return observation, reward, terminated, info

    return Old()


def instantiated(config: Any) -> Any:
    """The agent that ``config`` names, made by the checkout's own hydra target."""
    import importlib

    module, _, name = config._target_.rpartition(".")
    cls: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return cls(config)
