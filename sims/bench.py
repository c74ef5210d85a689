"""``vla-rl bench sim --sim X``: this project's worker processes beside other libraries' vectorisation, in one run.

Both sides run the same simulator in the same interpreter with random actions. The peers' interfaces observe at every
step. Ours is measured twice: the same way (step, then observe), and as a chunked policy uses it (a chunk of steps, one
look).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sims.errors import UserError
from sims.peers import PEERS, memory_mib, rate
from sims.process_pool import ProcessPool
from sims.single_env import SingleEnv
from sims.vector_env import StartState
from sims.worker_config import environment_of, interpreter_of
from sims.worker_group import PoolConfig
from sims.worker_process import bootstrap

STEP_AND_LOOK = "step and look"
BORROWED = """
import sys
sys.path.append(sys.argv[3])  # after its own packages: a peer that this interpreter lacks is the trainer's
from sims.peers import main
main(sys.argv[1])
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Control steps per second of all rows together, and proportional memory (PSS) per row in MiB."""

    name: str
    steps_per_s: float
    memory_mib: float

    @property
    def ours(self) -> bool:
        return self.name not in PEERS


def compare(
    config: PoolConfig, simulator: type[SingleEnv], *, against: Sequence[str], seconds: float, chunk: int = 8
) -> list[Measured]:
    """Ours and the peers ``against`` in turn, in two rounds against drifting machines; the better round counts.

    Raises UserError for a peer that is unknown or does not run.
    """
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        STEP_AND_LOOK: lambda: _ours(config, simulator, seconds=seconds, chunk=1),
        f"chunks of {chunk}": lambda: _ours(config, simulator, seconds=seconds, chunk=chunk),
    }
    for peer in against:
        if peer not in PEERS:
            raise UserError(f"--against: there is no {peer!r}; there are {', '.join(PEERS)}")
        runs[peer] = lambda peer=peer: _peer(config, simulator, peer, seconds=seconds)  # type: ignore[misc]
    rounds = [[run() for run in runs.values()] for _ in range(2)]
    return [
        Measured(name=name, steps_per_s=max(one[0], two[0]), memory_mib=min(one[1], two[1]))
        for name, one, two in zip(runs, *rounds, strict=True)
    ]


def _ours(config: PoolConfig, simulator: type[SingleEnv], *, seconds: float, chunk: int) -> tuple[float, float]:
    env = ProcessPool(config, simulator)
    n = env.spec.num_envs
    seeds = iter(range(1 << 30))
    actions = torch.rand(n, chunk, env.spec.action_dim, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def act() -> None:
        step = env.step(actions[:, 0]) if chunk == 1 else env.advance(actions, 1.0)
        ended = (step.terminated | step.truncated).nonzero().flatten().tolist()
        if ended:
            env.reset(ended, start=[StartState(task=0, seed=next(seeds)) for _ in ended])
        env.observe()

    try:
        env.reset(start=[StartState(task=0, seed=next(seeds)) for _ in range(n)])
        for _ in range(3):
            act()
        return rate(act, n * chunk, seconds), memory_mib(env.worker_pids) / n
    finally:
        env.close()


def _peer(config: PoolConfig, simulator: type[SingleEnv], peer: str, *, seconds: float) -> tuple[float, float]:
    """In a process of its own, with the interpreter and the environment variables of our workers."""
    request = {
        "module": simulator.__module__,
        "simulator": simulator.__qualname__,
        "config": dataclasses.asdict(config),  # type: ignore[call-overload]
        "peer": peer,
        "num_envs": config.num_envs,
        "seconds": seconds,
    }
    code, packages = bootstrap(simulator, BORROWED)
    done = subprocess.run(
        [interpreter_of(config.workers, config.name), "-c", code, json.dumps(request), packages, _site_packages()],
        env={**os.environ, **environment_of(config.workers, 0)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UserError(f"bench sim: {peer} failed around {config.name}:\n{done.stderr.strip()[-1500:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result["steps_per_s"], result["memory_mib"]


def _site_packages() -> str:
    return str(Path(torch.__file__).parents[1])
