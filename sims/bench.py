"""``vla-rl bench sim``: this project's worker processes beside other libraries' vectorisation, in one run.

Both sides run the same simulator with the same actions. The peers' interface observes at every step. Ours is measured
twice: the same way (step, then observe), and as a chunked policy uses it (a chunk of steps, one look).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sims.process_pool import ProcessPool
from sims.single_env import SingleEnv
from sims.vector_env import StartState
from sims.worker_group import PoolConfig


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Control steps per second of all rows together, and proportional memory (PSS) per row in MiB."""

    name: str
    steps_per_s: float
    memory_mib: float


class AsGymnasium:
    """A SingleEnv for the peers: gymnasium.Env in all but inheritance, which ``make`` adds."""

    @staticmethod
    def make(simulator: Callable[[Any], SingleEnv], config: Any) -> Any:
        import gymnasium

        class Env(gymnasium.Env):
            def __init__(self) -> None:
                self.sim = simulator(config)
                spec = self.sim.spec
                state = gymnasium.spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32)
                boxes: dict[str, gymnasium.Space[Any]] = {"state": state}
                if spec.cameras:
                    shape = (len(spec.cameras), *spec.image_size, 3)
                    boxes["images"] = gymnasium.spaces.Box(0, 255, shape, np.uint8)
                self.observation_space = gymnasium.spaces.Dict(boxes)
                self.action_space = gymnasium.spaces.Box(-1, 1, (spec.action_dim,), np.float32)
                self.images = np.zeros((len(spec.cameras), *spec.image_size, 3), np.uint8)

            def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict]:
                self.sim.reset(task=0, seed=seed or 0)
                self.elapsed = 0
                return self.look(), {}

            def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict]:
                outcome = self.sim.step(action)
                self.elapsed += 1
                over = self.elapsed >= self.sim.spec.max_steps
                return self.look(), outcome.reward, outcome.terminated or outcome.success, over, {}

            def look(self) -> dict[str, np.ndarray]:
                state = np.zeros(self.sim.spec.state_dim, np.float32)
                self.sim.observe(images=self.images, state=state)
                return {"state": state, "images": self.images} if self.sim.spec.cameras else {"state": state}

        return Env()


def compare(config: PoolConfig, simulator: type[SingleEnv], *, seconds: float, chunk: int = 8) -> list[Measured]:
    """Ours and every installed peer in turn, in two rounds against drifting machines; the better round counts."""
    runs: dict[str, Callable[[], Measured]] = {
        "step and look": lambda: _ours(config, simulator, seconds=seconds, chunk=1),
        f"chunks of {chunk}": lambda: _ours(config, simulator, seconds=seconds, chunk=chunk),
        "gymnasium AsyncVectorEnv": lambda: _gymnasium(config, simulator, seconds=seconds),
    }
    if importlib.util.find_spec("stable_baselines3") is not None:
        runs["stable-baselines3 SubprocVecEnv"] = lambda: _stable_baselines(config, simulator, seconds=seconds)
    rounds = [[run() for run in runs.values()] for _ in range(2)]
    return [
        Measured(
            name=name,
            steps_per_s=max(first.steps_per_s, second.steps_per_s),
            memory_mib=min(first.memory_mib, second.memory_mib),
        )
        for name, first, second in zip(runs, *rounds, strict=True)
    ]


def _ours(config: PoolConfig, simulator: type[SingleEnv], *, seconds: float, chunk: int) -> Measured:
    env = ProcessPool(config, simulator)
    n = env.spec.num_envs
    seeds = iter(range(1 << 30))
    actions = torch.rand(n, chunk, env.spec.action_dim, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def act() -> int:
        if chunk == 1:
            step = env.step(actions[:, 0])
            done, executed = step.terminated | step.truncated, n
        else:
            whole = env.advance(actions, 1.0)
            done, executed = whole.done, int(whole.num_executed.sum())
        ended = done.nonzero().flatten().tolist()
        if ended:
            env.reset(ended, start=[StartState(task=0, seed=next(seeds)) for _ in ended])
        env.observe()
        return executed

    try:
        env.reset(start=[StartState(task=0, seed=next(seeds)) for _ in range(n)])
        env.observe()
        rate = _rate(act, seconds)
        memory = _memory_mib(env.worker_pids) / n
    finally:
        env.close()
    return Measured(name="", steps_per_s=rate, memory_mib=memory)


def _gymnasium(config: PoolConfig, simulator: type[SingleEnv], *, seconds: float) -> Measured:
    from gymnasium.vector import AsyncVectorEnv

    n = config.num_envs
    env = AsyncVectorEnv([lambda: AsGymnasium.make(simulator, config)] * n, shared_memory=True)
    try:
        env.reset(seed=0)
        action = np.random.default_rng(0).uniform(-1, 1, env.action_space.shape).astype(np.float32)

        def act() -> int:
            env.step(action)
            return n

        rate = _rate(act, seconds)
        memory = _memory_mib([process.pid for process in env.processes if process.pid]) / n
    finally:
        env.close()
    return Measured(name="", steps_per_s=rate, memory_mib=memory)


def _stable_baselines(config: PoolConfig, simulator: type[SingleEnv], *, seconds: float) -> Measured:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    n = config.num_envs
    env = SubprocVecEnv([lambda: AsGymnasium.make(simulator, config)] * n, start_method="fork")
    try:
        env.reset()
        action = np.stack([env.action_space.sample() for _ in range(n)])

        def act() -> int:
            env.step(action)
            return n

        rate = _rate(act, seconds)
        memory = _memory_mib([process.pid for process in env.processes]) / n
    finally:
        env.close()
    return Measured(name="", steps_per_s=rate, memory_mib=memory)


def _rate(act: Callable[[], int], seconds: float) -> float:
    act()
    started, steps = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        steps += act()
    return steps / passed


def _memory_mib(pids: list[int]) -> float:
    """Proportional set sizes: a page that k processes share counts 1/k in each."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024
