"""A simulator with predictable values and configurable faults, to test worker processes, which import this module: it
needs no torch."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sims.subproc.single_env import Reward, SingleSpec, StepResult
from sims.subproc.worker_config import WorkerPoolConfig

FAULT_SEED = 1000  # the fault happens at the step seed - FAULT_SEED


@dataclass(frozen=True, kw_only=True)
class CountingConfig(WorkerPoolConfig):
    """``goal``: success when the position reaches it. ``fault``: what happens at the step that the seed names.

    ``preload``: modules to import; the fingerprint has those that are imported. ``stderr_bytes``: written per step.
    ``instructions``: of its two tasks, where they are not their names.
    """

    name: Literal["counting"] = "counting"
    num_envs: int = 1
    max_steps: int = 12
    goal: float = 5.0
    reward: Reward = "shaped"  # its position
    image_side: int = 8
    step_s: float = 0.0
    fault: Literal["none", "raise", "segfault", "hang", "stop", "exit", "construct", "observe"] = "none"
    preload: tuple[str, ...] = ()
    stderr_bytes: int = 0
    instructions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PublishedConfig(CountingConfig):
    """Of a benchmark that publishes two starts of each task."""

    def evaluation_starts(self, num_tasks: int, episodes: int | None) -> list[tuple[int, int]]:
        return [(task, seed) for seed in (7, 11) for task in range(num_tasks)][:episodes]

    def under_protocol(self, name: str) -> PublishedConfig:
        return self


class Counting:
    """The position moves by the action; reward = position after the step. Every pixel shows the elapsed steps."""

    def __init__(self, config: CountingConfig) -> None:
        if config.fault == "construct":
            raise RuntimeError("no such robot: R2D2")
        self.config = config
        self.spec = SingleSpec(
            name="counting", action_dim=2, state_dim=3, cameras=("front", "wrist"),
            image_size=(config.image_side, config.image_side), control_hz=10.0, max_steps=config.max_steps,
            tasks=("go up", "go down"), instructions=config.instructions,
            fingerprint={"preloaded": " ".join(name for name in config.preload if name in sys.modules)},
        )  # fmt: skip

    @staticmethod
    def preload(config: CountingConfig) -> None:
        for name in config.preload:
            importlib.import_module(name)

    def reset(self, *, task: int, seed: int) -> None:
        self.seed, self.elapsed = seed, 0
        self.position = float(np.random.default_rng(seed).uniform(0, 0.5))
        self.sign = 1.0 - 2.0 * task

    def step(self, action: np.ndarray) -> StepResult:
        time.sleep(self.config.step_s)
        os.write(2, b"." * self.config.stderr_bytes)
        if self.seed == FAULT_SEED + self.elapsed and self.config.fault != "observe":
            self._fail()
        self.elapsed += 1
        self.position += self.sign * float(action[0])
        reached = self.position >= self.config.goal
        reward = self.position if self.config.reward == "shaped" else None
        return StepResult(reward=reward, success=reached)

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        if self.seed == FAULT_SEED + self.elapsed and self.config.fault == "observe":
            raise RuntimeError("the camera fell off")
        images[:] = self.elapsed
        state[:] = self.position, self.elapsed, self.seed % 1009

    demonstrates = True

    def demonstrate(self) -> np.ndarray:
        return np.array([self.sign, 0.0])

    def close(self) -> None: ...

    def _fail(self) -> None:
        fault = self.config.fault
        if fault == "raise":
            raise RuntimeError("the gripper fell off")
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "hang":
            time.sleep(1000)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "exit":
            os._exit(3)
