"""``vla-rl bench sim --sim X``: this project's worker processes beside other libraries' vectorization, in one run.

Both sides run the same simulator in the same interpreter with the same random actions. The peers' interfaces observe
at every step. Ours is measured twice: the same way (step, then observe), and as a chunked policy uses it (a chunk of
steps, one look). All stand ready and are driven in turns for short slices: what else the machine does hits all alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from sims.bench.peers import NUM_ACTIONS, PEERS, Driven, Slice, random_actions
from sims.errors import UserError
from sims.subproc.single_env import SingleEnv
from sims.subproc.vector_env import SubprocVectorEnv
from sims.subproc.worker_config import environment_of, interpreter_of
from sims.subproc.worker_group import PoolConfig
from sims.subproc.worker_process import bootstrap, named
from sims.vector_env import StartState

SLICE_S = 0.5
STEP_AND_LOOK = "step and look"
BORROWED = """
import sys
sys.path.append(sys.argv[3])  # after its own packages: a peer that this interpreter lacks is the trainer's
from sims.bench.peers import main
main(sys.argv[1])
"""
Run = Callable[[float], Slice]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """``slices``: one of each round, so the k-th of all contenders were taken within seconds."""

    name: str
    num_envs: int
    slices: tuple[Slice, ...]

    @property
    def ours(self) -> bool:
        return self.name not in PEERS

    @property
    def steps_per_s(self) -> float:
        """Control steps per second of all rows together: the median slice."""
        return median(part.steps / part.seconds for part in self.slices)

    @property
    def cpu_ms(self) -> float:
        """Processor time per control step, of all processes."""
        return 1000.0 * sum(part.cpu_s for part in self.slices) / sum(part.steps for part in self.slices)

    @property
    def memory_mib(self) -> float:
        """Of a row's process, in its share of what several have in common."""
        return max(part.memory_mib for part in self.slices) / self.num_envs

    @property
    def parent_mib(self) -> float:
        """What is there once, however many rows: the process that theirs were forked from."""
        return max(part.parent_mib for part in self.slices)

    def speed_over(self, other: Measured) -> float:
        """The median over rounds of the ratio of both rates."""
        pairs = zip(self.slices, other.slices, strict=True)
        return median((mine.steps / mine.seconds) / (its.steps / its.seconds) for mine, its in pairs)


def compare(
    config: PoolConfig, simulator: type[SingleEnv], *, against: Sequence[str], seconds: float, chunk: int = 8
) -> list[Measured]:
    """Ours and the peers ``against``, each for ``seconds`` in all, ours first.

    Raises UserError for a peer that is unknown or does not run.
    """
    unknown = [peer for peer in against if peer not in PEERS]
    if unknown:
        raise UserError(f"--against: there is no {unknown[0]!r}; there are {', '.join(PEERS)}")
    with ExitStack() as running:
        runs: dict[str, Run] = {
            STEP_AND_LOOK: running.enter_context(_ours(config, simulator, chunk=1)),
            f"chunks of {chunk}": running.enter_context(_ours(config, simulator, chunk=chunk)),
        }
        for peer in against:
            runs[peer] = running.enter_context(_peer(config, simulator, peer))
        slices: dict[str, list[Slice]] = {name: [] for name in runs}
        names = list(runs)
        for _ in range(max(3, round(seconds / SLICE_S))):
            for name in names:
                slices[name].append(runs[name](SLICE_S))
            names.append(names.pop(0))  # nobody always follows the same one
    return [Measured(name=name, num_envs=config.num_envs, slices=tuple(parts)) for name, parts in slices.items()]


@contextmanager
def _ours(config: PoolConfig, simulator: type[SingleEnv], *, chunk: int) -> Iterator[Run]:
    """A pool that takes ``chunk`` steps, then looks."""
    env = SubprocVectorEnv(config, simulator)
    n = env.spec.num_envs
    seeds = iter(range(1 << 30))
    actions = torch.from_numpy(random_actions(n, env.spec.action_dim)).transpose(0, 1)
    taken = 0

    def act() -> int:
        nonlocal taken
        first = taken % NUM_ACTIONS
        taken += chunk
        if chunk == 1:
            step = env.step(actions[:, first])
            done, steps = step.terminated | step.truncated, n
        else:
            chunk_step = env.advance(actions[:, first : first + chunk], 1.0)
            done, steps = chunk_step.done, int(chunk_step.num_executed.sum())
        ended = done.nonzero().flatten().tolist()
        if ended:
            env.reset(ended, start=[StartState(task=0, seed=next(seeds)) for _ in ended])
        env.observe()
        return steps

    try:
        env.reset(start=[StartState(task=0, seed=next(seeds)) for _ in range(n)])
        act()
        yield Driven(act=act, parent=env.fork_server_pid, pids=env.worker_pids, close=env.close).run
    finally:
        env.close()


@contextmanager
def _peer(config: PoolConfig, simulator: type[SingleEnv], peer: str) -> Iterator[Run]:
    """A peer in a process of its own, with the interpreter and the environment variables of our workers."""
    request = named(simulator, config) | {"peer": peer, "num_envs": config.num_envs}
    code, packages = bootstrap(simulator, BORROWED)
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            [interpreter_of(config.workers, config.name), "-c", code, json.dumps(request), packages, _site_packages()],
            env={**os.environ, **environment_of(config.workers, 0)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def run(seconds: float) -> Slice:
            with contextlib.suppress(BrokenPipeError):
                asks.write(f"{seconds}\n")
                asks.flush()
            line = answers.readline()
            if line:
                return Slice(**json.loads(line))
            stderr.seek(0)
            raise UserError(f"bench sim: {peer} failed around {config.name}:\n{stderr.read().strip()[-1500:]}")

        try:
            run(0.0)
            yield run
        finally:
            with contextlib.suppress(BrokenPipeError):
                asks.close()
            process.wait(60.0)
            answers.close()


def _site_packages() -> str:
    return str(Path(torch.__file__).parents[1])
