"""Measure another library's vectorization of one of this project's simulators, in the simulator's own interpreter.

    python -c BOOTSTRAP ... '{"module", "simulator", "config", "peer", "num_envs"}'

reads durations in seconds from standard input, one per line, runs the peer for that long, observing at every step as
these interfaces do, and answers with a TimeSlice as a line of JSON.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sims.errors import UserError
from sims.subproc.single_env import SingleEnv
from sims.subproc.worker import load

NUM_ACTIONS = 64


@dataclass(frozen=True, kw_only=True)
class TimeSlice:
    """``steps`` control steps of all environments together in ``seconds``, with ``cpu_s`` of user and system time.

    ``memory_mib``: of the environments' processes. ``parent_mib``: of the process they were forked from.
    """

    steps: int
    seconds: float
    cpu_s: float
    memory_mib: float
    parent_mib: float


@dataclass(frozen=True, kw_only=True)
class Contender:
    """``act`` takes some control steps, observes, and returns how many steps. ``pids``: forked from ``parent``."""

    act: Callable[[], int]
    parent: int
    pids: Sequence[int]
    close: Callable[[], object]

    def run(self, seconds: float) -> TimeSlice:
        pids = {os.getpid(), self.parent, *self.pids}
        started, cpu_s, steps = time.perf_counter(), cpu_seconds(pids), 0
        while (passed := time.perf_counter() - started) < seconds:
            steps += self.act()
        return TimeSlice(
            steps=steps,
            seconds=passed,
            cpu_s=cpu_seconds(pids) - cpu_s,
            memory_mib=sum(map(memory_mib, self.pids)),
            parent_mib=memory_mib(self.parent),
        )


def main(request: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # simulators may print to standard output
    requested = json.loads(request)

    def make() -> SingleEnv:
        simulator, config = load(requested)
        env: SingleEnv = simulator(config)
        return env

    contender = PEERS[requested["peer"]](make, requested["num_envs"])
    try:
        contender.act()
        for line in sys.stdin:
            print(json.dumps(dataclasses.asdict(contender.run(float(line)))), file=answers, flush=True)
    finally:
        contender.close()


def random_actions(num_envs: int, action_dim: int) -> np.ndarray:
    """The same for all contenders, float32 [NUM_ACTIONS, N, A], used in turn."""
    return np.random.default_rng(0).uniform(-1, 1, (NUM_ACTIONS, num_envs, action_dim)).astype(np.float32)


def _gymnasium(make: Callable[[], SingleEnv], n: int) -> Contender:
    from gymnasium.vector import AsyncVectorEnv

    env = AsyncVectorEnv([lambda: as_gymnasium(make)] * n, shared_memory=True)
    env.reset(seed=0)
    pids = [process.pid for process in env.processes if process.pid]
    return _contender(env, n, env.single_action_space, pids)


def _stable_baselines(make: Callable[[], SingleEnv], n: int) -> Contender:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([lambda: as_gymnasium(make)] * n, start_method="fork")
    env.reset()
    return _contender(env, n, env.action_space, [process.pid for process in env.processes if process.pid])


def _libero(make: Callable[[], SingleEnv], n: int) -> Contender:
    package = importlib.util.find_spec("libero")
    if package is None or not package.submodule_search_locations:
        raise UserError("LIBERO is not in this interpreter, so its SubprocVectorEnv cannot be measured")
    # From its file, because importing the package asks questions on the terminal.
    path = Path(next(iter(package.submodule_search_locations))) / "libero" / "envs" / "venv.py"
    spec = importlib.util.spec_from_file_location("libero_venv", path)
    assert spec is not None and spec.loader is not None
    venv = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(venv)
    env = venv.SubprocVectorEnv([lambda: as_gymnasium(make, autoreset=True)] * n)
    env.reset()
    return _contender(env, n, env.action_space[0], [worker.process.pid for worker in env.workers])


def _contender(env: Any, n: int, action_space: Any, pids: list[int]) -> Contender:
    actions, taken = random_actions(n, *action_space.shape), 0

    def act() -> int:
        nonlocal taken
        env.step(actions[taken % NUM_ACTIONS])
        taken += 1
        return n

    return Contender(act=act, parent=os.getpid(), pids=pids, close=env.close)


PEERS: dict[str, Callable[[Callable[[], SingleEnv], int], Contender]] = {
    "gymnasium": _gymnasium,  # AsyncVectorEnv
    "stable-baselines3": _stable_baselines,  # SubprocVecEnv
    "libero": _libero,  # LIBERO's SubprocVectorEnv
}


def as_gymnasium(make: Callable[[], SingleEnv], *, autoreset: bool = False) -> Any:
    """A SingleEnv as a gymnasium.Env. ``autoreset``: for a peer that expects the environment to reset itself."""
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
            self.episodes = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.sim.reset(task=0, seed=self.episodes if seed is None else seed)
            self.episodes += 1
            self.elapsed = 0
            return self.observe(), {}

        def step(self, action: np.ndarray) -> Any:
            result = self.sim.step(action)
            self.elapsed += 1
            ended, over = result.terminated or result.success, self.elapsed >= self.sim.spec.max_steps
            obs = self.observe()
            if autoreset and (ended or over):
                self.reset()
            return obs, result.reward, ended, over, {}

        def observe(self) -> dict[str, np.ndarray]:
            state = np.zeros(self.sim.spec.state_dim, np.float32)
            self.sim.observe(images=self.images, state=state)
            return {"state": state, "images": self.images} if self.sim.spec.cameras else {"state": state}

    return Env()


def cpu_seconds(pids: Collection[int]) -> float:
    """User and system time that these processes have used."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # Linux's clock id of a process, all its threads


def memory_mib(pid: int) -> float:
    """Proportional set size without mapped files: other processes share those."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return (kib["Pss"] - kib["Pss_File"]) / 1024
