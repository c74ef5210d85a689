"""Another library's vectorisation around one of our simulators, measured in the simulator's own interpreter.

    python -c BOOTSTRAP ... '{"module", "simulator", "config", "peer", "num_envs", "seconds"}'

prints {"steps_per_s", "memory_mib"} as its last line: control steps per second of all rows together, looking at every
step as these interfaces do, and proportional memory (PSS) per row.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sims.errors import UserError
from sims.single_env import SingleEnv
from sims.worker import load

Rate = tuple[float, float]


def main(request: str) -> None:
    asked = json.loads(request)

    def make() -> SingleEnv:
        simulator, config = load(asked)
        return simulator(config)

    steps_per_s, memory_mib = PEERS[asked["peer"]](make, asked["num_envs"], asked["seconds"])
    print(json.dumps({"steps_per_s": steps_per_s, "memory_mib": memory_mib}), flush=True)


def _gymnasium(make: Callable[[], SingleEnv], n: int, seconds: float) -> Rate:
    from gymnasium.vector import AsyncVectorEnv

    env = AsyncVectorEnv([lambda: as_gymnasium(make)] * n, shared_memory=True)
    try:
        env.reset(seed=0)
        action = np.random.default_rng(0).uniform(-1, 1, env.action_space.shape).astype(np.float32)
        return rate(lambda: env.step(action), n, seconds), memory_mib(
            [process.pid for process in env.processes if process.pid]
        ) / n
    finally:
        env.close()


def _stable_baselines(make: Callable[[], SingleEnv], n: int, seconds: float) -> Rate:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([lambda: as_gymnasium(make)] * n, start_method="fork")
    try:
        env.reset()
        action = np.stack([env.action_space.sample() for _ in range(n)])
        return rate(lambda: env.step(action), n, seconds), memory_mib(
            [process.pid for process in env.processes if process.pid]
        ) / n
    finally:
        env.close()


def _libero(make: Callable[[], SingleEnv], n: int, seconds: float) -> Rate:
    package = importlib.util.find_spec("libero")
    if package is None or not package.submodule_search_locations:
        raise UserError("LIBERO is not in this interpreter, so its SubprocVectorEnv cannot be measured")
    # by its file, since importing the package asks questions on the terminal
    path = Path(next(iter(package.submodule_search_locations))) / "libero" / "envs" / "venv.py"
    spec = importlib.util.spec_from_file_location("libero_venv", path)
    assert spec is not None and spec.loader is not None
    venv = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(venv)
    env = venv.SubprocVectorEnv([lambda: as_gymnasium(make, autoreset=True)] * n)
    try:
        env.reset()
        action = np.random.default_rng(0).uniform(-1, 1, (n, *env.action_space[0].shape)).astype(np.float32)
        pids = [worker.process.pid for worker in env.workers]
        return rate(lambda: env.step(action), n, seconds), memory_mib(pids) / n
    finally:
        env.close()


PEERS: dict[str, Callable[[Callable[[], SingleEnv], int, float], Rate]] = {
    "gymnasium": _gymnasium,  # AsyncVectorEnv
    "stable-baselines3": _stable_baselines,  # SubprocVecEnv
    "libero": _libero,  # LIBERO's SubprocVectorEnv
}


def _memory(processes: list[Any]) -> float:
    return memory_mib([process.pid for process in processes])


def as_gymnasium(make: Callable[[], SingleEnv], *, autoreset: bool = False) -> Any:
    """A SingleEnv for the peers. ``autoreset``: for a peer that leaves it to the environment."""
    import gymnasium

    class Env(gymnasium.Env):
        def __init__(self) -> None:
            self.sim = make()
            spec = self.sim.spec
            boxes: dict[str, Any] = {"state": gymnasium.spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32)}
            shape = (len(spec.cameras), *spec.image_size, 3)
            if spec.cameras:
                boxes["images"] = gymnasium.spaces.Box(0, 255, shape, np.uint8)
            self.observation_space = gymnasium.spaces.Dict(boxes)
            self.action_space = gymnasium.spaces.Box(-1, 1, (spec.action_dim,), np.float32)
            self.images = np.zeros(shape, np.uint8)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.sim.reset(task=0, seed=seed or 0)
            self.elapsed = 0
            return self.look(), {}

        def step(self, action: np.ndarray) -> Any:
            outcome = self.sim.step(action)
            self.elapsed += 1
            ended, over = outcome.terminated or outcome.success, self.elapsed >= self.sim.spec.max_steps
            seen = self.look()
            if autoreset and (ended or over):
                self.reset()
            return seen, outcome.reward, ended, over, {}

        def look(self) -> dict[str, np.ndarray]:
            state = np.zeros(self.sim.spec.state_dim, np.float32)
            self.sim.observe(images=self.images, state=state)
            return {"state": state, "images": self.images} if self.sim.spec.cameras else {"state": state}

    return Env()


def rate(act: Callable[[], object], steps: int, seconds: float) -> float:
    """``act`` takes ``steps`` control steps; the first call warms up."""
    act()
    started, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        act()
        calls += 1
    return calls * steps / passed


def memory_mib(pids: list[int]) -> float:
    """Proportional set sizes: a page that k processes share counts 1/k in each."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024
