"""``vla-rl bench sim --sim X``: compare this project's worker processes with other libraries' vectorization.

Both sides run the same simulator in the same interpreter with the same random actions. The peers' interfaces observe
at every step. Ours is measured twice: the same way (step, then observe), and as a chunked policy uses it (a chunk of
steps, one observation). All contenders are started first and then run in turn for short time slices, so that other load
on the machine affects all of them equally.
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

from sims.bench.peers import NUM_ACTIONS, PEERS, Contender, TimeSlice, random_actions
from sims.errors import UserError
from sims.subproc.bootstrap import bootstrap, named
from sims.subproc.single_env import SimulatorClass
from sims.subproc.vector_env import SubprocVectorEnv
from sims.subproc.worker_config import WorkerPoolConfig, environment_variables, interpreter_of
from sims.vector_env import StartState

SLICE_S = 0.5
STEP_AND_OBSERVE = "step and observe"
PEER_PROGRAM = """
import sys
sys.path.append(sys.argv[3])  # after its own packages: a peer that is missing here is taken from the trainer
from sims.bench.peers import main
main(sys.argv[1])
"""
Run = Callable[[float], TimeSlice]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """``slices``: one of each round; the k-th slices of all contenders are seconds apart."""

    name: str
    num_envs: int
    slices: tuple[TimeSlice, ...]

    @property
    def ours(self) -> bool:
        return self.name not in PEERS

    @property
    def steps_per_s(self) -> float:
        """Control steps per second of all environments together: the median slice."""
        return median(part.steps / part.seconds for part in self.slices)

    @property
    def cpu_ms(self) -> float:
        """Processor time per control step, of all processes."""
        return 1000.0 * sum(part.cpu_s for part in self.slices) / sum(part.steps for part in self.slices)

    @property
    def memory_mib(self) -> float:
        """Memory per environment's process, with a proportional share of shared memory."""
        return max(part.memory_mib for part in self.slices) / self.num_envs

    @property
    def parent_mib(self) -> float:
        """Memory of the process from which the environments' processes were forked; it exists once."""
        return max(part.parent_mib for part in self.slices)

    def speed_over(self, other: Measurement) -> float:
        """The median over rounds of the ratio of both rates."""
        pairs = zip(self.slices, other.slices, strict=True)
        return median((mine.steps / mine.seconds) / (its.steps / its.seconds) for mine, its in pairs)


def compare(
    config: WorkerPoolConfig, simulator: SimulatorClass, *, against: Sequence[str], seconds: float, chunk: int = 8
) -> list[Measurement]:
    """Ours and the peers ``against``, each for ``seconds`` in all, ours first.

    Raises UserError for a peer that is unknown or does not run.
    """
    unknown = [peer for peer in against if peer not in PEERS]
    if unknown:
        raise UserError(f"--against: there is no {unknown[0]!r}; there are {', '.join(PEERS)}")
    with ExitStack() as running:
        runs: dict[str, Run] = {
            STEP_AND_OBSERVE: running.enter_context(_ours(config, simulator, chunk=1)),
            f"chunks of {chunk}": running.enter_context(_ours(config, simulator, chunk=chunk)),
        }
        for peer in against:
            runs[peer] = running.enter_context(_peer(config, simulator, peer))
        slices: dict[str, list[TimeSlice]] = {name: [] for name in runs}
        names = list(runs)
        for _ in range(max(3, round(seconds / SLICE_S))):
            for name in names:
                slices[name].append(runs[name](SLICE_S))
            names.append(names.pop(0))  # no contender always follows the same other one
    return [Measurement(name=name, num_envs=config.num_envs, slices=tuple(parts)) for name, parts in slices.items()]


@contextmanager
def _ours(config: WorkerPoolConfig, simulator: SimulatorClass, *, chunk: int) -> Iterator[Run]:
    """Worker processes that take ``chunk`` steps, then observe."""
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
            done, steps = step.done, n
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
        yield Contender(act=act, parent=env.fork_server_pid, pids=env.worker_pids, close=env.close).run
    finally:
        env.close()


@contextmanager
def _peer(config: WorkerPoolConfig, simulator: SimulatorClass, peer: str) -> Iterator[Run]:
    """A peer in a process of its own, with the interpreter and the environment variables of our workers."""
    request = named(simulator, config) | {"peer": peer, "num_envs": config.num_envs}
    code, packages = bootstrap(simulator, config, PEER_PROGRAM)
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            [interpreter_of(config.workers, config.name), "-c", code, json.dumps(request), packages, _site_packages()],
            env={**os.environ, **environment_variables(config.workers, 0)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(seconds: float) -> TimeSlice:
            with contextlib.suppress(BrokenPipeError):
                requests.write(f"{seconds}\n")
                requests.flush()
            line = answers.readline()
            if line:
                return TimeSlice(**json.loads(line))
            stderr.seek(0)
            raise UserError(f"bench sim: {peer} failed around {config.name}:\n{stderr.read().strip()[-1500:]}")

        try:
            run(0.0)
            yield run
        finally:
            with contextlib.suppress(BrokenPipeError):
                requests.close()
            process.wait(60.0)
            answers.close()


def _site_packages() -> str:
    return str(Path(torch.__file__).parents[1])
