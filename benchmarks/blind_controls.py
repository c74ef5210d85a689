"""What controllers reach in the tabletop tasks that do not look at the scene, or do not read the instruction.

    python -m benchmarks.blind_controls [--episodes 200]

* constant: one action throughout, the best of 54 directions and gripper commands, chosen on other starts. At most .05.
* replayed: the actions of a perfect demonstration from another start. At most .10.
* instruction-blind: the expert, told the named candidate and each other one as often. At most 1 / candidates + .05.
* state-only: sees the robot's state and the time, acts as in the nearest states of perfect demonstrations. At most .10.
* expert: the scripted expert, which sees everything. Must be 1.

Success in the split train, without cameras. Writes benchmarks/results/blind_controls.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sims.numbers.statistics import wilson_interval
from sims.starts import StartSequence
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.tabletop.demonstrators.biased import BiasedDemonstrator
from sims.tabletop.tasks.registry import TASKS, all_tasks
from sims.vector_env import StartState
from vla_rl.bench.record import row, write_record

CONSTANTS = torch.tensor(
    [(x, y, z, 0, 0, 0, grip) for x, y, z in itertools.product((-1.0, 0.0, 1.0), repeat=3) for grip in (-1.0, 1.0)]
)
CHOICE_EPISODES = 24  # for each constant action
NEIGHBORS = 3
Act = Callable[[TabletopEnv, int], Float[Tensor, "N 7"]]  # of the environment and the control step


@dataclass(frozen=True)
class Demonstrations:
    """Perfect episodes: the robot's state and the action at each control step, zeros after the end of an episode."""

    states: Float[Tensor, "steps N 8"]
    actions: Float[Tensor, "steps N 7"]
    running: Bool[Tensor, "steps N"]


def starts(count: int, seed: int) -> list[StartState]:
    return StartSequence("evaluation", seed=seed, num_tasks=1).take(count)


def play(name: str, start: Sequence[StartState], act: Act) -> Bool[Tensor, " N"]:
    """Success of every start."""
    env = TabletopEnv(TabletopConfig(tasks=(name,), num_envs=len(start), cameras=()))
    env.reset(start=start)
    for t in range(env.spec.max_steps):
        step = env.step(act(env, t))
    env.close()
    return step.success


def constant(name: str, action: Float[Tensor, "N 7"], start: Sequence[StartState]) -> Bool[Tensor, " N"]:
    return play(name, start, lambda env, t: action)


def best_constant(name: str, *, seed: int) -> Float[Tensor, " 7"]:
    """That of CONSTANTS with most successes in CHOICE_EPISODES starts."""
    actions = CONSTANTS.repeat_interleave(CHOICE_EPISODES, dim=0)
    success = constant(name, actions, starts(CHOICE_EPISODES, seed) * len(CONSTANTS))
    return CONSTANTS[success.view(len(CONSTANTS), -1).float().mean(1).argmax()]


def demonstrate(name: str, start: Sequence[StartState]) -> tuple[Demonstrations, Bool[Tensor, " N"]]:
    """What the expert does, and whether it succeeds."""
    env = TabletopEnv(TabletopConfig(tasks=(name,), num_envs=len(start), cameras=()))
    env.reset(start=start)
    expert = env.expert(noise=0.0, seed=0)
    states, actions, running = [], [], [torch.ones(len(start), dtype=torch.bool)]
    for _ in range(env.spec.max_steps):
        states.append(env.observe().state)
        actions.append(torch.where(running[-1][:, None], expert.act(), 0.0))
        step = env.step(actions[-1])
        running.append(~step.done)
    env.close()
    return Demonstrations(torch.stack(states), torch.stack(actions), torch.stack(running[:-1])), step.success


def replayed(name: str, demonstrations: Demonstrations, start: Sequence[StartState]) -> Bool[Tensor, " N"]:
    """Start i with the actions of demonstration i; the gripper stays as it was at the end."""
    return play(name, start, lambda env, t: demonstrations.actions[t, : len(start)])


class ToldCandidate:
    """An environment as a demonstrator sees it, with ``candidate`` in place of the named ones."""

    def __init__(self, env: TabletopEnv, candidate: Int[Tensor, " N"]) -> None:
        self._env, self.candidate = env, candidate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def instruction_blind(name: str, start: Sequence[StartState]) -> Bool[Tensor, " N"]:
    """The expert, told the named candidate, the next one, and so on in turn.

    The mean is what a random candidate reaches, without the chance of the draw: 200 random ones of two candidates named
    the right one in 60 % of the episodes.
    """
    experts: list[BiasedDemonstrator] = []

    def act(env: TabletopEnv, t: int) -> Tensor:
        if not experts:
            told = (env.candidate + torch.arange(len(start))) % len(all_tasks()[name].candidates)
            experts.append(BiasedDemonstrator(ToldCandidate(env, told), noise=0.0, seed=0))
        return experts[0].act()

    return play(name, start, act)


def state_only(name: str, demonstrations: Demonstrations, start: Sequence[StartState]) -> Bool[Tensor, " N"]:
    """The mean action of the NEIGHBORS demonstrated states that are nearest to the present state and time."""
    time = torch.linspace(0, 1, len(demonstrations.states))
    known = torch.cat([demonstrations.states, time[:, None, None].expand(-1, demonstrations.states.shape[1], 1)], dim=2)
    known, actions = known[demonstrations.running], demonstrations.actions[demonstrations.running]
    scale = known.std(0).clamp(min=1e-3)

    def act(env: TabletopEnv, t: int) -> Tensor:
        seen = torch.cat([env.observe().state, time[t].expand(len(start), 1)], dim=1)
        nearest = torch.cdist(seen / scale, known / scale).topk(NEIGHBORS, largest=False).indices
        return actions[nearest].mean(1)

    return play(name, start, act)


def limits(name: str) -> dict[str, float]:
    """The most that each control may reach."""
    blind = 1 / len(all_tasks()[name].candidates) + 0.05
    return {"constant": 0.05, "replayed": 0.10, "instruction-blind": blind, "state-only": 0.10}


def measure(name: str, episodes: int) -> dict[str, Bool[Tensor, " N"]]:
    """Success of every control in fresh starts."""
    fresh, demonstrated = starts(episodes, seed=0), starts(episodes, seed=1)
    demonstrations, expert = demonstrate(name, demonstrated)
    action = best_constant(name, seed=2)
    return {
        "expert": expert,
        "constant": constant(name, action.expand(episodes, 7), fresh),
        "replayed": replayed(name, demonstrations, fresh),
        "instruction-blind": instruction_blind(name, fresh),
        "state-only": state_only(name, demonstrations, fresh),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    episodes = parser.parse_args().episodes
    torch.set_num_threads(1)
    rows = []
    for name in TASKS:
        for control, success in measure(name, episodes).items():
            wins = int(success.sum())
            limit = limits(name).get(control)
            against = "at least 1" if limit is None else f"at most {limit:.3g}"
            interval = wilson_interval(wins, episodes)
            rows.append(row(f"{name}, {control}", wins / episodes, "1", against=against, interval=interval))
            print(f"{rows[-1]['name']}: {wins / episodes:.3f} ({against})", file=sys.stderr, flush=True)
    command = "python -m benchmarks.blind_controls " + " ".join(sys.argv[1:])
    print(write_record("blind_controls", rows, command=command.strip()))


if __name__ == "__main__":
    main()
